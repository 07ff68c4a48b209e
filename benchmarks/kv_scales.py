"""FP8 KV cache with scales of 1, calibrated scales and bounds: the effect on log-probs of a real model.

SmolLM2-135M-Instruct in transformers, in float32, on text of this repository. Keys and values are rounded to e4m3 with
one scale per layer, as in engines. Calibrated scales are computed on other text than the figures; bounds follow from
the weights, as with rollout.kv_scales=bound. `keys x N` is the same function with keys N times as large and queries N
times as small; models with outliers have such keys. Writes Markdown.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import at_least_one, describe, give_out
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl.quickstart.smollm2 import write_smollm2  # noqa: E402 (found by the line above)

LARGEST = 448.0
CALIBRATION, EVALUATION = ROOT / "docs" / "concepts.md", ROOT / "docs" / "operations.md"
KEYS = (1, 16, 256)


@dataclass
class Largest:
    """The largest magnitudes of keys and values seen so far, by layer."""

    keys: dict[int, float] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)

    def see(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Include a layer's keys and values."""
        for largest, states in ((self.keys, keys), (self.values, values)):
            largest[layer] = max(largest.get(layer, 0.0), float(states.abs().max()))


class Observed(DynamicCache):
    """A cache that records the magnitudes of its contents."""

    def __init__(self, largest: Largest) -> None:
        super().__init__()
        self._largest = largest

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **given: Any) -> Any:
        """Store keys and values of a layer; return all of that layer."""
        self._largest.see(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *rest, **given)


class Rounded(DynamicCache):
    """A cache in e4m3 whose scales are the largest magnitudes of `calibrated` over `largest_code`, or 1."""

    def __init__(self, calibrated: Largest | None, largest_code: float = LARGEST) -> None:
        super().__init__()
        self._calibrated, self._largest_code = calibrated, largest_code

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **given: Any) -> Any:
        """Store rounded keys and values of a layer; return all of that layer."""
        scales = (1.0, 1.0)
        if self._calibrated is not None:
            of = self._calibrated
            scales = of.keys[layer_idx] / self._largest_code, of.values[layer_idx] / self._largest_code
        rounded = [_rounded(states, scale) for states, scale in zip((key_states, value_states), scales, strict=True)]
        return super().update(*rounded, layer_idx, *rest, **given)


def _rounded(states: Tensor, scale: float) -> Tensor:
    codes = (states / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.to(states.dtype) * scale


@torch.no_grad()
def log_probs(model: Any, sequences: Sequence[Tensor], cache: Callable[[], DynamicCache]) -> Tensor:
    """The log-prob of each token of each sequence, except the first."""
    found = []
    for tokens in sequences:
        rows = model(tokens[None], past_key_values=cache()).logits[0, :-1].log_softmax(-1)
        found.append(rows.gather(1, tokens[1:, None]).flatten())
    return torch.cat(found)


@torch.no_grad()
def bounds(model: Any) -> Largest:
    """Bounds of the keys and values of each layer; divided by 448 they are powers of two."""
    found, width = Largest(), model.config.hidden_size
    for number, layer in enumerate(model.model.layers):
        gains, attention = math.sqrt(width) * layer.input_layernorm.weight, layer.self_attn
        keys, values = ((each.weight * gains).norm(dim=1).max() for each in (attention.k_proj, attention.v_proj))
        for largest, value in ((found.keys, math.sqrt(2) * float(keys)), (found.values, float(values))):
            largest[number] = LARGEST * 2.0 ** math.ceil(math.log2(value / LARGEST))
    return found


@torch.no_grad()
def enlarge_keys(model: Any, times: float) -> None:
    """Multiply keys by `times`, and divide queries by it."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.mul_(times)
        layer.self_attn.q_proj.weight.div_(times)


def table(model: Any, calibration: Sequence[Tensor], evaluation: Sequence[Tensor]) -> Iterator[str]:
    """Yield the rows of the table."""
    exact, before = log_probs(model, evaluation, DynamicCache), 1
    for times in KEYS:
        enlarge_keys(model, times / before)
        before, largest, seen = times, Largest(), Largest()
        log_probs(model, calibration, partial(Observed, largest))
        log_probs(model, evaluation, partial(Observed, seen))
        gaps = []
        ways = ((None, LARGEST), (largest, LARGEST), (largest, LARGEST / 2), (bounds(model), LARGEST))
        for calibrated, code in ways:
            found = log_probs(model, evaluation, partial(Rounded, calibrated, code))
            gaps.append(float((found - exact).abs().mean()))
        sizes = max(seen.keys.values()), max(seen.values.values())
        yield f"| keys x {times} | {sizes[0]:.0f} | {sizes[1]:.1f} | " + " | ".join(f"{gap:.4f}" for gap in gaps) + " |"


def _sequences(tokenizer: Any, text: Path, count: int, length: int) -> list[Tensor]:
    tokens = torch.tensor(tokenizer(text.read_text())["input_ids"][: count * length])
    return list(tokens.view(count, length))


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=at_least_one, default=8)
    parser.add_argument("--tokens", type=at_least_one, default=512, help="of a sequence")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machine = describe(Path(folder))
        write_smollm2(Path(folder), dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    parts = [_sequences(tokenizer, text, options.sequences, options.tokens) for text in (CALIBRATION, EVALUATION)]
    page = [
        "# Scales of keys and values in FP8",
        "",
        f"Date: {date.today()}",
        "",
        f"Machine: {machine}",
        "",
        "Command: `.venv/bin/python benchmarks/kv_scales.py`",
        "",
        f"SmolLM2-135M-Instruct, {options.sequences} sequences of {options.tokens} tokens; mean difference of"
        " log-probs, in nats, from those with keys and values in float32.",
        "",
        "| | largest key | largest value | scales of 1 | calibrated | calibrated, twice as large | bound |",
        "|---|---|---|---|---|---|---|",
        *table(model, *parts),
        "",
    ]
    give_out("\n".join(page), options.output)


if __name__ == "__main__":
    main()
