"""Keys and values of SGLang in FP8, and those of transformers rounded in the same way."""

import pytest
from engine_host import Served
from rounded_cache import check_that_keys_and_values_are_rounded

from converters.errors import UserError
from megarl.rollout.sglang.arguments import server_arguments


@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["sglang"])
@pytest.mark.parametrize("tp_size", [pytest.param(each, marks=pytest.mark.long) for each in (1, 2)])
def test_greedy_equals_huggingface_with_rounded_keys_and_values(host, folders, tp_size):
    served = Served(host.start(folders[0], kv_cache_dtype="fp8_e4m3", tp_size=tp_size), folders)
    check_that_keys_and_values_are_rounded(served)


def test_latent_attention_on_a_cpu_has_none(model_folder):
    with pytest.raises(UserError, match="kv_cache_dtype=fp8_e4m3 is not for multi-latent attention on a CPU"):
        server_arguments(model_folder("deepseek_v3", 0), {"kv_cache_dtype": "fp8_e4m3"}, 1, "key")
