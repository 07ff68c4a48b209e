"""Checks that a schedule is compatible with the rest of the configuration, and adds its corrections."""

from dataclasses import replace
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.rollout.kv_scales import UNIT
from megarl.schema import AlgorithmConfig, CorrectionConfig, MegarlConfig

if TYPE_CHECKING:
    from megarl.algorithms.policy_losses.policy_loss import PolicyLoss

_TRUNCATED_AT = 2.0
"""Bound of the importance weights that a schedule enables, as in the examples of verl and slime."""


def with_correction(config: MegarlConfig) -> AlgorithmConfig:
    """Add importance weights to the algorithm if the schedule allows staleness and nothing else corrects for it.

    Masks are kept besides: a mask drops what is far from the sampler, and leaves everything else at weight 1.

    Without a correction, one version of staleness has been enough to end others' runs; truncated importance sampling on
    the engine's log-probs saved them (arXiv:2505.24298 and "Your efficient RL framework secretly brings you off-policy
    training", 2025).

    A loss with one ratio per response gets the geometric mean over the response. GSPO's own ratio (arXiv:2507.18071,
    equation 7) is (pi / pi_old)^(1/|y|), and this weight turns it into the ratio to the sampler. The product over
    thousands of tokens is near 0 for nearly all responses, so it would train on the short ones.
    """
    algorithm, schedule = config.algorithm, config.schedule
    if not schedule.max_staleness or not schedule.corrected or _is_corrected(algorithm):
        return algorithm
    loss = _policy_loss(algorithm)
    kind = "sequence_mean_importance" if loss is not None and loss.of_response else "token_importance"
    return replace(algorithm, corrections=[*algorithm.corrections, CorrectionConfig(kind, high=_TRUNCATED_AT)])


def is_corrected_by_schedule(config: MegarlConfig) -> bool:
    """Whether the algorithm's corrections are those that its schedule enables by default."""
    corrections = config.algorithm.corrections
    alone = replace(config, algorithm=replace(config.algorithm, corrections=[]))
    return bool(corrections) and with_correction(alone).corrections == corrections


def check_schedule(config: MegarlConfig) -> None:
    """Raise UserError for a schedule that is incompatible with the rest of the configuration."""
    schedule, loop = config.schedule, config.loop
    slots = (schedule.max_staleness + 1) * loop.prompts_per_step
    if schedule.window > 1 and schedule.window + loop.prompts_per_step - 1 > slots:
        raise UserError(
            f"schedule.window={schedule.window} with loop.prompts_per_step={loop.prompts_per_step} looks beyond the "
            f"{slots} prompts that schedule.max_staleness={schedule.max_staleness} lets be on their way: set it to "
            f"{slots - loop.prompts_per_step + 1} at most, or raise max_staleness"
        )
    if schedule.in_flight == "keep" and config.cluster.sharing():
        raise UserError(
            "schedule.in_flight=keep has engines keep keys and values while weights change, and cluster.pools has them "
            "give that memory to the trainer meanwhile: set it to recompute, or give engines GPUs of their own"
        )
    if schedule.in_flight == "keep" and config.rollout.kv_scales != UNIT:
        raise UserError(
            "schedule.in_flight=keep has engines keep keys and values of older weights, and rollout.kv_scales="
            f"{config.rollout.kv_scales} would read them by the scales of newer ones: set one of the two otherwise"
        )
    if schedule.max_staleness > 1 and not _is_corrected(config.algorithm):
        raise UserError(
            f"schedule.max_staleness={schedule.max_staleness} trains on tokens that are several versions old, and "
            "nothing corrects for it: set algorithm.corrections with an importance weight (a mask alone is none), "
            "ratio_to=rollout, or schedule.corrected=true"
        )


def _is_corrected(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss includes the ratio to the sampler, in itself or as a weight."""
    # Imported here, because it imports torch, which takes seconds that most configurations need not wait.
    from megarl.algorithms import CORRECTIONS

    weights = [name for name, correction in CORRECTIONS.items() if correction.weighs]
    if any(each.kind in weights for each in algorithm.corrections):
        return True
    loss = _policy_loss(algorithm)
    return algorithm.ratio_to == "rollout" and loss is not None and loss.has_ratio_to_sampler


def _policy_loss(algorithm: AlgorithmConfig) -> "PolicyLoss | None":
    """The policy loss; None for an unknown name, which is refused elsewhere."""
    from megarl.algorithms import POLICY_LOSSES  # as above

    return POLICY_LOSSES.get(algorithm.policy_loss)
