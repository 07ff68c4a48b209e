"""Keys and values of transformers rounded as those of an engine are that has them in FP8."""

import torch
from transformers import DynamicCache


class RoundedCache(DynamicCache):
    """A cache whose keys and values are e4m3 with scales of 1."""

    def update(self, key_states, value_states, *arguments, **given):
        rounded = [states.clamp(-448, 448).to(torch.float8_e4m3fn).float() for states in (key_states, value_states)]
        return super().update(*rounded, *arguments, **given)


@torch.no_grad()
def best_of(model, prompt, answer, cache):
    """Log-probs and ids of the best tokens after a prompt and each token of an answer but the last."""
    rows = model(torch.tensor([prompt + answer]), past_key_values=cache()).logits[0, len(prompt) - 1 : -1]
    return rows.log_softmax(-1).max(-1)
