"""The fields of a batch, one value per token each: meaning, producer and consumers."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from megarl.cluster.trainer.batch import Batch
from megarl.data.stretches import Values
from megatron_ext.packing.packing import DRAFTED

LearnedModel = Literal["policy", "critic", "implicit_reward_model"]
"""Models that are trained in a step, each by its own loss."""


class Field(NamedTuple):
    """One field of a `Batch`: a value for each of its T tokens. The losses of `models` read it.

    Example: Field("returns", np.float32, "what a critic learns", "with_advantages", "value loss", models=("critic",))
    """

    name: str
    dtype: type[np.generic]
    meaning: str
    made_by: str
    read_by: str
    models: tuple[LearnedModel, ...] = ()


_F32 = np.float32
FIELDS = (
    Field("trained", np.bool_, "whether the token is trained on", "to_batch", "all that follows"),
    Field(
        "rollout_log_probs",
        _F32,
        "the engine's log-prob, 0 if not sampled",
        "to_batch",
        "corrections, policy loss",
        ("policy",),
    ),
    Field(
        "staleness",
        _F32,
        "how many versions older than now the weights are that sampled it",
        "with_staleness",
        "interpolated ratios",
        ("policy",),
    ),
    Field(
        "on_kept_kv",
        np.bool_,
        "whether the weights of now sampled it on keys and values of older ones",
        "with_staleness",
        "metrics of the policy loss",
        ("policy",),
    ),
    Field(
        "routed_experts",
        np.void,
        "the engine's experts of the token, in bytes",
        "to_batch",
        "the policy's routers",
        ("policy",),
    ),
    Field(
        "old_log_probs",
        _F32,
        "the policy's before the step",
        "with_model_outputs",
        "ratios, KL in the reward, advantages",
        ("policy",),
    ),
    Field(
        "reference_log_probs",
        _F32,
        "the reference's",
        "with_model_outputs",
        "KL, sppo, preferences",
        ("policy", "implicit_reward_model"),
    ),
    Field("probability_squares", _F32, "sum of squared probabilities", "with_model_outputs", "optimal_token_baseline"),
    Field("teacher_log_probs", _F32, "the teacher's", "with_model_outputs", "distillation"),
    Field("old_values", _F32, "the critic's before the step", "with_model_outputs", "gae, value loss", ("critic",)),
    Field("process_rewards", _F32, "of the implicit reward model", "with_model_outputs", "prime"),
    Field(
        "implicit_reference_log_probs",
        _F32,
        "of that model's reference",
        "with_model_outputs",
        "update of the implicit reward model",
    ),
    Field("advantages", _F32, "0 if not trained on", "with_advantages", "policy loss", ("policy",)),
    Field("returns", _F32, "what a critic learns", "with_advantages", "value loss", ("critic",)),
    Field(
        "outcomes",
        _F32,
        "reward of the response",
        "with_advantages",
        "update of the implicit reward model",
        ("implicit_reward_model",),
    ),
    Field(
        "weights",
        _F32,
        "weight in the loss, 0 if not trained on",
        "mini_batches",
        "all losses",
        ("policy", "critic", "implicit_reward_model"),
    ),
    Field(
        "chosen",
        np.bool_,
        "whether the loss treats the token apart",
        "update_policy",
        "clip_cov, kl_cov",
        ("policy",),
    ),
)
"""Every field, in the order in which a step makes them. Each is [T], aligned with the tokens it is about."""

_BY_NAME = {field.name: field for field in FIELDS}


def with_fields(batch: Batch, **fields: Sequence[Values]) -> Batch:
    """Add or replace fields of `batch`.

    Raises ValueError for a field that is not in `FIELDS` or has another dtype than there.
    """
    for name, sequences in fields.items():
        if name not in _BY_NAME:
            raise ValueError(f"a batch has no field {name!r}: enter it in megarl/stages/fields.py")
        expected = _BY_NAME[name].dtype
        for found in {np.dtype(stretch.dtype) for values in sequences for stretch in values}:
            if not np.issubdtype(found, expected):
                raise ValueError(f"the field {name!r} of a batch is {np.dtype(expected)}, and not {found}")
    return batch.with_fields(**fields)


def for_loss(batch: Batch, model: LearnedModel) -> Batch:
    """Keep only the fields that the loss of `model` and its prediction layers read: every rank is sent all fields."""
    return batch.only([DRAFTED, *(field.name for field in FIELDS if model in field.models)])


def table() -> str:
    """`FIELDS` in Markdown."""
    header = ("field", "dtype", "value of a token", "made by", "read by"), ("---",) * 5
    rows = [
        (f"`{name}`", np.dtype(dtype).name, meaning, made_by, read_by)
        for name, dtype, meaning, made_by, read_by, _ in FIELDS
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (*header, *rows))
