"""Warnings from a run's metrics about slow failures, each given once when it begins."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megarl.algorithms import ADVANTAGES, POLICY_LOSSES, Rewards
from megarl.schema import MegarlConfig
from megarl.tracking.histogram import MetricValue, numbers
from megarl.tracking.jsonl import FILE_NAME, each_step


class Thresholds(Protocol):
    """When to warn; None means never. The names are those of the configuration group `tracking`."""

    warn_after_steps: int
    warn_entropy_fraction: float | None
    warn_kl_to_reference: float | None
    warn_kl_to_old: float | None
    warn_log_prob_difference: float | None
    warn_no_signal: float | None
    warn_truncated_fraction: float | None
    warn_timed_out_fraction: float | None
    warn_expert_imbalance: float | None


def always(_config: MegarlConfig) -> bool:
    """Return True: the advice applies to every run."""
    return True


@dataclass(frozen=True)
class Advice:
    """Advice, and a check of which runs it applies to."""

    text: str
    acts: Callable[[MegarlConfig], bool] = always


@dataclass(frozen=True)
class Alert:
    """A metric that is bad above the threshold of a key or, if `falls`, below that share of the run's first value."""

    name: str
    metric: str
    key: str
    says: str
    advice: tuple[Advice, ...]
    falls: bool = False
    speaks: Callable[[MegarlConfig], bool] = always
    """Whether the alert applies to a run."""

    def limit(self, thresholds: Thresholds, first: float) -> float | None:
        """The value at which bad values begin, in a run whose first value was `first`."""
        threshold: float | None = getattr(thresholds, self.key)
        return threshold * first if self.falls and threshold is not None else threshold


def _has_ratios(config: MegarlConfig) -> bool:
    """Whether ratios can differ from 1, so that clipping and penalties have an effect."""
    return config.algorithm.updates_per_step > 1 or config.algorithm.ratio_to == "rollout"


def _clips_upward(config: MegarlConfig) -> bool:
    return _has_ratios(config) and POLICY_LOSSES[config.algorithm.policy_loss].clips_upward


def _takes_any_reward(config: MegarlConfig) -> bool:
    return ADVANTAGES[config.algorithm.advantage].rewards is Rewards.ANY


def _compares_rewards(config: MegarlConfig) -> bool:
    """Whether rewards are compared within groups: not with a single response, nor by distillation."""
    return config.loop.samples_per_prompt > 1 and ADVANTAGES[config.algorithm.advantage].reads_rewards


def _clips_plainly(config: MegarlConfig) -> bool:
    return config.algorithm.policy_loss == "clip"


def _samples_from_all(config: MegarlConfig) -> bool:
    return config.rollout.top_p == 1 and config.rollout.top_k == -1


def _corrections_are_open(config: MegarlConfig) -> bool:
    return _samples_from_all(config) and not config.algorithm.corrections and config.algorithm.ratio_to != "rollout"


def _leaves_routers_alone(config: MegarlConfig) -> bool:
    options = ("moe_aux_loss_coeff", "moe_router_bias_update_rate")
    return not any(config.megatron.get(option) for option in options) and not config.model.freeze_moe_router


ALERTS: tuple[Alert, ...] = (
    Alert(
        "entropy_collapse",
        "policy/entropy",
        "warn_entropy_fraction",
        "the policy's entropy has collapsed",
        (
            Advice("it samples nearly the same response every time and finds nothing new"),
            Advice("raise algorithm.policy_loss_options.clip_high", _clips_upward),
            Advice("raise algorithm.entropy_coefficient"),
            Advice("use algorithm.policy_loss=clip_cov", _clips_plainly),
            Advice("use algorithm.policy_loss=kl_cov", lambda config: _clips_plainly(config) and _has_ratios(config)),
            Advice("lower the learning rate"),
        ),
        falls=True,
    ),
    Alert(
        "kl_to_reference",
        "policy/kl_to_reference",
        "warn_kl_to_reference",
        "the policy has gone far from the reference model",
        (
            Advice("look at its responses for what earns reward without being good"),
            Advice("raise algorithm.kl_coefficient", lambda config: config.algorithm.kl_target is None),
            Advice("lower algorithm.kl_target", lambda config: config.algorithm.kl_target is not None),
            Advice("lower the learning rate"),
        ),
    ),
    Alert(
        "kl_to_old",
        "policy/kl_to_old",
        "warn_kl_to_old",
        "the updates of a step move the policy far from the one that sampled",
        (
            Advice("lower the learning rate"),
            Advice("lower algorithm.updates_per_step", lambda config: config.algorithm.updates_per_step > 1),
        ),
    ),
    Alert(
        "log_prob_difference",
        "log_prob_difference/mean",
        "warn_log_prob_difference",
        "engine and trainer disagree about the log-probabilities of what was sampled",
        (
            Advice(
                "rollout.top_p and top_k are part of it: sample from all tokens",
                lambda config: not _samples_from_all(config),
            ),
            Advice("set algorithm.corrections", _corrections_are_open),
            Advice("check the numerics of the engine (dtype, quantisation, kernels)"),
            Advice("check the refits with refit.verify=logprobs", lambda config: config.refit.verify != "logprobs"),
        ),
        # Off-policy responses were sampled by older weights, whose log-probs differ anyway.
        speaks=lambda config: config.schedule.max_staleness == 0,
    ),
    Alert(
        "no_signal",
        "groups/no_signal",
        "warn_no_signal",
        "nearly all groups have no difference in reward",
        (
            Advice("groups/all_right and groups/all_wrong say whether the prompts are too easy or too hard"),
            Advice("choose others"),
            Advice("raise loop.samples_per_prompt"),
            Advice("set algorithm.dynamic_sampling=true", lambda config: not config.algorithm.dynamic_sampling),
        ),
        speaks=_compares_rewards,
    ),
    Alert(
        "responses_truncated",
        "response_length/truncated_fraction",
        "warn_truncated_fraction",
        "many responses run into the limit",
        (
            Advice("raise rollout.max_response_tokens"),
            Advice(
                "penalise length with reward.overlong_buffer_tokens",
                lambda config: not config.reward.overlong_buffer_tokens and _takes_any_reward(config),
            ),
        ),
    ),
    Alert(
        "rewards_timed_out",
        "reward/undecided_fraction",
        "warn_timed_out_fraction",
        "many responses take too long to score, and their rewards say nothing of them",
        (
            Advice("look at what the reward function waits for, or a built-in one with the part unchecked computes"),
            Advice("raise reward.timeout_s"),
            Advice("lower reward.async_samples, where a server is slow with so many requests"),
            Advice(
                "set reward.on_timeout=stop to be shown the first", lambda config: config.reward.on_timeout != "stop"
            ),
        ),
    ),
    Alert(
        "experts_unbalanced",
        "experts/imbalance_mean",
        "warn_expert_imbalance",
        "few experts get most of the tokens, and with experts over ranks the others wait for them",
        (
            Advice("experts/imbalance/<layer> says in which layers"),
            Advice(
                "set megatron.moe_router_load_balancing_type=global_aux_loss with megatron.moe_aux_loss_coeff, or,"
                " where routers have a bias (DeepSeek-V3, Kimi-K2, Moonlight, GLM-4.5),"
                " megatron.moe_router_bias_update_rate",
                _leaves_routers_alone,
            ),
        ),
    ),
)


@dataclass
class AlertState:
    """State of an alert: the metric's first value, and the lengths of the current streaks of bad and good values."""

    first: float | None = None
    bad: int = 0
    good: int = 0
    since: int = 0
    """Step at which the current streak of bad values began."""
    warned: bool = False


@dataclass(frozen=True)
class AlertReport:
    """Findings of a step: 0 or 1 for each alert, and a sentence for each that has just begun."""

    metrics: dict[str, float]
    warnings: list[str]


@dataclass
class Alerts:
    """Watches the metrics of each step, in order, and warns once when an alert begins.

    An alert begins when its metric was bad in `warn_after_steps` consecutive steps that logged it, and ends when it was
    good in as many. A missing or NaN value counts as neither.
    """

    thresholds: Thresholds
    config: MegarlConfig = field(default_factory=MegarlConfig)
    """The run's configuration, which determines the applicable alerts and advice."""
    _states: dict[str, AlertState] = field(default_factory=lambda: {alert.name: AlertState() for alert in ALERTS})

    @classmethod
    def of_run(cls, config: MegarlConfig, output_dir: Path, step: int) -> "Alerts":
        """Create the alerts of a run that has done `step` steps, replaying its metrics.jsonl.

        Without that file (tracking.loggers without jsonl) the state starts empty, and ongoing alerts are warned about
        again.
        """
        alerts = cls(config.tracking, config)
        if step and (output_dir / FILE_NAME).exists():
            alerts.replay(line for line in each_step(output_dir) if line["step"] <= step)
        return alerts

    def replay(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Restore the state from lines of metrics.jsonl, whose warnings were given before."""
        for line in history:
            known = {name: value for name, value in line.items() if isinstance(value, float | int)}
            self.observe(line["step"], known)

    def observe(self, step: int, metrics: Mapping[str, MetricValue]) -> AlertReport:
        """Return "warning/<alert>" for every alert whose metric is in `metrics`, and sentences for those that begin."""
        known, seen = numbers(metrics), AlertReport({}, [])
        for alert in ALERTS:
            value = known.get(alert.metric, math.nan)
            if math.isnan(value) or not alert.speaks(self.config):
                continue
            state = self._states[alert.name]
            state.first = value if state.first is None else state.first
            limit = alert.limit(self.thresholds, state.first)
            if limit is None:
                continue
            if self._begins(state, step, is_bad=value < limit if alert.falls else value > limit):
                seen.warnings.append(_sentence(alert, state, value, limit, self.config))
            seen.metrics[f"warning/{alert.name}"] = float(state.warned)
        return seen

    def _begins(self, state: AlertState, step: int, *, is_bad: bool) -> bool:
        if is_bad and not state.bad:
            state.since = step
        state.bad, state.good = (state.bad + 1, 0) if is_bad else (0, state.good + 1)
        before = state.warned
        if state.bad >= self.thresholds.warn_after_steps:
            state.warned = True
        elif state.good >= self.thresholds.warn_after_steps:
            state.warned = False
        return state.warned and not before


def _sentence(alert: Alert, state: AlertState, value: float, limit: float, config: MegarlConfig) -> str:
    side = f"below {limit:.3g} (the run began with {state.first:.3g})" if alert.falls else f"above {limit:.3g}"
    return (
        f"warning: {alert.says}: since step {state.since} {alert.metric} is {side}, now {value:.3g}; "
        f"{', '.join(each.text for each in alert.advice if each.acts(config))} (tracking.{alert.key})"
    )
