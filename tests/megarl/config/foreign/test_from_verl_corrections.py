"""Importance weights and ratios of a command of verl, by the keys of all its versions, are those of the recipe."""

from typing import Any

import pytest
from verl_scripts import ACTOR, PPO_KEYS, said

from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import check

OF_0_6 = ("rollout_is", "rollout_is_threshold", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower")
"""Keys of verl 0.6.0 below `algorithm`."""
NEW = "algorithm.rollout_correction."


@pytest.mark.parametrize(
    ("given", "corrections"),
    [
        ({f"{ACTOR}tis_imp_ratio_cap": 3}, [{"kind": "token_importance", "high": 3}]),
        ({f"{ACTOR}tis_imp_ratio_cap": -1}, None),
        ((True, 5.0), [{"kind": "token_importance", "high": 5.0}]),
        ((True, 5.0, "sequence"), [{"kind": "sequence_importance", "high": 5.0}]),
        ((True, 5.0, "geometric", "truncate", 0.5), [{"kind": "sequence_mean_importance", "high": 5.0}]),
        (
            (True, 2.0, "token", "mask"),
            [{"kind": "token_importance", "high": 2.0}, {"kind": "token_band", "low": 0.5, "high": 2.0}],
        ),
        (
            (True, 2.0, "sequence", "mask", 0.1),
            [{"kind": "sequence_importance", "high": 2.0}, {"kind": "sequence_band", "low": 0.1, "high": 2.0}],
        ),
        ((False, 5.0), None),
        ((True,), None),
        (
            {f"{NEW}rollout_is": "token", f"{NEW}rollout_is_threshold": 4.0},
            [{"kind": "token_importance", "high": 4.0}],
        ),
        ({f"{NEW}rollout_is": "sequence"}, [{"kind": "sequence_importance", "high": 2.0}]),
        ({f"{NEW}rollout_is": None, f"{NEW}rollout_is_threshold": 4.0}, None),
        # Two bounds with a line between them are IcePop's.
        (
            {f"{NEW}rollout_is": "token", f"{NEW}rollout_is_threshold": "0.5_4.0"},
            [{"kind": "icepop", "low": 0.5, "high": 4.0}],
        ),
        (
            {f"{NEW}rollout_is": "sequence", f"{NEW}rollout_is_threshold": "0.5_4.0"},
            [{"kind": "sequence_importance", "high": 4.0}, {"kind": "sequence_band", "low": 0.5, "high": 4.0}],
        ),
    ],
)
def test_importance_weights_of_every_version_are_weights_here(
    given: dict[str, Any] | tuple[Any, ...], corrections: list[dict[str, Any]] | None
) -> None:
    if isinstance(given, tuple):
        given = {f"algorithm.{name}": value for name, value in zip(OF_0_6, given, strict=False)}
    overrides = [f"{name}={'null' if value is None else value}" for name, value in given.items()]
    recipe = from_verl([*PPO_KEYS, *overrides], {})
    check(recipe)
    assert recipe.get("algorithm.corrections") == corrections
    assert recipe.absent == {}


@pytest.mark.parametrize(
    ("given", "loss", "corrections"),
    [
        (["rollout_is=token"], "clip", None),
        (["rollout_is=sequence", "loss_type=ppo_clip"], "clip", None),
        (["loss_type=reinforce"], "policy_gradient", None),
        (
            ["loss_type=reinforce", "rollout_is=sequence"],
            "policy_gradient",
            [{"kind": "sequence_importance", "high": 2.0}],
        ),
    ],
)
def test_a_ratio_to_the_rollout_weighs_once(
    given: list[str], loss: str, corrections: list[dict[str, Any]] | None
) -> None:
    """With bypass_mode verl takes its own loss: one of importance weights, or a clipped ratio that they are not in."""
    mode = [f"{ACTOR}policy_loss.loss_mode=gspo", f"{NEW}bypass_mode=true", f"{ACTOR}ppo_mini_batch_size=16"]
    recipe = from_verl([*PPO_KEYS, *mode, *(NEW + each for each in given)], {})
    check(recipe)
    found = [recipe.get(f"algorithm.{name}") for name in ("policy_loss", "ratio_to", "corrections")]
    assert found == [loss, "rollout", corrections]
    assert recipe.absent == {}
    is_left_out = loss == "clip" and f"{NEW}{given[0]}" in said(recipe.always)
    assert is_left_out == ("rollout_is" in given[0])


def test_masks_are_kinds_of_corrections() -> None:
    given = [
        f"{NEW}rollout_rs=token_k1",
        f"{NEW}rollout_token_veto_threshold=1e-4",
        "algorithm.rollout_is_veto_threshold=1",
    ]
    recipe = from_verl([*PPO_KEYS, *given], {})
    (why,) = recipe.absent
    assert why.startswith("masks of tokens and responses are kinds of algorithm.corrections")


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo"])
def test_clips_that_are_null_are_those_of_clip_ratio(loss: str) -> None:
    actor = "actor_rollout_ref.actor."
    nulls = (f"{actor}clip_ratio_low=null", f"{actor}clip_ratio_high=null", f"{actor}tis_imp_ratio_cap=null")
    recipe = from_verl([*PPO_KEYS, f"{actor}policy_loss.loss_mode={loss}", f"{actor}clip_ratio=0.3", *nulls], {})
    assert recipe.get("algorithm.policy_loss_options.clip_low") == 0.3
    assert recipe.get("algorithm.policy_loss_options.clip_high") == 0.3
