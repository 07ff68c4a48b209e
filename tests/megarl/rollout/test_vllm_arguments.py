import pytest
import torch

from converters.errors import UserError
from megarl.rollout.vllm.arguments import make_engine_config


def _config(folder, given):
    config = make_engine_config(folder, given)
    return config.model_config.dtype, config.scheduler_config.max_num_seqs, config.model_config.skip_tokenizer_init


def test_the_models_own_dtype_is_the_default(vllm_process, model_folder):
    folder = model_folder("qwen3", 0)
    assert vllm_process(_config, folder, {}) == (torch.float32, 512, True)
    assert vllm_process(_config, folder, {"dtype": "bfloat16", "max_num_seqs": 7}) == (
        torch.bfloat16,
        7,
        True,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 2}, r"engine_args\.tensor_parallel is not an argument .* nearest is tensor_parallel_size"),
        ({"logprobs_mode": "raw_logprobs"}, r"engine_args\.logprobs_mode is set by megarl"),
        ({"max_model_len": -5}, r"vLLM refuses rollout\.engine_args=.*max_model_len"),
        ({"dtype": "float13"}, r"vLLM refuses rollout\.engine_args=.*float13"),
    ],
)
def test_arguments_that_do_not_exist_or_are_refused(vllm_process, model_folder, given, message):
    with pytest.raises(UserError, match=message):
        vllm_process(make_engine_config, model_folder("qwen3", 0), given)
