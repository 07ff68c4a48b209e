"""HuggingFace transformers as a kind of engine, described without importing it."""

from collections.abc import Mapping

from megarl.rollout.argument_values import SIZE
from megarl.rollout.kind import Ability, EngineKind, EngineSizes

_TESTED: Mapping[str, str] = dict.fromkeys(
    (
        "dtype",
        "attn_implementation",
        "experts_implementation",
        "max_model_len",
        "max_num_seqs",
        "load_format",
        "float32_logits",
        "enable_return_routed_experts",
    ),
    "megarl/rollout/test_transformers_arguments.py",
)

MAX_NUM_SEQS = 64
"""The default of `max_num_seqs`."""

TRANSFORMERS = EngineKind(
    title="transformers",
    engine_class=("megarl.rollout.transformers.engine", "TransformersEngine"),
    argument_class=("megarl.rollout.transformers.arguments", "TransformersArguments"),
    refused={},
    tested=_TESTED,
    offers=frozenset(Ability),
    values={"max_model_len": SIZE.or_null, "max_num_seqs": SIZE},
    workers=lambda _arguments: 1,
    sizes=lambda _arguments: EngineSizes(tensor=1, expert=None, dtype="bf16"),
    max_concurrent_samples=lambda arguments: arguments.get("max_num_seqs") or MAX_NUM_SEQS,
    context_argument="max_model_len",
    without_weights={"load_format": "dummy"},
    float32_logits={"float32_logits": True},
    returning_experts={"enable_return_routed_experts": True},
    packages={"cuda": "transformers", "cpu": "transformers"},
)
