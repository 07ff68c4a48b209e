"""When a run is warned of, and how often."""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pytest

from megarl.diagnostics.alerts import ALERTS, Alerts, Thresholds
from megarl.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    LoopConfig,
    MegarlConfig,
    RewardConfig,
    RolloutConfig,
    TrackingConfig,
)
from megarl.tracking import Histogram, Run
from megarl.tracking.jsonl import JsonLinesLogger
from megarl.tracking.metrics import METRICS


@dataclass
class Keys:
    warn_after_steps: int = 3
    warn_entropy_fraction: float | None = 0.1
    warn_kl_to_reference: float | None = 0.5
    warn_kl_to_old: float | None = 0.1
    warn_log_prob_difference: float | None = 0.1
    warn_no_signal: float | None = 0.9
    warn_truncated_fraction: float | None = 0.5
    warn_timed_out_fraction: float | None = 0.5
    warn_expert_imbalance: float | None = 8.0


CONFIG = MegarlConfig(tracking=TrackingConfig(**asdict(Keys())))


def run(alerts: Alerts, metric: str, values: list[float], start: int = 1) -> list[tuple[int, str]]:
    """The steps at which something was said, and what."""
    return [
        (step, text)
        for step, value in enumerate(values, start=start)
        for text in alerts.observe(step, {metric: value, "reward/mean": 1.0}).warnings
    ]


def test_a_collapse_of_the_entropy_is_said_once_with_its_beginning():
    ((step, text),) = run(Alerts(Keys()), "policy/entropy", [2.0, 1.0, 0.19, 0.18, 0.17, 0.16, 0.15, 0.14])
    assert step == 5
    assert re.fullmatch(
        r"warning: the policy's entropy has collapsed: since step 3 policy/entropy is below 0\.2 "
        r"\(the run began with 2\), now 0\.17; .*algorithm\.entropy_coefficient.* \(tracking\.warn_entropy_fraction\)",
        text,
    )


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_is_seen_beyond_its_threshold_and_not_at_it(alert):
    keys = Keys(warn_after_steps=2)
    at = getattr(keys, alert.key) * (8 if alert.falls else 1)
    beyond = at * (0.99 if alert.falls else 1.01)
    start = [8.0] if alert.falls else []
    assert run(Alerts(keys), alert.metric, [*start, *[at] * 5]) == []
    ((_, text),) = run(Alerts(keys), alert.metric, [*start, *[beyond] * 5])
    assert alert.metric in text
    assert f"tracking.{alert.key}" in text
    setattr(keys, alert.key, None)
    assert run(Alerts(keys), alert.metric, [*start, *[beyond] * 5]) == []


def test_single_bad_steps_are_no_episode_and_single_good_ones_do_not_end_one():
    bad, good = 1.0, 0.0
    assert run(Alerts(Keys()), "groups/no_signal", [bad, bad, good] * 5) == []
    said = run(Alerts(Keys()), "groups/no_signal", [bad, bad, bad, good, good, bad, bad, bad, bad])
    assert [step for step, _ in said] == [3]
    said = run(Alerts(Keys()), "groups/no_signal", [bad] * 3 + [good] * 3 + [bad] * 4)
    assert [step for step, _ in said] == [3, 9]
    assert "since step 7" in said[1][1]


def test_the_metric_is_one_while_it_lasts_and_there_where_its_source_is():
    alerts = Alerts(Keys(warn_after_steps=2))
    course = [alerts.observe(step, {"policy/kl_to_old": value}).metrics for step, value in enumerate([1, 1, 1, 0, 0])]
    assert course == [{"warning/kl_to_old": value} for value in (0.0, 1.0, 1.0, 1.0, 0.0)]
    missing = {"reward/mean": 1.0, "policy/kl_to_old": float("nan"), "policy/entropy": Histogram((0, 1), (1,))}
    assert alerts.observe(9, missing).metrics == {}


VALUES = [2.0, 0.1, float("nan"), 0.1, 0.1, 0.1, 2.0, 0.1, 2.0, 2.0, 2.0, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("step", range(1, len(VALUES)))
def test_a_resumed_run_has_seen_what_the_file_tells(tmp_path: Path, step: int) -> None:
    def log(alerts: Alerts, steps: range, logger: JsonLinesLogger) -> list:
        seen = []
        for each in steps:
            metrics = {"policy/entropy": VALUES[each], "lengths": Histogram((0, 1), (1,))}
            seen.append(alerts.observe(each, metrics))
            logger.log(each, {**metrics, **seen[-1].metrics})
        return seen

    whole = log(Alerts(Keys()), range(len(VALUES)), JsonLinesLogger(Run(tmp_path, 0, 99)))
    # The file goes on beyond the checkpoint that the run continues from.
    resumed = Alerts.of_run(CONFIG, tmp_path, step)
    rest = range(step + 1, len(VALUES))
    after = log(resumed, rest, JsonLinesLogger(Run(tmp_path, step + 1, 99, resumed=True)))
    assert after == whole[step + 1 :]


def test_a_run_without_a_file_begins_anew(tmp_path):
    assert run(Alerts.of_run(CONFIG, tmp_path, 7), "groups/no_signal", [1.0] * 3, start=8)[0][0] == 10


def test_alerts_watch_what_is_logged_and_every_key_is_of_one():
    names = {metric.name for metric in METRICS}
    assert {alert.metric for alert in ALERTS} <= names
    assert {alert.key for alert in ALERTS} | {"warn_after_steps"} == {field.name for field in fields(Keys)}
    assert Thresholds.__annotations__.keys() == Keys.__annotations__.keys()


CORRECTED = [CorrectionConfig("token_importance", high=2.0)]
COULD_ACT = (
    # Advice for an alert, where it acts, and where it would change nothing or be refused.
    ("entropy_collapse", "clip_high", {"updates_per_step": 2}, {}),
    ("entropy_collapse", "clip_high", {"ratio_to": "rollout"}, {"updates_per_step": 2, "policy_loss": "cispo"}),
    ("entropy_collapse", "kl_cov", {"updates_per_step": 2}, {}),
    ("entropy_collapse", "clip_cov", {}, {"policy_loss": "gspo"}),
    ("kl_to_reference", "kl_coefficient", {}, {"kl_target": 0.1}),
    ("kl_to_reference", "kl_target", {"kl_target": 0.1}, {}),
    ("kl_to_old", "updates_per_step", {"updates_per_step": 2}, {}),
    ("log_prob_difference", "corrections", {}, {"corrections": CORRECTED}),
    ("log_prob_difference", "corrections", {}, {"ratio_to": "rollout"}),
    ("no_signal", "dynamic_sampling", {}, {"dynamic_sampling": True}),
    ("responses_truncated", "overlong_buffer_tokens", {}, {"advantage": "max_rl"}),
)


def said_of(alert: str, config: MegarlConfig) -> str:
    (found,) = [each for each in ALERTS if each.name == alert]
    bad = [8.0, *[0.0] * 3] if found.falls else [9.0] * 3
    ((_, text),) = run(Alerts(Keys(), config), found.metric, bad)
    return text


@pytest.mark.parametrize(("alert", "advice", "acts", "does_not"), COULD_ACT)
def test_only_what_can_act_is_advised(alert: str, advice: str, acts: dict, does_not: dict) -> None:
    assert advice in said_of(alert, MegarlConfig(algorithm=AlgorithmConfig(**acts)))
    assert advice not in said_of(alert, MegarlConfig(algorithm=AlgorithmConfig(**does_not)))


def test_a_cut_vocabulary_is_named_in_the_place_of_corrections_which_it_would_ruin() -> None:
    text = said_of("log_prob_difference", MegarlConfig(rollout=RolloutConfig(top_p=0.9)))
    assert "algorithm.corrections" not in text
    assert "rollout.top_p" in text
    assert "rollout.top_p" not in said_of("log_prob_difference", MegarlConfig())


@pytest.mark.parametrize(
    ("advantage", "samples", "speaks"), [("gae", 1, False), ("gae", 2, True), ("distillation", 4, False)]
)
def test_equal_rewards_are_said_where_they_could_differ_and_teach(advantage: str, samples: int, speaks: bool) -> None:
    config = MegarlConfig(algorithm=AlgorithmConfig(advantage=advantage), loop=LoopConfig(samples_per_prompt=samples))
    assert bool(run(Alerts(Keys(), config), "groups/no_signal", [1.0] * 9)) == speaks


def test_a_penalty_that_is_there_is_not_advised() -> None:
    config = MegarlConfig(reward=RewardConfig(overlong_buffer_tokens=8))
    assert "overlong_buffer_tokens" not in said_of("responses_truncated", config)
