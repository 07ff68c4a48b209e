"""`megarl plan` of a whole step: what it prints, proposes and refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from converters.architectures import Lora, adapter_architecture, read_architecture
from converters.formats.peft import write_adapter_config
from converters.formats.safetensors import read_json
from megarl.cli.main import main
from megarl.config.folder import recipes_folder

MODEL = ["--model", "qwen3_30b_a3b"]
SMALL = [*MODEL, "--gpus", "16", "--tp", "2", "--ep", "8", "--etp", "1", "--engine-tp", "2", "--replicas", "8"]


def test_a_step_is_printed_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--colocated", "--recompute", "full"]) == 0
    said = capsys.readouterr().out
    for part in ("Memory of a GPU", "optimizer state", "Seconds of a step", "rollout", "What a knob does", "--ep 4"):
        assert part in said
    assert max(map(len, said.splitlines())) <= 120


def test_a_plan_that_does_not_fit_ends_with_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--colocated", "--gpu-gbyte", "40", "--json"]) == 1
    said = capsys.readouterr()
    facts = json.loads(said.out)["step"]
    assert (facts["fits"], facts["trainer_room_bytes"] < 0) == (False, True)
    assert said.err.startswith("megarl: this plan does not fit: a trainer's rank needs ")
    assert said.err.count("\n") == 1


def test_values_of_blocks_that_the_trainer_cuts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpus=16", "--tp=4", "--ep=4", "--engine-tp=2", "--engine-dtype=fp8", "--gpu-gbyte=141"]
    staged = {}
    for parts in (1, 4):
        main(["plan", *MODEL, *sizes, "--etp", str(parts), "--json"])
        staged[parts] = json.loads(capsys.readouterr().out)["step"]["staged_bytes"]
    # Fourths of 768 rows cut through blocks of 128; a worker stages all halves of experts, in bf16.
    assert staged == {1: 0, 4: 48 * 128 * 3 * 2048 * 384 * 2}
    assert main(["plan", *MODEL, *sizes, "--etp", "4"]) == 1
    said = capsys.readouterr()
    assert re.search(r"\nstaged values +29\.0 GB\n", said.out)
    assert "of values in split blocks" in said.err


def test_sizes_are_proposed_with_the_runner_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *MODEL, "--gpus", "16", "--colocated", "--search"]
    assert main([*words, "--json"]) == 0
    best, second, *_ = json.loads(capsys.readouterr().out)["best"]
    assert best["fits"]
    assert best["step_seconds"] <= second["step_seconds"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Proposed sizes" in said
    assert "other combinations fit and take longer" in said


def test_a_recipe_says_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rollout(*words: str) -> float:
        assert main(["plan", "--config-name", "ppo_qwen2_5_7b", "--model", "qwen2_5_7b", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step"]["stage_seconds"]["rollout"]

    monkeypatch.chdir(tmp_path)
    assert rollout("rollout.max_response_tokens=4096") > 2 * rollout()
    assert rollout("rollout.engine_args.enforce_eager=true") > 2 * rollout()
    assert rollout("rollout.engine_args.max_num_seqs=16") > 2 * rollout()


@pytest.mark.parametrize(
    ("engine", "argument", "by_itself"),
    [("vllm", "max_num_batched_tokens", 16384), ("sglang", "chunked_prefill_size", 8192)],
)
def test_an_engine_works_with_as_many_tokens_as_its_own_argument_says(
    capsys: pytest.CaptureFixture[str], engine: str, argument: str, by_itself: int
) -> None:
    def working(*words: str) -> int:
        recipe = ["--config-name", "grpo_qwen3_1_7b", f"rollout.engine={engine}", "~rollout.engine_args"]
        assert main(["plan", *recipe, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step"]["engine_bytes"]["working"]

    # A dense layer: residual, input and output; gate, up and their product.
    of_token = 2 * (3 * 2048 + 3 * 6144)
    assert working(f"+rollout.engine_args.{argument}=1024") - 1024 * of_token == working() - by_itself * of_token


def test_a_layer_of_multi_token_prediction_trains_with_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpus", "2", "--pp", "2", "--decoder-first-pipeline-num-layers", "30"]

    def step(*words: str) -> dict[str, Any]:
        assert main(["plan", "--model", "deepseek_v3", *sizes, *words, "--json"]) == 1
        return json.loads(capsys.readouterr().out)["step"]

    with_it, without = step(), step("--prediction-layers", "0")
    # Attention of 187 million parameters, a shared expert and 256 others, the projection of two hidden states, and a
    # copy of the embedding.
    added = 187_107_328 + 257 * 3 * 7168 * 2048 + 2 * 7168**2 + 129_280 * 7168
    found = with_it["trainer_bytes"]["weights"] - without["trainer_bytes"]["weights"]
    assert found == pytest.approx(2 * added, rel=0.01)
    assert with_it["stage_seconds"]["update"] > without["stage_seconds"]["update"]
    assert with_it["stage_seconds"]["rollout"] == without["stage_seconds"]["rollout"]


@pytest.mark.parametrize("word", ["model.mtp_training=none", "lora.rank=8"])
def test_a_trainer_has_layers_of_multi_token_prediction_that_it_leaves_alone(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(layers: int, *words: str) -> dict[str, Any]:
        sizes = ["--gpus", "1", "--tp", "1", "--pp", "1", "--cp", "1", "--ep", "1", "--prediction-layers", str(layers)]
        recipe = ["plan", "--config-name", "grpo_qwen3_moe", "--model", "glm_4_5", *sizes, *words]
        assert main([*recipe, "--json"]) == 1
        return json.loads(capsys.readouterr().out)["step"]

    left_alone, without, trained = step(1, word), step(0, word), step(1)
    # Attention, a shared expert and 160 others, the projection of two hidden states.
    attention = 5120 * 128 * (2 * 96 + 2 * 8)
    layer = attention + 161 * 3 * 5120 * 1536 + 160 * 5120 + 2 * 5120**2
    found = left_alone["trainer_bytes"]["weights"] - without["trainer_bytes"]["weights"]
    assert found == pytest.approx(2 * layer, rel=0.001)
    for part in ("gradients", "optimizer", "activations"):
        assert left_alone["trainer_bytes"][part] == without["trainer_bytes"][part] < trained["trainer_bytes"][part]
    assert left_alone["stage_seconds"]["update"] == without["stage_seconds"]["update"]


def test_layers_of_multi_token_prediction_of_a_model_without_any_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--model", "qwen3_8b", "--prediction-layers", "1"]) == 2
    assert "--prediction-layers 1 is for another model: a qwen3 model has 0 layers" in capsys.readouterr().err


def test_a_micro_batch_has_room_for_the_longest_response_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def activations(*words: str) -> int:
        main(["plan", *SMALL, "--prompt-tokens", "1000", "--max-response-tokens", "31000", *words, "--json"])
        return json.loads(capsys.readouterr().out)["step"]["trainer_bytes"]["activations"]

    assert activations() == activations("--micro-batch-tokens", "32000")


def test_a_loss_that_needs_a_reference_has_its_row_without_a_kl(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["plan", "--config-name", "grpo_qwen3_1_7b", "algorithm.kl_coefficient=0"]
    assert main([*recipe, "+algorithm=sppo"]) == 0
    assert re.search(r"^reference +3\.44 GB", capsys.readouterr().out, re.MULTILINE)
    assert main(recipe) == 0
    assert "reference" not in capsys.readouterr().out


def test_an_adapter_that_goes_on_is_planned_as_one_of_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trainer_bytes(*words: str) -> dict[str, int]:
        assert main(["plan", "--config-name", "grpo_qwen3_1_7b", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step"]["trainer_bytes"]

    held = Lora(8, 16.0)
    model = read_architecture(read_json(recipes_folder() / "models" / "qwen3_1_7b.json"))
    write_adapter_config(tmp_path, adapter_architecture(model, held), held)
    goes_on = trainer_bytes(f"lora.path={tmp_path}")
    assert goes_on == trainer_bytes("lora.rank=8")
    assert goes_on["optimizer"] < trainer_bytes()["optimizer"]


@pytest.mark.parametrize(
    ("engine", "kv_cache_dtype"),
    [("vllm", "fp8"), ("vllm", "fp8_e4m3"), ("sglang", "fp8_e4m3")],
)
def test_keys_and_values_in_fp8_are_twice_the_tokens(
    engine: str, kv_cache_dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(dtype: str) -> dict[str, Any]:
        recipe = ["--config-name", "grpo_qwen3_1_7b", f"rollout.engine={engine}", "~rollout.engine_args"]
        assert main(["plan", *recipe, f"+rollout.engine_args.kv_cache_dtype={dtype}", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step"]

    whole, half = step("auto"), step(kv_cache_dtype)
    assert half["engine_bytes"]["kv_cache"] == whole["engine_bytes"]["kv_cache"]
    assert half["engine_tokens"] == pytest.approx(2 * whole["engine_tokens"], abs=1)
    assert step("bfloat16") == whole


def test_tokens_that_ranks_share_out_are_more(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*overrides: str) -> dict[str, Any]:
        # Two ranks have each of four heads.
        assert main(["plan", "--config-name", "grpo_qwen3_moe", "--engine-tp", "8", "--json", *overrides]) == 0
        return json.loads(capsys.readouterr().out)["step"]

    whole, shared = step(), step("+rollout.engine_args.decode_context_parallel_size=2")
    assert shared["engine_bytes"] == whole["engine_bytes"]
    assert shared["engine_tokens"] == pytest.approx(2 * whole["engine_tokens"], abs=1)
    assert shared["stage_seconds"]["rollout"] < whole["stage_seconds"]["rollout"]


def test_those_who_take_turns_have_what_they_keep_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    def step(recipe: str) -> dict[str, Any]:
        assert main(["plan", "--config-name", recipe, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step"]

    in_turns = step("grpo_qwen3_1_7b")
    trainer, engine = in_turns["trainer_bytes"], in_turns["engine_bytes"]
    of_trainer = sum(trainer[part] for part in ("weights", "optimizer", "reference"))
    assert in_turns["host_bytes"] == {"trainer": of_trainer, "engine": 2 * engine["weights"]}
    assert "host_bytes" not in step("grpo_qwen3_moe")


def test_a_step_of_one_update_has_no_stage_of_log_probs(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["plan", *SMALL, "--colocated", "--recompute", "full", *words]) == 0
        return capsys.readouterr().out

    assert "log_probs" not in said()
    assert "log_probs" in said("--updates", "4")
    assert "log_probs" in said("--log-prob-passes", "1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "H1000"], "--device H1000 is none of A100"),
        (["--gpu-gbyte", "0"], "--gpu-gbyte 0 is no memory"),
        (["--prediction-layers", "-1"], "--prediction-layers -1 is too small"),
        (["--micro-batch-tokens", "1023"], "--micro-batch-tokens 1023 has no room for the longest response"),
        (["--expert-load", "0.5"], "--expert-load 0.5 must be a number of at least 1"),
        (["--expert-load", "nan"], "--expert-load nan must be a number of at least 1"),
        (["--expert-load", "inf"], "--expert-load inf must be a number of at least 1"),
        (["--gpu-gbyte", "nan"], "--gpu-gbyte nan is no memory"),
        (["--staleness", "-1"], "--staleness -1 is too small: it must be at least 0"),
        (["--prompts", "0"], "--prompts is 0"),
        (["--response-tokens", "600"], "longer than the longest, 512"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *SMALL, "--colocated", "--plot", "flow.png", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert not list(tmp_path.iterdir())
    assert says in said.err
    assert said.err.count("\n") == 1


def test_a_search_needs_a_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--search"]) == 2
    assert "megarl plan --search needs the number of GPUs: give --gpus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--plot", "flow.png"], "--plot flow.png draws the plan of given sizes, and --search has none"),
        (["--gpus", "99999999999"], "--gpus 99999999999 is more than megarl plan counts"),
        (
            ["--cores", "2", "--pack-gbyte", "1", "--unpack-gbyte", "1"],
            "--search proposes sizes for GPUs, and --cores is of machines without",
        ),
        (["--tp", "2"], "--tp 2 is one of the sizes that --search proposes: leave one of the two out"),
        (["--engine-ep", "8"], "--engine-ep 8 is one of the sizes"),
        (["--replicas", "4"], "--replicas 4 is one of the sizes"),
        (["--decoder-last-pipeline-num-layers", "4"], "--decoder-last-pipeline-num-layers 4 is one of the sizes"),
    ],
)
def test_a_search_takes_no_sizes_and_draws_nothing(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *MODEL, "--gpus", "16", "--search", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1


def test_a_search_may_begin_with_the_sizes_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config-name", "grpo_qwen3_moe", "--gpus", "16", "--search", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]
