"""A predicted step as tables for people and as facts for programs."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from megarl.planning.amounts import say_bytes, say_seconds
from megarl.planning.search import Proposal, say_engine, say_trainer
from megarl.planning.step.knobs import Turned
from megarl.planning.step.prediction import StepPrediction

_KNOBS = 8
_PROPOSALS = 5


def step_facts(prediction: StepPrediction) -> dict[str, Any]:
    """The prediction; sizes in bytes per GPU, times in seconds."""
    engine, colocated = prediction.engine_memory, prediction.step.refit.colocated
    return {
        "step_seconds": prediction.step_seconds,
        "stage_seconds": prediction.seconds,
        "trainer_bytes": {**prediction.trainer_memory.parts, "stage": prediction.trainer_memory.stage},
        "trainer_room_bytes": prediction.trainer_room,
        "engine_bytes": {"weights": engine.weights, "working": engine.working, "kv_cache": engine.kv_cache},
        "engine_tokens": engine.tokens,
        "engine_room_bytes": prediction.engine_room,
        "staged_bytes": prediction.step.staged_bytes,
        "rollout_room_bytes": prediction.rollout_room,
        "fits": prediction.fits,
        **({"host_bytes": dict(zip(("trainer", "engine"), prediction.host_bytes, strict=True))} if colocated else {}),
    }


def step_tables(prediction: StepPrediction, knobs: list[Turned]) -> Iterator[Table]:
    """Memory of a GPU, seconds of the stages, and the effect of each knob."""
    yield _memory(prediction)
    yield _stages(prediction)
    yield _knobs(prediction, knobs)


def proposal_tables(proposal: Proposal) -> Iterator[Table]:
    """The proposed sizes, and those that did not fit."""
    table = _table("Proposed sizes", "step", "rollout", "training", "trainer", "engines")
    for each in proposal.best[:_PROPOSALS]:
        table.add_row(
            say_seconds(each.step_seconds),
            say_seconds(each.rollout_seconds),
            say_seconds(sum(each.training_seconds.values())),
            say_trainer(each),
            say_engine(each),
        )
    yield table
    out = Table(title="What falls out", title_justify="left", title_style="bold", box=None, show_header=False)
    out.add_column(overflow="fold")
    for reason in filter(None, (fallen.say() for fallen in proposal.fallen_out)):
        out.add_row(reason)
    out.add_row(f"{proposal.fitting - 1:,} other combinations fit and take longer")
    yield out


def proposal_facts(proposal: Proposal) -> list[dict[str, Any]]:
    """The proposed sizes, the best first."""
    return [
        {"trainer": say_trainer(each), "engines": say_engine(each), **step_facts(each)}
        for each in proposal.best[:_PROPOSALS]
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _memory(prediction: StepPrediction) -> Table:
    table = _table("Memory of a GPU", "", "trainer", "engine")
    memory, engine, refit = prediction.trainer_memory, prediction.engine_memory, prediction.step.refit
    staged = prediction.step.staged_bytes
    rows = (
        ("weights", memory.weights, engine.weights),
        ("gradients", memory.gradients, None),
        ("optimizer state", memory.optimizer, None),
        *([("reference", memory.reference, None)] if memory.reference else []),
        *([("gathered by FSDP2", memory.gathered, None)] if memory.gathered else []),
        ("activations", memory.activations, None),
        ("working", memory.working, engine.working),
        ("keys and values", None, max(0, engine.kv_cache)),
        ("buckets of a refit", prediction.bucket_bytes, prediction.bucket_bytes),
        *([("staged values", staged if refit.colocated else None, staged)] if staged else []),
        *([("on the host in turns", *prediction.host_bytes)] if refit.colocated else []),
    )
    for name, *values in rows:
        table.add_row(name, *("" if value is None else say_bytes(value) for value in values))
    rooms = prediction.trainer_room, prediction.rollout_room
    table.add_row("left", *(f"{'-' if room < 0 else ''}{say_bytes(abs(room))}" for room in rooms))
    return table


def _stages(prediction: StepPrediction) -> Table:
    table = _table("Seconds of a step", "stage", "s", "share")
    total = prediction.step_seconds
    for name, seconds in prediction.seconds.items():
        # Runs without log-prob passes do not have this stage.
        if not seconds:
            continue
        table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}")
    table.add_row("step", f"{total:.1f}", "rollout beside training" if prediction.step.overlaps else "")
    return table


def _knobs(prediction: StepPrediction, knobs: list[Turned]) -> Table:
    table = _table("What a knob does", "knob", "step, s", "change", "fits")
    # The largest changes, in either direction.
    most = sorted(knobs, key=lambda each: -abs(each.prediction.step_seconds - prediction.step_seconds))[:_KNOBS]
    for each in sorted(most, key=lambda one: one.prediction.step_seconds):
        seconds = each.prediction.step_seconds
        table.add_row(
            each.name,
            f"{seconds:.1f}",
            f"{seconds / prediction.step_seconds - 1:+.0%}",
            "yes" if each.prediction.fits else "no",
        )
    return table
