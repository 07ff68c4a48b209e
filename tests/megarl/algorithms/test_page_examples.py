"""The examples of docs/add_an_algorithm.md work as they stand, in the files that they name."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megarl.algorithms.advantages.registry
import megarl.algorithms.policy_losses.registry  # noqa: F401 - the examples name it
from megarl.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from megarl.algorithms.advantages import estimate
from megarl.algorithms.ragged import Ragged

PAGE = Path(__file__).parents[3] / "docs/add_an_algorithm.md"
REGISTRIES: dict[str, Any] = {
    "ADVANTAGES": ADVANTAGES,
    "POLICY_LOSSES": POLICY_LOSSES,
    "AGGREGATIONS": AGGREGATIONS,
    "KL_ESTIMATORS": KL_ESTIMATORS,
    "CORRECTIONS": CORRECTIONS,
}
RAGGED = Ragged(torch.tensor([2, 0, 3]))
VALUES = torch.linspace(-1, -0.1, 5)


def use(registry: str, name: str, part: Any) -> torch.Tensor:
    """A value for each of five tokens."""
    match registry:
        case "ADVANTAGES":
            inputs = {"responses": RAGGED, "groups": torch.zeros(3, dtype=torch.long)}
            return estimate(name, {**inputs, "rewards": torch.tensor([1.0, 0.0, 0.5])})[0]
        case "POLICY_LOSSES":
            inputs = {"log_probs": VALUES, "old_log_probs": VALUES - 0.1, "advantages": VALUES + 0.5}
            return part({**inputs, "responses": RAGGED}, {}).loss
        case "AGGREGATIONS":
            return part(RAGGED.lengths)
        case "KL_ESTIMATORS":
            return part(VALUES, VALUES - 0.1)
        case _:
            return part.rule(part.statistic(VALUES, RAGGED), 0.5, 2.0)


def sections(page: str) -> Iterator[tuple[Any, str | None, str]]:
    """Module, registry for entries of one, and text of each piece of the page's code."""
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        module = None
        for heading, text in re.findall(r"^# (.*)\n((?:(?!# ).*\n?)*)", block, re.MULTILINE):
            path = re.match(r"(megarl/[\w/]+)\.py", heading)
            module = sys.modules[path[1].replace("/", ".")] if path else module
            registry = re.search(r"in ([A-Z_]+)$", heading)
            yield module, registry[1] if registry else None, text


def test_the_examples_of_the_page_work(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    for module, registry, text in sections(PAGE.read_text()):
        if registry is None:
            made: dict[str, Any] = {}
            exec(text, vars(module) | {}, made)
            for name, function in made.items():
                monkeypatch.setattr(module, name, function, raising=False)
            continue
        for name, part in eval(f"{{{text}}}", vars(module)).items():
            assert name not in REGISTRIES[registry]
            monkeypatch.setitem(REGISTRIES[registry], name, part)
            assert use(registry, name, part).shape == (5,)
            used.add(registry)
    assert used == set(REGISTRIES)
