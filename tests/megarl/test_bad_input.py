"""Bad input ends the command with one clear sentence and exit code 2, before anything was written or started."""

import json
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from megarl.cli.main import main
from megarl.cluster.ray.runtime import ray_cluster
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import ClusterConfig
from megatron_ext.checkpoint import checkpoint_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("data"), held_out=16)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(ClusterConfig(trainer_ranks=2)):
        yield


@pytest.fixture
def run(model, files, tmp_path, capfd):
    """`run(*overrides)` gives the sentence of `megarl train`, which ends with exit code 2, and what follows it."""

    def train(*overrides: str) -> str:
        arguments = ["train", "--config-name", "quickstart", f"output_dir={tmp_path / 'run'}", f"model.path={model}"]
        arguments += [f"data.train_files=[{files.train}]", f"data.eval_files=[{files.eval}]", *overrides]
        assert main(arguments) == 2
        message = capfd.readouterr().err
        assert "Traceback" not in message
        lines = message.splitlines()
        (sentence,) = [number for number, line in enumerate(lines) if line.startswith("megarl: ")]
        return "\n".join(lines[sentence:])

    yield train
    assert {path.name for path in tmp_path.glob("run/*")} <= {"logs", "metrics.jsonl", "tensorboard"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loop.step=3"], ["loop.step", "loop.steps"]),
        (["--tensor-model-paralel-size", "2"], ["--tensor-model-paralel-size", "--tensor-model-parallel-size"]),
        (
            ["--tensor-model-parallel-size", "8", "--expert-model-parallel-size", "1", "cluster.trainer_ranks=8"],
            ["num_attention_heads", "tensor_model_parallel_size = 8"],
        ),
        (
            ["megatron.expert_model_parallel_size=3", "cluster.trainer_ranks=3"],
            ["4 experts", "expert_model_parallel_size = 3"],
        ),
        (["--pipeline-model-parallel-size", "2", "megatron.expert_model_parallel_size=1"], ["num_hidden_layers", "3"]),
        (["cluster.trainer_ranks=3"], ["3 ranks", "expert_model_parallel_size"]),
        (["loop.samples_per_prompt=1"], ["samples_per_prompt"]),
        (["reward.function=nowhere.py:score"], ["nowhere.py", "does not exist"]),
        (["reward.function=exact"], ["exact", "exact_match"]),
        (["data.train_files=[nowhere.parquet]"], ["nowhere.parquet"]),
        (["data.max_prompt_tokens=3"], ["8 tokens", "data.max_prompt_tokens=3", "data.overlong_prompts=drop"]),
        (
            ["rollout.engine_args.max_model_len=12", "rollout.max_response_tokens=5"],
            ["a prompt of 8 tokens and rollout.max_response_tokens=5 new ones", "or raise rollout.engine_args."],
        ),
        (["refit.bucket_bytes=1000"], ["model.embed_tokens.weight has", "raise refit.bucket_bytes to"]),
        (["model.path=nowhere"], ["nowhere"]),
        (["model.megatron_checkpoint=nowhere"], ["nowhere is not a folder", "torch_dist"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_configuration(run, overrides, words):
    message = run(*overrides)
    assert message.startswith("megarl: ")
    for word in words:
        assert word in message


def test_new_run_among_the_checkpoints_of_another(run, tmp_path):
    root = tmp_path / "earlier" / "checkpoints"
    checkpoint_folder.begin(root, 7)
    checkpoint_folder.commit(root, 7, {"step": 7}, keep=1)
    message = run(f"output_dir={root.parent}", "checkpoint.resume=never")
    assert "step 7" in message
    assert "checkpoint.resume=auto" in message
    assert checkpoint_folder.complete_iterations(root) == [7]


def test_a_checkpoint_whose_state_was_cut(run, tmp_path):
    root = tmp_path / "earlier" / "checkpoints"
    checkpoint_folder.begin(root, 7)
    state = checkpoint_folder.commit(root, 7, {"step": 7}, keep=1) / checkpoint_folder.CONTROLLER_STATE
    state.write_bytes(state.read_bytes()[:-1])
    message = run(f"output_dir={root.parent}")
    assert f"{state} is not the file that" in message
    assert "copy it again" in message


def test_parquet_without_a_column(run, tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"data_source": ["a"], "prompt": [[{"role": "user", "content": "1+1="}]]}), path)
    message = run(f"data.train_files=[{path}]")
    assert "reward_model" in message
    assert str(path) in message


def test_empty_parquet(run, tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"data_source": pa.array([], pa.string())}), path)
    assert str(path) in run(f"data.train_files=[{path}]")


@pytest.fixture
def damaged(model, tmp_path):
    """A copy of the model and its tensors, to be damaged."""
    folder = tmp_path / "damaged"
    shutil.copytree(model, folder)
    return folder, load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensor(run, damaged):
    folder, tensors = damaged
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    rewrite(folder, tensors)
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in run(f"model.path={folder}")


def test_surplus_tensor(run, damaged):
    folder, tensors = damaged
    rewrite(folder, {**tensors, "model.layers.1.extra.weight": tensors["model.norm.weight"].clone()})
    assert "model.layers.1.extra.weight" in run(f"model.path={folder}")


def test_misshapen_tensor(run, damaged):
    folder, tensors = damaged
    rewrite(folder, {**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1].clone()})
    assert "model.norm.weight" in run(f"model.path={folder}")


def test_truncated_file(run, damaged):
    folder, _ = damaged
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    assert "model.safetensors" in run(f"model.path={folder}")


def test_unsupported_architecture(run, damaged):
    folder, _ = damaged
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    message = run(f"model.path={folder}")
    assert "gpt2" in message
    assert "qwen3_moe" in message


def test_multi_token_prediction(run, tmp_path):
    folder = write_tiny_model("deepseek_v3", tmp_path / "predicting")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    message = run(f"model.path={folder}")
    assert "holds nothing of the 1 multi-token-prediction layers of its config.json" in message
    assert "set num_nextn_predict_layers to 0 there" in message


def test_replayed_routing_of_a_model_without_experts(run, tmp_path):
    dense = write_tiny_model("qwen3", tmp_path / "dense")
    message = run(f"model.path={dense}", "rollout.engine=transformers", "algorithm.router_replay=rollout", *ONE_RANK)
    assert "algorithm.router_replay=rollout sends tokens to the experts that the engine chose" in message
    assert "this qwen3 model has no experts: leave it out" in message


ONE_RANK = ("cluster.trainer_ranks=1", "megatron.expert_model_parallel_size=1")


@pytest.mark.long
def test_port_in_use(run, cluster):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = run(f"cluster.rendezvous_port={port}", "rollout.engine=transformers", *ONE_RANK)
    assert f"port {port}" in message
    assert "cluster.rendezvous_port" in message


@pytest.mark.long
@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="needed without DeepEP only")
def test_deepep_that_ranks_do_not_have(run, cluster):
    flex = ("megatron.moe_token_dispatcher_type=flex", "megatron.moe_enable_deepep=true")
    message = run("rollout.engine=transformers", *flex)
    assert "megatron.moe_token_dispatcher_type=flex is not supported where" in message
    assert "cannot import deep_ep" in message


@pytest.mark.long
def test_engine_that_dies_at_start(run, cluster):
    message = run("rollout.engine_args.kv_cache_memory_bytes=1", *ONE_RANK)
    assert "an engine did not start" in message
    assert "engine_0.log" in message
