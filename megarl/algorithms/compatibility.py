"""Checks that the values and parts of an algorithm are valid, alone and in combination."""

from collections.abc import Mapping
from typing import Protocol

from converters.errors import UserError
from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.corrections import CORRECTIONS, check_correction
from megarl.algorithms.kl import KL_ESTIMATORS, UNBIASED
from megarl.algorithms.parts import (
    ABOVE_ZERO,
    NOT_NEGATIVE,
    Option,
    Range,
    check_options,
    lookup,
    option_defaults,
)
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.policy_losses.covariance import select_clip_cov
from megarl.schema import AlgorithmConfig

_AVERAGES_RESPONSES = "seq_mean_token_mean"
_COVARIANCES = option_defaults(select_clip_cov)


class PartWithOptions(Protocol):
    """An entry of a registry that takes options from the configuration."""

    @property
    def options(self) -> Mapping[str, Option]:
        """The options, by name."""
        ...


_PARTS_WITH_OPTIONS: Mapping[str, Mapping[str, PartWithOptions]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
}
"""Key of `algorithm` -> its registry. The options of the part are in `KEY_options`."""


_VALUES: dict[str, Range] = {
    "off_policy_mask": NOT_NEGATIVE,
    "distillation_coefficient": Range(lambda value: 0 <= value < float("inf"), "at least 0 and finite"),
    "kl_coefficient": NOT_NEGATIVE,
    "kl_target": ABOVE_ZERO,
    "kl_horizon": ABOVE_ZERO,
    "entropy_coefficient": Range(lambda value: abs(value) < float("inf"), "a finite number"),
}
"""Ranges of keys of `algorithm`. Options of parts have theirs in the annotations of the part's function."""


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise UserError for an unknown name, a number out of range (NaN always is), and parts that cannot be combined."""
    check_each_part(config)
    for check in _CHECKS:
        check(config)


def check_each_part(config: AlgorithmConfig) -> None:
    """Raise UserError for an unknown name or a number out of range."""
    for kind, registry in _PARTS_WITH_OPTIONS.items():
        _check_part(kind, registry, config)
    lookup(KL_ESTIMATORS, "algorithm.kl_estimator", config.kl_estimator)
    for name, known in (("kl_in", ("loss", "reward")), ("ratio_to", ("old", "rollout", "interpolated"))):
        if getattr(config, name) not in known:
            raise UserError(f"algorithm.{name}={getattr(config, name)!r} is not known: it must be {' or '.join(known)}")
    _check_values(config)


def option_keys() -> list[str]:
    """Configuration keys of the options of all parts, sorted."""
    return sorted(
        {
            f"algorithm.{kind}_options.{option}"
            for kind, registry in _PARTS_WITH_OPTIONS.items()
            for part in registry.values()
            for option in part.options
        }
    )


def _check_values(config: AlgorithmConfig) -> None:
    for name, within in _VALUES.items():
        value = getattr(config, name)
        if value is not None and not within.holds(value):
            raise UserError(f"algorithm.{name} must be {within.words}, not {value}")
    for correction in config.corrections:
        check_correction(correction)


def _check_part(kind: str, registry: Mapping[str, PartWithOptions], config: AlgorithmConfig) -> None:
    name, options, key = getattr(config, kind), getattr(config, f"{kind}_options"), f"algorithm.{kind}_options"
    check_options(options, lookup(registry, f"algorithm.{kind}", name).options, key, f"{kind}={name}")


def _covariances_have_a_band(config: AlgorithmConfig) -> None:
    options = {**_COVARIANCES, **config.policy_loss_options}
    low, high = options["covariance_low"], options["covariance_high"]
    if not low < high:
        raise UserError(
            f"algorithm.policy_loss_options.covariance_low={low} must be below covariance_high={high}: no token would "
            "have a covariance between the two"
        )


def _kl_has_a_gradient(config: AlgorithmConfig) -> None:
    if config.kl_in == "loss" and config.kl_estimator == "k1" and config.kl_coefficient and not config.kl_unbiased:
        raise UserError(
            "algorithm.kl_estimator=k1 with kl_in=loss adds only noise, since its gradient is 0 in the mean: use"
            " kl_estimator=k1+, which has the gradient of k2, or kl_in=reward"
        )


def _unbiased_kl_is_one(config: AlgorithmConfig) -> None:
    if not config.kl_unbiased:
        return
    if config.kl_estimator not in UNBIASED:
        raise UserError(
            f"algorithm.kl_unbiased weighs an unbiased estimate by the ratio, but kl_estimator={config.kl_estimator}"
            f" is none, or takes its gradient from elsewhere: use {' or '.join(UNBIASED)}"
        )
    if config.kl_in != "loss" or not config.kl_coefficient:
        raise UserError(
            "algorithm.kl_unbiased is of a KL in the loss, and there is none: set kl_in=loss and kl_coefficient above"
            " 0, or leave it out"
        )


def _several_updates_have_a_ratio(config: AlgorithmConfig) -> None:
    if config.updates_per_step == 1 or POLICY_LOSSES[config.policy_loss].has_ratio:
        return
    if config.ratio_to == "rollout" and any(CORRECTIONS[each.kind].weighs for each in config.corrections):
        return
    raise UserError(
        f"algorithm.updates_per_step={config.updates_per_step} with policy_loss={config.policy_loss}, which has no"
        " ratio: from the second update on the policy is no longer the one that sampled, and nothing would correct for"
        " it; use policy_loss=clip or cispo, ratio_to=rollout with a correction such as token_importance, or"
        " updates_per_step=1"
    )


def _interpolation_spares_something(config: AlgorithmConfig) -> None:
    if config.ratio_to == "interpolated" and config.updates_per_step == 1:
        raise UserError(
            "algorithm.ratio_to=interpolated estimates the policy before the first of several updates, and with"
            " updates_per_step=1 that is the present one, exactly: set ratio_to=old, or updates_per_step to more"
        )


def _ratios_are_taken_once(config: AlgorithmConfig) -> None:
    if config.ratio_to != "rollout" or not POLICY_LOSSES[config.policy_loss].has_ratio_to_sampler:
        return
    for correction in config.corrections:
        if CORRECTIONS[correction.kind].weighs:
            masks = ", ".join(name for name, other in CORRECTIONS.items() if not other.weighs)
            raise UserError(
                f"algorithm.ratio_to=rollout has the ratio to the engine in policy_loss={config.policy_loss} already,"
                f" and corrections has the kind {correction.kind}, which would weigh by it once more: use one of"
                f" {masks}, or ratio_to=old"
            )


def _filters_have_a_band(config: AlgorithmConfig) -> None:
    low, high = config.filter_low, config.filter_high
    if (low is not None or high is not None) and not (config.dynamic_sampling or config.filter_groups):
        raise UserError(
            f"algorithm.filter_low={low} and filter_high={high} say which groups teach nothing, but nothing asks: set"
            " dynamic_sampling=true to replace such groups, or filter_groups=true to leave them out"
        )
    if low is not None and high is not None and not low <= high:
        raise UserError(f"algorithm.filter_low={low} must be at most filter_high={high}: no group would be left")
    if config.dynamic_sampling and config.filter_groups:
        raise UserError(
            "algorithm.dynamic_sampling replaces the groups that filter_groups would leave out: set one of the two"
        )


def _statistics_leave_out_what_the_loss_does(config: AlgorithmConfig) -> None:
    if config.train_on_truncated_responses and not config.truncated_responses_in_statistics:
        raise UserError(
            "algorithm.truncated_responses_in_statistics=false is for responses that are not trained on: set"
            " train_on_truncated_responses=false, too, or leave it out"
        )
    compared, kl_in_reward = ADVANTAGES[config.advantage], config.kl_in == "reward" and config.kl_coefficient > 0
    if config.train_on_truncated_responses or not config.truncated_responses_in_statistics or not kl_in_reward:
        return
    if compared.smallest_group > 1 and compared.reads_token_rewards:
        raise UserError(
            f"algorithm.advantage={config.advantage} would compare truncated responses without the KL in their rewards,"
            " which is known of trained tokens alone, with the others: with train_on_truncated_responses=false and"
            " kl_in=reward set truncated_responses_in_statistics=false, or kl_in=loss"
        )


def _kl_adapts_from_something(config: AlgorithmConfig) -> None:
    if config.kl_target is not None and not config.kl_coefficient:
        raise UserError(
            f"algorithm.kl_target={config.kl_target} multiplies algorithm.kl_coefficient, which is 0 and would stay so:"
            " set kl_coefficient to the value to start from"
        )


def _responses_stay_whole(config: AlgorithmConfig) -> None:
    if not POLICY_LOSSES[config.policy_loss].of_response:
        return
    if config.aggregation != _AVERAGES_RESPONSES:
        raise UserError(
            f"algorithm.policy_loss={config.policy_loss} has one ratio per response and is a mean over responses, but"
            f" aggregation={config.aggregation} weighs them by something else: set aggregation={_AVERAGES_RESPONSES}"
        )
    for correction in config.corrections:
        if CORRECTIONS[correction.kind].of_token:
            whole = ", ".join(name for name, other in CORRECTIONS.items() if not other.of_token)
            raise UserError(
                f"algorithm.policy_loss={config.policy_loss} has one ratio per response, but corrections has the kind"
                f" {correction.kind}, which weighs its tokens one by one: use one of {whole}"
            )


_CHECKS = (
    _kl_has_a_gradient,
    _unbiased_kl_is_one,
    _kl_adapts_from_something,
    _covariances_have_a_band,
    _responses_stay_whole,
    _several_updates_have_a_ratio,
    _interpolation_spares_something,
    _ratios_are_taken_once,
    _filters_have_a_band,
    _statistics_leave_out_what_the_loss_does,
)
