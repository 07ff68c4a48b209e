"""An engine that lacks what a schedule or an algorithm asks of it is refused by its name, with what to do."""

from dataclasses import replace

import pytest

import megarl.rollout
from converters.errors import UserError
from megarl.config.abilities import check_abilities
from megarl.config.compose import compose
from megarl.config.validate import validate
from megarl.rollout import ENGINES
from megarl.rollout.kind import Ability
from megarl.rollout.vllm.kind import VLLM

ASKING = [
    (
        Ability.KEPT_KV,
        "schedule.in_flight=keep",
        "schedule.in_flight=keep has engines let responses keep .* apart from",
    ),
    (
        Ability.PRIORITIES,
        "schedule.max_staleness=1",
        "max_staleness=1 has engines serve requests in the order of their",
    ),
    (Ability.LOG_PROBS, "schedule.max_staleness=2", "algorithm.corrections of token_importance has engines say with"),
    (Ability.LOG_PROBS, "algorithm.ratio_to=rollout", "ratio_to=rollout has engines say with"),
    (
        Ability.LOG_PROBS,
        "schedule.max_staleness=1 schedule.corrected=false algorithm.updates_per_step=2"
        " algorithm.ratio_to=interpolated",
        "ratio_to=interpolated has engines say with",
    ),
    (Ability.LOG_PROBS, "algorithm.off_policy_mask=0.1", r"off_policy_mask=0\.1 has engines say with"),
    (Ability.LOG_PROBS, "algorithm.kl_unbiased=true algorithm.kl_coefficient=0.1", "kl_unbiased has engines say with"),
    (Ability.LOG_PROBS, "refit.verify=logprobs", "refit.verify=logprobs has engines say with"),
]


@pytest.fixture
def config_of(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.parquet").touch()
    files = [f"data.{name}_files=[{tmp_path}/data.parquet]" for name in ("train", "eval")]
    given = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out", *files]
    return lambda *overrides: compose("quickstart", [*given, *overrides])


@pytest.mark.parametrize(("lacking", "choice", "says"), ASKING)
def test_what_an_engine_lacks_is_refused_where_it_is_asked_for(config_of, monkeypatch, lacking, choice, says) -> None:
    bare = replace(VLLM, title="Bare", offers=frozenset(Ability) - {lacking})
    monkeypatch.setitem(megarl.rollout.ENGINES, "bare", bare)
    with pytest.raises(UserError, match=f"{says}.*, and Bare does not: .*, or choose another rollout.engine"):
        validate(config_of("rollout.engine=bare", *choice.split()), "train")
    validate(config_of("rollout.engine=vllm", *choice.split()), "train")


def test_a_plain_synchronous_run_asks_for_nothing(config_of, monkeypatch) -> None:
    monkeypatch.setitem(megarl.rollout.ENGINES, "bare", replace(VLLM, title="Bare", offers=frozenset()))
    check_abilities(config_of("rollout.engine=bare"))


def test_what_engines_lack() -> None:
    """As the page about engines has it, and their tests."""
    lacks = {name: set(Ability) - set(kind.offers) for name, kind in ENGINES.items()}
    assert lacks == {"vllm": set(), "transformers": set(), "sglang": {Ability.KEPT_KV}}
