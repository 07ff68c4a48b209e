"""A model that the workers of an engine cannot share out is refused before they start, in the engine's own names."""

import pytest

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.models.policy import check_cut
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import RolloutConfig


@pytest.fixture(scope="module")
def architecture(tmp_path_factory):
    return read_architecture(read_json(write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model")) / CONFIG))


@pytest.mark.parametrize(
    ("engine", "arguments", "says"),
    [
        ("vllm", {"tensor_parallel_size": 3}, r"cannot be divided by rollout\.engine_args\.tensor_parallel_size = 3;"),
        ("vllm", {"tensor_parallel_size": 8}, r"cannot be divided by rollout\.engine_args\.tensor_parallel_size = 8;"),
        ("vllm", {"pipeline_parallel_size": 5}, r"^rollout\.engine_args\.pipeline_parallel_size=5 is more than the"),
        (
            "vllm",
            {"data_parallel_size": 5},
            r"cannot be divided by rollout\.engine_args\.tensor_parallel_size x data_parallel_size = 5;",
        ),
        ("sglang", {"tp_size": 3}, r"num_attention_heads = 4 cannot be divided by rollout\.engine_args\.tp_size = 3;"),
        (
            "sglang",
            {"tp_size": 2, "ep_size": 3},
            r"^rollout\.engine_args\.ep_size=3 does not divide tp_size=2: .*divisor",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(architecture, engine, arguments, says):
    with pytest.raises(UserError, match=says):
        check_cut(architecture, RolloutConfig(engine=engine, engine_args=arguments))


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("vllm", {"tensor_parallel_size": 2}),
        ("vllm", {"data_parallel_size": 3, "enable_expert_parallel": True}),
        ("vllm", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("sglang", {"tp_size": 2, "ep_size": 2}),
        ("transformers", {}),
    ],
)
def test_what_can_be_divided_is_taken(architecture, engine, arguments):
    check_cut(architecture, RolloutConfig(engine=engine, engine_args=arguments))
