"""Keys and values of transformers rounded as those of an engine are that has them in FP8."""

import torch
from engine_host import GREEDY, PROMPTS
from transformers import AutoModelForCausalLM, DynamicCache

from megarl.rollout.protocol import Request


class RoundedCache(DynamicCache):
    """A cache whose keys and values are e4m3 with scales of 1."""

    def update(self, key_states, value_states, *arguments, **given):
        rounded = [states.clamp(-448, 448).to(torch.float8_e4m3fn).float() for states in (key_states, value_states)]
        return super().update(*rounded, *arguments, **given)


@torch.no_grad()
def _best_of(model, prompt, answer, cache):
    """Log-probs and ids of the best tokens after a prompt and each token of an answer but the last."""
    rows = model(torch.tensor([prompt + answer]), past_key_values=cache()).logits[0, len(prompt) - 1 : -1]
    return rows.log_softmax(-1).max(-1)


def check_that_keys_and_values_are_rounded(served):
    """Greedy answers before and after an update equal those of transformers with this cache, and not those without."""
    gaps = list(_gaps(served.engine, served.folders[0]))
    served.update(served.second, 1)
    gaps += _gaps(served.engine, served.folders[1])
    assert max(gaps) > 0.03


def _gaps(engine, folder):
    """How far log-probs are from those of keys and values that are not rounded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generated = engine.generate([Request(prompt, GREEDY) for prompt in PROMPTS])
    for prompt, (generation,) in zip(PROMPTS, generated, strict=True):
        answer, found = generation.token_ids.tolist(), torch.tensor(generation.log_probs)
        rounded, exact = (_best_of(model, prompt, answer, cache) for cache in (RoundedCache, DynamicCache))
        assert answer == rounded.indices.tolist()
        # A number beside a tie of e4m3 may be rounded to the other side.
        assert torch.allclose(found, rounded.values, atol=1e-3)
        yield (found - exact.values).abs().max()
