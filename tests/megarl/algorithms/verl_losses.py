"""Outputs of verl (core_algos.py and rollout_corr_helper.py, float32) for random batches.

Each has 24 rows of 17 places, of which `mask` says which tokens count: at the end of a row, with holes ("holes"), none
of one row ("fully_masked"). Values are those of the tokens that count, end to end. Options: clip_ratio_low 0.2,
clip_ratio_high 0.28, clip_ratio_c 3; covariance fraction 0.05, KL-Cov's coefficient 0.5; beta 0.1. The losses end
in /is1 with weights `rollout_is_weights`, in /is0 without; then in /global where the batch is that of one of four
data-parallel ranks whose step has 96 responses of 977 tokens.

Four batches are of verl 0.10.0.dev. In the fifth, "far", probabilities have moved so far that every bound is met, also
those that the four never meet: both masks of DPPO and its cap of the ratio, the dual clip, the bounds of weights per
token, the cut of k3. It is of verl 0.9.1, which has the same values as 0.10.0.dev in the four, but for the draws of
Clip-Cov and for the aggregation of GSPO.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.ragged import Ragged

NAMES = ("plain", "holes", "fully_masked", "group_of_one")
FAR = "far"
EVERY = (*NAMES, FAR)
OPTIONS: Mapping[str, float | None] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "ratio_cap": 3.0,
    "temperature_positive": 1.0,
    "temperature_negative": 1.05,
    "covariance_kl_coefficient": 0.5,
    "beta": 0.1,
}
COVARIANCE_FRACTION = 0.05
COLUMNS = 17
RANKS, STEP_RESPONSES, STEP_TOKENS = 4, 96, 977


def options_of(aggregation: str, length: int = COLUMNS) -> dict[str, int]:
    """A constant length, where the aggregation divides by one."""
    return {"length": length} if aggregation == "seq_mean_token_sum_norm" else {}


@dataclass(frozen=True)
class Case:
    """One batch: what verl was given and what it gave."""

    mask: Tensor
    """bool[24, 17]"""
    arrays: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    scalars: Mapping[str, float]

    @property
    def ragged(self) -> Ragged:
        return Ragged(self.mask.sum(1))

    def inputs(self, log_probs: Tensor, chosen: Tensor | None = None) -> dict[str, Any]:
        """Inputs of a policy loss, with `log_probs` [T] to differentiate."""
        return {
            "log_probs": log_probs,
            "old_log_probs": self.arrays["in/old_log_prob"],
            "reference_log_probs": self.arrays["in/ref_log_prob"],
            "advantages": self.arrays["in/advantages"],
            "responses": self.ragged,
            "chosen": chosen,
        }


@cache
def case(name: str) -> Case:
    """The case of that name."""
    file = "far_policies.npz" if name == FAR else "losses.npz"
    stored = np.load(Path(__file__).parent / "reference" / file)
    index = json.loads(stored["index"].tobytes())
    flags = np.unpackbits(stored["flags"]).astype(bool)
    ours = f"{name}/"

    def mine(entries: dict) -> dict:
        return {key.removeprefix(ours): value for key, value in entries.items() if key.startswith(ours)}

    masks = {key: torch.from_numpy(flags[start:end].copy()) for key, (start, end) in mine(index["masks"]).items()}
    arrays = {key: torch.from_numpy(stored["values"][a:b].copy()) for key, (a, b) in mine(index["arrays"]).items()}
    return Case(masks.pop("mask").view(-1, COLUMNS), arrays, masks, mine(index["scalars"]))


def lengths_of_step(lengths: Tensor) -> Tensor:
    """Lengths of the responses of all four ranks, this rank's `lengths` [24] first."""
    others = STEP_RESPONSES - int((lengths > 0).sum())
    tokens = torch.arange(STEP_TOKENS - int(lengths.sum()))
    return torch.cat([lengths, torch.bincount(tokens % others)])


def assert_equal(actual: Tensor, expected: Tensor, relative: float = 1e-6) -> None:
    """Equal to `relative` of the largest value: a sum of many is no more exact than its terms."""
    expected = torch.as_tensor(expected)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.detach().to(expected.dtype), expected, rtol=relative, atol=relative * largest)
