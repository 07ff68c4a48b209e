"""The table of a batch's fields: whole, enforced, and the one of the docs."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms import ImplicitRewardObjective, Metrics, PolicyObjective, ValueObjective
from megarl.cluster.trainer.batch import Batch
from megarl.schema import AlgorithmConfig
from megarl.stages.fields import FIELDS, Loss, for_loss, table, with_fields
from megatron_ext.log_probs import LogProbs
from megatron_ext.objective import Objective
from megatron_ext.packing.packing import RaggedBatch, pack

ROOT = Path(__file__).parents[3]
SOURCES = [
    *(ROOT / "megarl/stages").glob("*.py"),
    *(ROOT / "megarl/algorithms").rglob("*.py"),
    ROOT / "megarl/train.py",
]
NAMES = {field.name for field in FIELDS}


def fields_read(source: str) -> Iterator[str]:
    """The names in `fields["name"]`, `x.fields["name"]`, `x.field("name")` and its like, `at_trained("name", x)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == "fields":
            if isinstance(node.slice, ast.Constant):
                yield node.slice.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            asks = called in ("field", "constant", "values", "at_trained")
            yield from (each.value for each in node.args if asks and isinstance(each, ast.Constant))


def test_what_is_read_is_in_the_table() -> None:
    read = {name for file in SOURCES for name in fields_read(file.read_text())}
    assert len(read) > 8
    assert read <= NAMES


def test_what_is_in_the_table_is_made_where_it_says_and_named_elsewhere() -> None:
    table_itself = ROOT / "megarl/stages/fields.py"
    code = {file: file.read_text() for file in SOURCES if file != table_itself}
    functions = {
        node.name: (node, text)
        for file, text in code.items()
        if file.parent.name == "stages"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    for field in FIELDS:
        assert field.made_by in functions, field
        assert f"{field.name}=" in functions[field.made_by][1] or f'"{field.name}"' in functions[field.made_by][1], (
            field
        )
        assert sum(field.name in text for text in code.values()) >= 2, field


def test_a_field_is_known_and_of_its_type() -> None:
    batch = Batch(np.array([2]), [(np.array([1, 2]),)])
    assert with_fields(batch, weights=[(np.ones(2, np.float32),)]).values("weights").tolist() == [1, 1]
    with pytest.raises(ValueError, match="no field 'wieghts'"):
        with_fields(batch, wieghts=[])
    with pytest.raises(ValueError, match="'weights' of a batch is float32, and not float64"):
        with_fields(batch, weights=[(np.ones(2),)])


def policy(**settings: Any) -> PolicyObjective:
    return PolicyObjective(AlgorithmConfig(**settings))


@pytest.mark.parametrize(
    ("loss", "objective"),
    [
        ("policy", policy(kl_coefficient=0.1, updates_per_step=2)),
        ("policy", policy(ratio_to="rollout", corrections=[], off_policy_mask=0.1)),
        ("policy", policy(policy_loss="clip_cov", updates_per_step=2)),
        ("value", ValueObjective()),
        ("prime", ImplicitRewardObjective()),
    ],
)
def test_a_loss_gets_what_it_reads_and_nothing_else_changes_it(loss: Loss, objective: Objective) -> None:
    lengths = torch.tensor([5, 7])
    made = {
        field.name: torch.from_numpy(np.random.default_rng(number).random(12).astype(field.dtype))
        for number, field in enumerate(FIELDS)
        if field.dtype is not np.void
    }
    records = torch.zeros(12, 4, dtype=torch.uint8)
    batch = RaggedBatch(torch.arange(12), lengths, made, routed_experts=records)
    values = -torch.rand(12, generator=torch.Generator().manual_seed(99))
    predictions = values if loss == "value" else LogProbs(values, values.square(), values > -0.5)
    sent = for_loss(Batch.of(batch), loss).load()
    read = {field.name for field in FIELDS if loss in field.losses}
    assert set(sent.fields) == read - {"routed_experts"} < set(batch.fields)
    assert (sent.routed_experts is not None) == ("routed_experts" in read)
    (whole, all_metrics), (part, metrics) = (objective(predictions, pack(each, [0, 1])) for each in (batch, sent))
    assert torch.equal(whole, part)
    assert Metrics.merge([all_metrics]).values() == Metrics.merge([metrics]).values()


@pytest.mark.parametrize("loss", ["policy", "value", "prime"])
def test_no_field_is_sent_that_a_loss_does_not_read(loss: Loss) -> None:
    """Each is named in the module of the loss, or in one that it reads its micro-batch with; routers read theirs."""
    modules = {
        "policy": ("policy_objective.py", "trained_tokens.py"),
        "value": ("value_loss.py", "trained_tokens.py"),
        "prime": ("implicit_reward.py", "sequences.py"),
    }
    text = "".join((ROOT / "megarl/algorithms" / name).read_text() for name in modules[loss])
    sent = {field.name for field in FIELDS if loss in field.losses} - {"routed_experts"}
    assert [name for name in sent if name not in text] == []


def test_the_docs_have_the_table() -> None:
    assert table() in (ROOT / "docs/concepts.md").read_text(), f"docs/concepts.md needs:\n{table()}"
