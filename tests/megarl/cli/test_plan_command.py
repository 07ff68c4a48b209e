"""`megarl plan`: what it prints, draws and refuses."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from file_sizes import files_up_to

from converters.architectures import read_architecture
from converters.layouts.megatron import ParallelSizes, megatron_layout
from megarl.cli.main import main

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
TRAINER = ["--gpus", "16", "--tp", "2", "--pp", "2", "--ep", "4", "--etp", "1"]
SHAPES = read_architecture(CONFIG).hf_shapes
BYTES = 2 * sum(map(prod, SHAPES.values()))
MATRICES = [shape for name, shape in SHAPES.items() if len(shape) == 2 and "layers" in name and "gate.w" not in name]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps({**CONFIG, "vocab_size": 1024}))
    monkeypatch.chdir(tmp_path)
    return "model.json"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--model", "model.json", *TRAINER, *words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    return json.loads(said.out)


def test_an_engine_on_one_gpu_gets_every_byte_of_the_model_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = planned(capsys, "--replicas", "3", "--gpus-per-node", "1")
    assert (facts["command"], facts["engine_gpus"], facts["cluster"]["nodes"]) == ("plan", 1, 16 + 3)
    assert facts["bytes_needed"] == facts["bytes_sent"] == 3 * BYTES
    assert facts["bytes_relayed"] == 0
    assert facts["loads"]["NIC in"]["most"] == BYTES
    assert facts["lower_bound_seconds"] == pytest.approx(BYTES / 50e9)
    assert facts["transfer_over_lower_bound"] == pytest.approx(1.0)
    assert facts["lower_bound_seconds"] <= facts["transfer_seconds"] <= facts["simulated_seconds"]
    assert facts["extra_bytes_per_gpu"] == 2 * 512 * 10**6


def test_rates_set_the_times(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    fast = planned(capsys, "--engine-tp", "4")
    slow = planned(capsys, "--engine-tp", "4", "--nic-gbit", "100", "--memory-gbyte", "335")
    assert slow["stage_seconds"]["network"] == pytest.approx(4 * fast["stage_seconds"]["network"])
    assert slow["stage_seconds"]["pack"] == pytest.approx(10 * fast["stage_seconds"]["pack"])
    assert slow["stage_seconds"]["nvlink"] == fast["stage_seconds"]["nvlink"]


@pytest.mark.parametrize(
    ("number_format", "scales_bytes"),
    [
        ("fp8_block", lambda rows, columns: 4 * (rows // 128) * (columns // 128)),
        ("int8_channel", lambda rows, _: 4 * rows),
    ],
)
def test_an_update_costs_what_the_format_says(
    number_format: str, scales_bytes: Any, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16, quantised = planned(capsys), planned(capsys, "--engine-dtype", number_format)
    less = sum(map(prod, MATRICES)) - sum(scales_bytes(*shape) for shape in MATRICES)
    assert quantised["bytes_needed"] == bf16["bytes_needed"] - less == BYTES - less
    # A scale of INT8 is of a row, which the trainer cuts: values travel, and the engine's worker makes the codes.
    held = quantised["bytes_sent"] == quantised["bytes_needed"]
    assert held == (number_format == "fp8_block")


def test_blocks_of_mxfp8_are_so_small_that_no_cut_goes_through_one(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = planned(capsys, "--engine-dtype", "mxfp8", "--engine-tp", "2")
    assert quantised["bytes_sent"] + quantised["bytes_relayed"] == quantised["bytes_needed"] < 0.6 * 2 * BYTES


CORES = ["--cores", "2", "--pack-gbyte", "0.5", "--unpack-gbyte", "0.25"]


def test_cores_that_all_ranks_share_do_one_work_after_the_other(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "model.json", "--gpus", "1", "--bucket-bytes", "1MB", "--json"]
    assert main([*words, *CORES, "--cores", "1", "--message-us", "500"]) == 0
    one = json.loads(capsys.readouterr().out)
    # Each byte is packed and unpacked, and each message costs at both ends.
    assert one["simulated_seconds"] == pytest.approx(BYTES / 0.5e9 + BYTES / 0.25e9 + 2 * one["messages"] * 5e-4)
    assert one["cluster"]["cores"] == {
        "per_node": 1,
        "pack_gbyte_per_s": 0.5,
        "unpack_gbyte_per_s": 0.25,
        "message_us": 500,
    }
    # Trainer and engine share a node, and what it maps is not moved.
    assert (one["cluster"]["nodes"], one["cluster"]["gpus_per_node"], one["cluster"]["nvlink_gbyte_per_s"]) == (
        1,
        2,
        None,
    )
    assert "step" not in one
    assert main([*words, *CORES, "--cores", "1", "--nvlink-gbyte", "0.1"]) == 0
    moved = json.loads(capsys.readouterr().out)
    assert moved["simulated_seconds"] == pytest.approx(BYTES / 0.5e9 + BYTES / 0.25e9 + BYTES / 0.1e9)
    assert main([*words[:-1], *CORES]) == 0
    said = capsys.readouterr().out
    assert "1 node of 2 cores for 2 ranks; a core packs 0.5 GB/s, unpacks 0.25 GB/s" in " ".join(said.split())
    assert "Memory of a GPU" not in said


def test_nodes_of_cores_hold_as_many_ranks_as_is_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = planned(capsys, *CORES, "--gpus-per-node", "10", "--engine-tp", "4")
    assert (facts["cluster"]["nodes"], facts["loads"]["NIC in"]["most"] > 0) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cores", "2"], "--cores 2 needs --pack-gbyte and --unpack-gbyte, what each core does in a second"),
        (["--cores", "2", "--pack-gbyte", "9"], "--cores 2 needs --unpack-gbyte"),
        (["--message-us", "9"], "--message-us is of the cores of a machine without GPUs: say how many"),
        ([*CORES, "--cores", "0"], "the cores' per_node is 0; it must be more than 0"),
    ],
)
def test_cores_without_rates_and_rates_without_cores_are_refused(
    words: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "model.json", *TRAINER, *words]) == 2
    assert says in capsys.readouterr().err


def test_sizes_may_not_make_more_ranks_than_are_counted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--cp", "99999999"]) == 2
    assert "the trainer's sizes make 99,999,999 ranks, and megarl plan counts 16,384" in capsys.readouterr().err


def test_what_a_node_needs_often_enters_it_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    once = planned(capsys, "--engine-ep", "8", "--engine-dtype", "fp8")
    often = planned(capsys, "--engine-ep", "8", "--engine-dtype", "fp8", "--no-node-once")
    assert (often["bytes_relayed"], once["bytes_needed"]) == (0, often["bytes_needed"])
    assert once["bytes_relayed"] > 0
    assert once["bytes_sent"] + once["bytes_relayed"] == often["bytes_sent"] == often["bytes_needed"]
    assert BYTES / 2 < once["loads"]["NICs of a node in"]["most"] < BYTES


def test_more_buckets_of_the_same_memory_keep_ports_busier(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine-tp", "2", "--replicas", "8", "--colocated", "--bucket-bytes"]
    few, many = planned(capsys, *words, "400kB"), planned(capsys, *words, "100kB", "--buckets", "8")
    assert few["extra_bytes_per_gpu"] == many["extra_bytes_per_gpu"] == 2 * 800_000
    assert many["messages"] > few["messages"]
    assert many["simulated_seconds"] < few["simulated_seconds"]


def test_colocated_engines_use_the_network_less(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    apart = planned(capsys, "--engine-tp", "2", "--replicas", "8")
    together = planned(capsys, "--engine-tp", "2", "--replicas", "8", "--colocated")
    assert together["cluster"]["nodes"] == 2 < apart["cluster"]["nodes"] == 4
    assert together["loads"]["NICs of a node in"]["most"] < apart["loads"]["NICs of a node in"]["most"]
    assert together["extra_bytes_per_gpu"] == 2 * apart["extra_bytes_per_gpu"]


def test_people_get_tables_and_a_picture(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine-tp", "4", "--replicas", "2", "--plot", "flow.png", "--bucket-bytes", "1MB"]
    assert main(["plan", "--model", model, *TRAINER, *words]) == 0
    said = capsys.readouterr().out
    for part in (
        "16 GPUs: TP 2, PP 2, EP 4",
        "2 of 4 GPUs: TP 4",
        "NICs of a node in",
        "lower bound",
        "all, simulated",
    ):
        assert part in said
    assert "2.00 MB a GPU: 2 buckets of 1.00 MB" in said
    assert "drawn in flow.png" in said
    assert max(map(len, said.splitlines())) <= 120
    assert Path("flow.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_the_disk_has_no_room_for_leaves_the_earlier_one(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", model, *TRAINER, "--engine-tp", "4", "--plot", "flow.png", "--bucket-bytes", "1MB"]
    assert main(words) == 0
    drawn = Path("flow.png").read_bytes()
    with files_up_to(2**12):
        assert main(words) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert Path("flow.png").read_bytes() == drawn
    assert not Path("flow.png.partial").exists()


def test_a_recipe_that_names_its_model_needs_no_other(capsys):
    assert main(["plan", "--config-name", "grpo_qwen3_moe", "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert main(["plan", "--config-name", "grpo_qwen3_moe", "--model", "qwen3_30b_a3b", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert {**named, "seconds": 0} == {**given, "seconds": 0}
    assert named["model_type"] == "qwen3_moe"


def test_models_beside_the_policy_are_said_not_to_be_planned(capsys):
    assert main(["plan", "--config-name", "ppo_qwen3_moe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_planned"] == {"critic": 16}
    assert main(["plan", "--config-name", "ppo_qwen3_moe"]) == 0
    assert "not planned: critic of 16 ranks, with GPUs" in capsys.readouterr().out


def test_engines_that_no_run_can_have_are_said_to_be_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--engine-ep", "4", "--gpus-per-node", "2"]) in (0, 1)
    assert "no run has them  an engine has all of attention on each 1 GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "gpt5"], "--model gpt5 is no config.json, no folder with one and none of deepseek_v3"),
        (["--tp", "3"], "16 ranks cannot be divided by --tp x --pp = 3 x 2"),
        (["--gpus", "0"], "--gpus 0 leaves nobody to train; give at least 1"),
        (["--gpus", "99999999999"], "--gpus 99999999999 is more than megarl plan counts; give at most 16,384"),
        (["--replicas", "100000"], "the engines have 100,000 ranks, and megarl plan counts 8,192 at most"),
        (["--nic-gbit", "1e-300"], "--nic-gbit is 1e-300; it must be at least 0.001"),
        (["--ep", "16", "--pp", "1"], "8 experts cannot be divided by --ep = 16"),
        (["--use-torch-fsdp2"], "--use-torch-fsdp2 works without --pp=2 only: "),
        (["--engine-tp", "3"], "for the engines, the model's num_attention_heads = 4 cannot be divided by --engine-tp"),
        (["--engine-tp", "2", "--engine-ep", "3"], "--engine-ep 3 is no multiple of --engine-tp 2"),
        (["--engine-ep", "16"], "8 experts cannot be divided by --engine-ep = 16"),
        (["--engine-model", "gpt5"], "--engine-model gpt5 is no config.json, no folder with one and none of"),
        (["--engine-model", "other.json"], "has shape"),
        (["--replicas", "0"], "--replicas is 0; it must be at least 1"),
        (["--replicas", "9", "--nodes", "3"], "take 4 nodes of 8 GPUs, and the cluster has 3"),
        (["--replicas", "17", "--colocated"], "the engines' 17 ranks do not fit on the trainer's 16 GPUs"),
        (["--nic-gbit", "0"], "--nic-gbit is 0.0; it must be more than 0"),
        (["--buckets", "0"], "--buckets is 0; it must be at least 1"),
        (
            ["--engine-dtype", "fp8_blok"],
            "--engine-dtype fp8_blok is none of bf16, fp8, fp8_block, fp8_block_ue8m0, int8_channel, mxfp8, nvfp4",
        ),
        (
            ["--engine-dtype", "int8_channel", "--engine-tp", "2"],
            "has a scale for each row, and an engine that cuts rows",
        ),
        (
            ["--engine-dtype", "nvfp4"],
            "--engine-dtype nvfp4 is made by the engines' own loader, which reads all tensors out of the memory of one",
        ),
        (["--prompts", "0"], "--prompts is 0; it must be at least 1"),
        (["--pp", "3", "--gpus", "24"], "or set --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num"),
        (["--bucket-bytes", "lots"], "--bucket-bytes lots is no size"),
        (["--plot", "flow.txt"], "--plot flow.txt is no picture that can be drawn"),
        (["--plot", "nowhere/flow.png"], "there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, *TRAINER, *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("megarl: ")
    assert says in said.err
    assert said.err.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {"model.json", "other.json"}


DATA_PARALLEL = ("rollout.engine_args.data_parallel_size=2", "rollout.engine_args.enable_expert_parallel=false")
RECIPE = """
model: {path: model.json}
output_dir: out
megatron:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  expert_model_parallel_size: 4
  expert_tensor_parallel_size: 1
rollout: {replicas: 3, engine_args: {tensor_parallel_size: 2, enable_expert_parallel: true}}
refit: {bucket_bytes: 100000}
cluster: {trainer_ranks: 16}
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    del facts["seconds"]
    return facts


def test_a_recipe_says_the_sizes_and_options_win_over_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(RECIPE)
    own = ["--config-name", "mine", "--config-dir", "."]
    same = ["--model", model, *TRAINER, "--engine-tp", "2", "--engine-ep", "2", "--bucket-bytes", "100000B"]
    assert plan(capsys, *own) == plan(capsys, *same, "--replicas", "3")
    changed = ["--pipeline-model-parallel-size", "1", "rollout.replicas=1"]
    assert plan(capsys, *own, "--replicas", "2", "--pp", "1") == plan(capsys, *own, *changed, "--replicas", "2")
    in_fp8 = plan(capsys, *own, "rollout.weights=fp8_block")
    assert in_fp8 == plan(capsys, *same, "--replicas", "3", "--engine-dtype", "fp8") != plan(capsys, *own)
    apart = plan(capsys, *own, DATA_PARALLEL[0])
    assert apart == plan(capsys, *same[:-3], "4", *same[-2:], "--replicas", "3")


def test_each_rank_of_fsdp2_sends_its_rows(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tp", "2", "--gpus", "6", "--engine-tp", "2", "--gpus-per-node", "1", "--bucket-bytes", "100000B"]
    facts = plan(capsys, "--model", model, *sizes, "--use-torch-fsdp2")
    assert facts["trainer"]["fsdp2"] is True
    assert facts["bytes_sent"] == plan(capsys, "--model", model, *sizes)["bytes_sent"]
    architecture = read_architecture(CONFIG)
    rows = megatron_layout(architecture, ParallelSizes(6, 2, use_torch_fsdp2=True), module_names="local")
    held = 2 * max(sum(prod(each.hf_box.shape) for each in rows.placements(rank)) for rank in range(6))
    alike = 2 * sum(prod(shape) for shape in SHAPES.values() if len(shape) == 1)
    # Nobody else has its rows, but for what both ranks of tensor parallelism have.
    assert held - alike <= facts["loads"]["NIC out"]["most"] <= held + alike
    Path("mine.yaml").write_text("model: {path: model.json}\noutput_dir: out\nmegatron: {use_torch_fsdp2: true}\n")
    own = ["--config-name", "mine", "--config-dir", "."]
    assert plan(capsys, *own, *sizes)["trainer"]["fsdp2"] is True


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rollout.replicas=2", "--model", "model.json"], "takes rollout.replicas=2 only with a recipe"),
        ([], "megarl plan needs a model: give --model, or a recipe"),
        (["--config-name", "quickstart"], "leaves model.path open"),
        (["--config-name", "grpo_qwen3_moe", "+scale=tiny"], "+scale=tiny is for the commands that train: megarl plan"),
        (["--config-name", "sft_qwen3_moe"], "recipe sft_qwen3_moe is for megarl sft: take a recipe of megarl train"),
        (["--config-name", "quickstart_dpo", "--model", "qwen3_8b"], "is for megarl dpo, reward-model or spin: take"),
        (["--config-name", "mine", "--config-dir", ".", "rollout.engine_args.pipeline_parallel_size=2"], "is above 1"),
        (
            [*("--config-name", "mine", "--config-dir", "."), "lora.rank=2", "--use-torch-fsdp2"],
            "an adapter (lora.rank) is merged into whole ones: leave one of the two out",
        ),
        (
            [*("--config-name", "mine", "--config-dir", "."), *DATA_PARALLEL],
            "data_parallel_size=2 without enable_expert_parallel cuts each expert over all ranks",
        ),
    ],
)
def test_what_a_recipe_cannot_say_is_a_sentence(
    model: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(RECIPE)
    assert main(["plan", *words]) == 2
    assert says in capsys.readouterr().err
