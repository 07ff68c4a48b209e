"""Time and memory of the advantage estimators on one core, compared with verl's padded functions on equal values.

verl is imported from --peers (constraints/algorithm_peers.txt lists the packages for that folder); without it only the
first table is made. Prints Markdown.
"""

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from machine import at_least_one, describe
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, estimate
from megarl.algorithms.ragged import Ragged

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"gamma": 0.99, "gae_lambda": 0.95}
# Per-token inputs of estimators, as functions of random numbers in [0, 1).
TOKEN_FIELDS: dict[str, Callable[[Tensor], Tensor]] = {
    "token_rewards": lambda uniform: uniform / 100,
    "values": lambda uniform: uniform,
    # Probabilities are at most 1 / e, which keeps the squared gradient 1 - 2 pi + sum of squares positive, as a
    # policy's is.
    "old_log_probs": lambda uniform: -1 - uniform,
    "probability_squares": lambda uniform: uniform,
    "process_rewards": lambda uniform: uniform / 10,
    "teacher_log_probs": lambda uniform: -uniform,
}
# Our estimator for each of verl's functions, by registry name; the faster one where two give the same values.
PEERS = {
    "gae": "gae",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_pass_k",
    "gdpo": "gdpo",
    "optimal_token_baseline": "optimal_token_baseline",
}


@dataclass(frozen=True)
class Cost:
    """Cost of one call: the minimum over several runs."""

    seconds: float
    cpu_seconds: float
    extra_bytes: int
    """Peak memory above the level before the call, including the result."""


def cost(call: Callable[[], object], runs: int) -> Cost:
    """Time `call` repeatedly, and discard its results."""
    costs = []
    for _ in range(runs):
        # Resets the peak of the resident memory.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        costs.append((seconds, cpu_seconds, _status("VmHWM") - before))
        del result
    seconds, cpu_seconds, extra_bytes = (min(column) for column in zip(*costs, strict=True))
    return Cost(seconds, cpu_seconds, int(extra_bytes))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


class Batch:
    """Random responses, padded and ragged; fields are created on request."""

    def __init__(self, lengths: Tensor, longest: int, groups: int) -> None:
        """Assign the responses of the given `lengths` to `groups` groups in turn."""
        self.generator = torch.Generator().manual_seed(0)
        self.mask = torch.arange(longest) < lengths[:, None]
        self.responses = Ragged(lengths)
        self.groups = torch.arange(len(lengths)) % groups
        self.rewards = torch.rand(len(lengths), generator=self.generator)
        self.baselines = torch.rand(len(lengths), generator=self.generator)

    def padded(self, field: str) -> Tensor:
        """[N, longest], with 0 after the end of a response."""
        self.generator.manual_seed(list(TOKEN_FIELDS).index(field))
        return TOKEN_FIELDS[field](torch.rand(self.mask.shape, generator=self.generator)).mul_(self.mask)

    def inputs(self, name: str, *, with_token_rewards: bool = False) -> dict[str, Any]:
        """The inputs of the estimator `name`."""
        needed = ADVANTAGES[name].needs | ({"token_rewards"} if with_token_rewards else set())
        return {
            "responses": self.responses,
            "groups": self.groups,
            "rewards": self.rewards,
            "parts": {"only": self.rewards} if "parts" in needed else {},
            "baseline_rewards": self.baselines if "baseline_rewards" in needed else None,
            **{field: self.padded(field)[self.mask] for field in TOKEN_FIELDS if field in needed},
        }


def batch_bytes(inputs: Mapping[str, Any]) -> int:
    """Bytes of an estimator's batch: token ids (8 bytes each) and every tensor that it is given."""
    given = [value for value in inputs.values() if isinstance(value, Tensor)]
    return 8 * inputs["responses"].tokens + inputs["responses"].lengths.nbytes + sum(tensor.nbytes for tensor in given)


def estimators(responses: int, tokens: int, of_groups: Sequence[int], runs: int) -> Iterator[str]:
    """Yield a table of all estimators on responses of equal length."""
    yield "| estimator | groups | seconds | CPU s | extra / batch | + token rewards: seconds | CPU s | extra / batch |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for groups in of_groups:
        batch = Batch(torch.full((responses,), tokens), tokens, groups)
        for name in ADVANTAGES:
            cells = [f"{name} | {groups}"]
            for with_token_rewards in (False, True):
                inputs = batch.inputs(name, with_token_rewards=with_token_rewards)
                spent = cost(partial(_ours, name, inputs), runs)
                share = spent.extra_bytes / batch_bytes(inputs)
                cells.append(f"{spent.seconds:.3f} | {spent.cpu_seconds:.3f} | {share:.2f}")
            yield f"| {' | '.join(cells)} |"


def _options(name: str) -> dict[str, float]:
    return {option: OPTIONS[option] for option in ADVANTAGES[name].options if option in OPTIONS}


def _ours(name: str, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Run our estimator with its checks, without what an earlier run has cached."""
    return estimate(name, {**inputs, "responses": Ragged(inputs["responses"].lengths)}, _options(name))


def beside_verl(verl: ModuleType, responses: int, tokens: int, runs: int) -> Iterator[str]:
    """Yield a table of verl's functions and ours on responses of tokens / 8 to tokens tokens.

    Raises AssertionError if the values differ by more than 1e-5 of the largest.
    """
    lengths = torch.randint(tokens // 8, tokens + 1, (responses,), generator=torch.Generator().manual_seed(1))
    lengths[0] = tokens
    batch = Batch(lengths, tokens, responses // 8)
    yield "| verl's function | verl: seconds | CPU s | ours: seconds | CPU s | times as fast | difference |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for theirs, ours in PEERS.items():
        inputs, arguments = batch.inputs(ours), verl_arguments(batch, ours)
        function = verl.get_adv_estimator_fn(theirs)
        padded = function(**arguments)[0][batch.mask]
        difference = float((padded - estimate(ours, inputs, _options(ours))[0]).abs().max() / padded.abs().max())
        assert difference < 1e-5, f"{theirs} and {ours} differ by {difference:.1e} of the largest value"
        del padded
        slow, fast = cost(partial(function, **arguments), runs), cost(partial(_ours, ours, inputs), runs)
        yield (
            f"| {theirs} | {slow.seconds:.3f} | {slow.cpu_seconds:.3f} | {fast.seconds:.3f} | {fast.cpu_seconds:.3f} "
            f"| {slow.cpu_seconds / fast.cpu_seconds:.1f} | {difference:.0e} |"
        )


def verl_arguments(batch: Batch, ours: str) -> dict[str, Any]:
    """Arguments of verl's function: everything padded, with the reward at the last token."""
    from verl.trainer.config import AlgoConfig  # type: ignore[import-not-found,unused-ignore]

    mask = batch.mask.float()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), batch.responses.lengths - 1] = batch.rewards
    every: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask}
    by_group = {"index": batch.groups.numpy(), "config": AlgoConfig(gamma=OPTIONS["gamma"])}
    special: dict[str, Callable[[], dict[str, Any]]] = {
        "gae": lambda: {"values": batch.padded("values"), "gamma": OPTIONS["gamma"], "lam": OPTIONS["gae_lambda"]},
        "remax": lambda: {"reward_baselines": batch.baselines},
        "reinforce_plus_plus": lambda: {"config": by_group["config"]},
        "optimal_token_baseline": lambda: {
            "index": by_group["index"],
            "old_log_probs": batch.padded("old_log_probs"),
            "sum_pi_squared": batch.padded("probability_squares"),
        },
    }
    return every | special.get(ours, lambda: by_group)()


def find_verl(folder: Path) -> ModuleType | str:
    """verl's algorithms, or why they cannot be imported."""
    sys.path.append(str(folder))
    try:
        from verl.trainer.ppo import core_algos  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        return (
            f"verl is not measured: {error} (in {folder.name}; constraints/algorithm_peers.txt says what goes there)."
        )
    return core_algos


def show(rows: Iterator[str]) -> None:
    """Print each row as soon as it is available."""
    for row in rows:
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=at_least_one, default=8192)
    parser.add_argument("--tokens", type=at_least_one, default=4096, help="of the longest response")
    parser.add_argument("--groups", type=at_least_one, nargs="+", default=[64, 1024], help="one table row for each")
    parser.add_argument("--runs", type=at_least_one, default=5)
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-algorithm-peers")
    options = parser.parse_args()
    # Responses are compared within groups, and verl's groups have eight.
    if options.responses < (least := max(8, 2 * max(options.groups))):
        parser.error(f"--responses {options.responses} are too few: these --groups need at least {least}")
    torch.set_num_threads(1)
    print(f"Machine: {describe(ROOT)}\n\nVersions: torch {torch.__version__}")
    print(f"\n## {options.responses:,} responses of {options.tokens:,} tokens, one thread\n")
    show(estimators(options.responses, options.tokens, options.groups, options.runs))
    print(
        f"\n## Beside verl: {options.responses:,} responses of {options.tokens // 8:,} to {options.tokens:,} tokens\n"
    )
    verl = find_verl(options.peers)
    if isinstance(verl, str):
        print(verl)
        return
    print(f"verl {importlib.metadata.version('verl')}\n")
    show(beside_verl(verl, options.responses, options.tokens, options.runs))


if __name__ == "__main__":
    main()
