"""Keys and values of SGLang in FP8, and those of transformers rounded in the same way."""

import pytest
import torch
from engine_host import GREEDY, PROMPTS, Served
from rounded_cache import RoundedCache, best_of
from transformers import AutoModelForCausalLM, DynamicCache

from converters.errors import UserError
from megarl.rollout.protocol import Request
from megarl.rollout.sglang.arguments import server_arguments


@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["sglang"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_greedy_equals_huggingface_with_rounded_keys_and_values(host, folders, tp_size):
    served = Served(host.start(folders[0], kv_cache_dtype="fp8_e4m3", tp_size=tp_size), folders)
    gaps = []

    def check(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        generated = served.engine.generate([Request(prompt, GREEDY) for prompt in PROMPTS])
        for prompt, (generation,) in zip(PROMPTS, generated, strict=True):
            answer, found = generation.token_ids.tolist(), torch.tensor(generation.log_probs)
            rounded, exact = (best_of(model, prompt, answer, cache) for cache in (RoundedCache, DynamicCache))
            assert answer == rounded.indices.tolist()
            # A number beside a tie of e4m3 may be rounded to the other side.
            assert torch.allclose(found, rounded.values, atol=1e-3)
            gaps.append((found - exact.values).abs().max())

    check(folders[0])
    served.update(served.second, 1)
    check(folders[1])
    assert max(gaps) > 0.03


def test_latent_attention_on_a_cpu_has_none(model_folder):
    with pytest.raises(UserError, match="kv_cache_dtype=fp8_e4m3 is not for multi-latent attention on a CPU"):
        server_arguments(model_folder("deepseek_v3", 0), {"kv_cache_dtype": "fp8_e4m3"}, 1, "key")
