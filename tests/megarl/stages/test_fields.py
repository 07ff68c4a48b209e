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
from megarl.stages.fields import FIELDS, Field, LearnedModel, for_loss, table, with_fields
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


CALLS_BY_NAME = ("field", "constant", "values", "at_trained")
"""Functions whose arguments are names of fields."""


def fields_read(source: str) -> Iterator[str]:
    """Names of fields that code reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name)), ctx=ast.Load()) if are_fields(of):
                yield name
            case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()], comparators=[of]):
                yield from [name] if are_fields(of) else []
            case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(name)), *_]):
                yield from [name] if are_fields(of) else []
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=names) if called in CALLS_BY_NAME:
                yield from (each.value for each in names if isinstance(each, ast.Constant))
            case ast.keyword(arg="batch_field", value=ast.Constant(value=str(name))):
                yield name


def parameters(source: str) -> set[str]:
    """Names of parameters: functions of a loss are given fields by these."""
    return {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg)}


def are_fields(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("fields", "_fields", "known")


def fields_made(source: str, function: str) -> set[str]:
    """Texts and keywords in the code of a function, and of those of its module that it calls."""
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    made, left = set[str](), [function]
    while left:
        node = functions.pop(left.pop(), None)
        for part in ast.walk(node) if node else ():
            match part:
                case ast.Name(id=name):
                    left.append(name)
                case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                    made.add(name)
    return made


def test_names_in_comments_and_of_what_is_made_are_not_read() -> None:
    made = 'fields["a"] = b  # c\nx.fields |= {"d": e}\nwith_fields(x, f=1)'
    read = 'fields["g"]\n"h" in x.fields\nself._fields.get("i", 0)\nx.field("j")\nInput(batch_field="k")'
    assert "".join(fields_read(f"{made}\n{read}")) == "ghijk"


def test_what_a_function_makes_is_in_it_or_in_what_it_calls() -> None:
    source = 'def a():\n    b(c=0)\ndef b():\n    fields["d"] = 1  # e\ndef f():\n    g("h")'
    assert fields_made(source, "a") == {"c", "d"}
    assert fields_made(source, "e") == set()


def test_what_is_read_is_in_the_table() -> None:
    read = {name for file in SOURCES for name in fields_read(file.read_text())}
    assert len(read) > 8
    # A prediction of the policy, which becomes `old_log_probs`.
    assert read - {"log_probs"} <= NAMES


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_what_is_in_the_table_is_made_where_it_says_and_read(field: Field) -> None:
    code = [file.read_text() for file in SOURCES if file != ROOT / "megarl/stages/fields.py"]
    assert any(field.name in fields_made(source, field.made_by) for source in code)
    assert any(field.name in {*fields_read(source)} | parameters(source) for source in code)


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
    ("model", "objective"),
    [
        ("policy", policy(kl_coefficient=0.1, updates_per_step=2)),
        ("policy", policy(ratio_to="rollout", corrections=[], off_policy_mask=0.1)),
        ("policy", policy(policy_loss="clip_cov", updates_per_step=2)),
        ("critic", ValueObjective()),
        ("implicit_reward_model", ImplicitRewardObjective()),
    ],
)
def test_a_loss_gets_what_it_reads_and_nothing_else_changes_it(model: LearnedModel, objective: Objective) -> None:
    lengths = torch.tensor([5, 7])
    made = {
        field.name: torch.from_numpy(np.random.default_rng(number).random(12).astype(field.dtype))
        for number, field in enumerate(FIELDS)
        if field.dtype is not np.void
    }
    records = [[np.zeros(length, "V4")] for length in lengths.tolist()]
    batch = RaggedBatch(torch.arange(12), lengths, made, routed_experts=records)
    values = -torch.rand(12, generator=torch.Generator().manual_seed(99))
    predictions = values if model == "critic" else LogProbs(values, values.square(), values > -0.5)
    sent = for_loss(Batch.of(batch), model).load()
    read = {field.name for field in FIELDS if model in field.models}
    assert set(sent.fields) == read - {"routed_experts"} < set(batch.fields)
    assert (sent.routed_experts is not None) == ("routed_experts" in read)
    (whole, all_metrics), (part, metrics) = (objective(predictions, pack(each, [0, 1])) for each in (batch, sent))
    assert torch.equal(whole, part)
    assert Metrics.merge([all_metrics]).values() == Metrics.merge([metrics]).values()


@pytest.mark.parametrize("model", ["policy", "critic", "implicit_reward_model"])
def test_no_field_is_sent_that_a_loss_does_not_read(model: LearnedModel) -> None:
    """Each is read in a module of the loss, or in one that it reads its micro-batch with; routers read theirs."""
    modules = {
        "policy": (
            "policy_objective.py",
            "trained_tokens.py",
            "policy_losses/ratios.py",
            "policy_losses/surrogates.py",
        ),
        "critic": ("value_loss.py", "trained_tokens.py"),
        "implicit_reward_model": ("implicit_reward.py", "sequences.py"),
    }
    code = [(ROOT / "megarl/algorithms" / name).read_text() for name in modules[model]]
    read = {name for source in code for name in (*fields_read(source), *parameters(source))}
    sent = {field.name for field in FIELDS if model in field.models} - {"routed_experts"}
    assert sent <= read


def test_the_docs_have_the_table() -> None:
    assert table() in (ROOT / "docs/concepts.md").read_text(), f"docs/concepts.md needs:\n{table()}"
