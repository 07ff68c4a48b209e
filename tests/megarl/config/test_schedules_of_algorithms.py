"""Every algorithm and every recipe under every schedule: corrected as its loss can be, or refused by name."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.algorithms import CORRECTIONS
from megarl.config.compose import compose
from megarl.config.folder import known_model, recipes_folder
from megarl.config.schedule import with_correction
from megarl.config.validate import validate
from megarl.schema import CorrectionConfig, MegarlConfig, ScheduleConfig

SCHEDULES = {
    "sync": ScheduleConfig(),
    "one step off": ScheduleConfig(max_staleness=1, in_flight="wait"),
    "recompute": ScheduleConfig(max_staleness=1, in_flight="recompute"),
    "keep": ScheduleConfig(max_staleness=2, in_flight="keep"),
}
WEIGHTED_BY_RESPONSE = {"gmpo", "gspo", "gspo_qwen3_moe", "quickstart_sppo", "sppo"}
"""Algorithms and recipes whose loss has one ratio to a response: weights of single tokens would be refused."""
RATIO_TO_SAMPLER = {"dppo"}
"""Algorithms whose loss has the ratio to the engine's own log-probs: there is nothing left to correct."""
GIVEN = {
    "distillation": ["+teachers={sums: {path: teacher}}"],
    "quickstart_distillation": ["teachers.sums.path=teacher"],
}
"""Values that an algorithm or a recipe leaves open."""
NO_ROLLOUTS = ("chat", "eval", "quickstart_dpo", "quickstart_reward_model", "quickstart_sft", "quickstart_spin")
ALGORITHMS = sorted(file.stem for file in (recipes_folder() / "algorithm").glob("*.yaml"))
RECIPES = sorted({file.stem for file in recipes_folder().glob("*.yaml")} - {*NO_ROLLOUTS})


@pytest.fixture
def composed(tmp_path: Path, name: str) -> MegarlConfig:
    """An algorithm on the quickstart's task, or a recipe, with a model of its kind as far as this is checked."""
    (tmp_path / "data.parquet").touch()
    files = [f"data.{each}_files=[{tmp_path}/data.parquet]" for each in ("train", "eval")]
    given = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out", *files, *GIVEN.get(name, ())]
    algorithm = [f"+algorithm={name}"] if name in ALGORITHMS else []
    config = compose("quickstart" if algorithm else name, [*algorithm, *given, "cluster.address=auto"])
    fields = {} if config.model.name is None else {**known_model(config.model.name), "num_nextn_predict_layers": 0}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    return config


def under(schedule: ScheduleConfig, config: MegarlConfig) -> MegarlConfig:
    """As `compose` makes it of the same configuration and the schedule."""
    scheduled = replace(config, schedule=schedule)
    return replace(scheduled, algorithm=with_correction(scheduled))


def weighing(kinds: Sequence[str]) -> list[str]:
    """The kinds that are importance weights; the others are masks."""
    return [kind for kind in kinds if CORRECTIONS[kind].weighs]


@pytest.mark.parametrize("name", [*ALGORITHMS, *RECIPES])
def test_each_is_corrected_for_the_staleness_it_may_have_as_its_loss_can_be(composed: MegarlConfig, name: str) -> None:
    own = [each.kind for each in composed.algorithm.corrections]
    weight = "sequence_mean_importance" if name in WEIGHTED_BY_RESPONSE else "token_importance"
    stale = own if weighing(own) else [*own, weight]
    for schedule in SCHEDULES.values():
        config = under(schedule, composed)
        if schedule.in_flight == "keep" and config.cluster.sharing():
            with pytest.raises(UserError, match=r"^schedule\.in_flight=keep .* cluster\.pools has .* to recompute, or"):
                validate(config, "train")
            continue
        validate(config, "train")
        kinds = [each.kind for each in config.algorithm.corrections]
        if name in RATIO_TO_SAMPLER:
            assert (kinds, config.algorithm.ratio_to) == (own, "rollout")
        else:
            assert (kinds, config.algorithm.ratio_to) == (stale if schedule.max_staleness else own, "old")
            assert len(weighing(kinds)) == 1 or not schedule.max_staleness


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_mask_is_no_correction_for_staleness(composed: MegarlConfig, name: str) -> None:
    """It leaves at a weight of 1 whatever it keeps."""
    mask = CorrectionConfig("sequence_kl", high=1.0)
    masked = replace(composed, algorithm=replace(composed.algorithm, corrections=[mask]))
    config = under(SCHEDULES["recompute"], masked)
    validate(config, "train")
    assert config.algorithm.corrections[0] == mask
    assert len(weighing([each.kind for each in config.algorithm.corrections])) == (name not in RATIO_TO_SAMPLER)
    assert under(config.schedule, config) == config
    uncorrected = under(ScheduleConfig(max_staleness=2, corrected=False), masked)
    if name in RATIO_TO_SAMPLER:
        validate(uncorrected, "train")
        return
    with pytest.raises(UserError, match=r"and nothing corrects for it: .* \(a mask alone is none\)"):
        validate(uncorrected, "train")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_without_a_correction_is_refused_above_one_version(composed: MegarlConfig, name: str) -> None:
    algorithm = replace(composed.algorithm, corrections=[])
    uncorrected = replace(composed, algorithm=algorithm, schedule=ScheduleConfig(max_staleness=2, corrected=False))
    if name in RATIO_TO_SAMPLER:
        validate(uncorrected, "train")
        return
    says = "schedule.max_staleness=2 trains on tokens that are several versions old, and nothing corrects for it"
    with pytest.raises(UserError, match=re.escape(says)):
        validate(under(uncorrected.schedule, uncorrected), "train")


@pytest.mark.parametrize("name", ["gmpo", "gspo", "sppo"])
def test_weights_of_single_tokens_are_refused_where_a_response_has_one_ratio(composed: MegarlConfig, name: str) -> None:
    tokens = under(SCHEDULES["recompute"], replace(composed, algorithm=replace(composed.algorithm, policy_loss="clip")))
    assert [each.kind for each in tokens.algorithm.corrections] == ["token_importance"]
    wrong = replace(composed.algorithm, corrections=tokens.algorithm.corrections)
    with pytest.raises(UserError, match=f"policy_loss={name} has one ratio per response, but .* token_importance"):
        validate(replace(composed, algorithm=wrong, schedule=SCHEDULES["recompute"]), "train")


@pytest.mark.parametrize(("name", "kind"), [("sppo", "sequence_mean_importance"), ("distillation", "token_importance")])
def test_a_loss_without_a_ratio_to_the_sampler_is_corrected_whatever_its_ratio_is_to(
    composed: MegarlConfig, name: str, kind: str
) -> None:
    bare = replace(composed, algorithm=replace(composed.algorithm, corrections=[], ratio_to="rollout"))
    config = under(SCHEDULES["recompute"], bare)
    assert [each.kind for each in config.algorithm.corrections] == [kind]
    validate(config, "train")
    uncorrected = replace(bare, schedule=ScheduleConfig(max_staleness=2, corrected=False))
    with pytest.raises(UserError, match="and nothing corrects for it"):
        validate(under(uncorrected.schedule, uncorrected), "train")
