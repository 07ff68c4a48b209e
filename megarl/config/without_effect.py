"""Warns, at the start of a run, of accepted choices that have no effect."""

from megarl.algorithms import POLICY_LOSSES
from megarl.algorithms.parts import option_defaults
from megarl.schema import AlgorithmConfig, MegarlConfig


def without_effect(config: MegarlConfig) -> list[str]:
    """One sentence for each choice that cannot have an effect in this run."""
    return [*_in_algorithm(config.algorithm), *_in_schedule(config)]


def _in_schedule(config: MegarlConfig) -> list[str]:
    schedule = config.schedule
    if not schedule.max_staleness or schedule.in_flight != "wait" or not config.cluster.sharing():
        return []
    return [
        f"schedule.max_staleness={schedule.max_staleness} makes tokens older and nothing faster: in cluster.pools "
        "trainer and engines take turns, and with schedule.in_flight=wait that of the engines lasts until all has "
        "ended: set it to recompute, or max_staleness=0"
    ]


def _in_algorithm(config: AlgorithmConfig) -> list[str]:
    """See `without_effect`.

    With one update per rollout, the trained policy is the old policy, so every ratio to it is 1, and a loss of ratios
    becomes the plain policy gradient. This is not wrong in itself, only different from the chosen loss. GRPO with the
    default options does not choose a clip, so it gets no warning.
    """
    if config.updates_per_step > 1 or config.ratio_to != "old":
        return []
    loss = POLICY_LOSSES[config.policy_loss]
    if loss.acts_on_policy or not loss.has_ratio:
        return []
    remedy = (
        "set algorithm.updates_per_step to more (the presets of configs/algorithm have their papers'), or "
        "algorithm.ratio_to=rollout"
    )
    why = "with algorithm.updates_per_step=1 every ratio to the old policy is 1"
    if config.policy_loss != AlgorithmConfig().policy_loss:
        return [f"algorithm.policy_loss={config.policy_loss} is the plain policy gradient here, since {why}: {remedy}"]
    defaults = option_defaults(loss.surrogate)
    changed = [name for name, value in config.policy_loss_options.items() if value != defaults[name]]
    if not changed:
        return []
    return [f"algorithm.policy_loss_options.{', '.join(changed)} never acts, since {why}: {remedy}"]
