"""Advantages and the KL of a script of slime are those of the recipe, or it is said what they are not."""

from pathlib import Path

import pytest
import torch
from slime_scripts import script
from verl_scripts import said

from megarl.algorithms.advantages import estimate
from megarl.algorithms.ragged import Ragged
from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.slime_flags import ADVANTAGES, WHITENED


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("estimator", "advantage"),
    [
        ("ppo", "gae"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
    ],
)
def test_advantages_that_are_whitened_here_and_not_there_are_said(
    tmp_path: Path, estimator: str, advantage: str, normalized: bool
) -> None:
    chosen = f"--advantage-estimator {estimator}"
    flags = chosen + " --normalize-advantages" * normalized
    recipe = from_slime(script(tmp_path, "--advantage-estimator grpo", flags), {"BASE": "/b"})
    assert recipe.get("algorithm.advantage") == advantage
    notes = [why for why, settings in recipe.absent.items() if chosen in settings]
    assert [why.split(",")[0] for why in notes] == ([] if normalized else [f"{advantage} whitens advantages here"])
    assert ("--normalize-advantages" in said(recipe.always)) == normalized
    assert "--normalize-advantages" not in said(recipe.absent)


def test_advantages_that_are_whitened_there_and_not_here_are_said(tmp_path: Path) -> None:
    flags = "--advantage-estimator grpo --normalize-advantages"
    recipe = from_slime(script(tmp_path, "--advantage-estimator grpo", flags), {"BASE": "/b"})
    (why,) = [why for why, settings in recipe.absent.items() if "--normalize-advantages" in settings]
    assert why == "only gae, reinforce_plus_plus, reinforce_plus_plus_baseline whiten advantages here, and always do"


def test_advantages_called_whitened_are_all_that_are() -> None:
    """All that scripts of slime become are asked."""
    inputs = {
        "responses": Ragged(torch.tensor([1, 3, 2, 2])),
        "groups": torch.tensor([0, 0, 1, 1]),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 3.0]),
        "values": torch.tensor([0.3, 0.1, 0.2, 0.5, 0.1, 0.0, 0.2, 0.9]),
    }
    for advantage in {advantage for advantage, _ in ADVANTAGES.values()}:
        estimated = estimate(advantage, inputs)[0].double()
        is_white = float(estimated.mean()) == pytest.approx(0, abs=1e-5)
        is_white &= float(estimated.std()) == pytest.approx(1, abs=1e-3)
        assert is_white == (advantage in WHITENED), advantage


@pytest.mark.parametrize(
    ("estimator", "lost"),
    [
        *((name, "grpo, gspo and cispo make nothing of this KL") for name in ("grpo", "gspo", "cispo")),
        ("reinforce_plus_plus_baseline", "each token's advantage bears the KL of that token"),
        ("reinforce_plus_plus", None),
        ("ppo", None),
    ],
)
def test_a_kl_in_the_reward_is_there_where_slime_has_one(tmp_path: Path, estimator: str, lost: str | None) -> None:
    flags = f"--advantage-estimator {estimator} --kl-coef 0.01 --kl-loss-type k1"
    run = script(
        tmp_path, "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl", flags
    )
    recipe = from_slime(run, {"BASE": "/b"})
    found = [recipe.get(f"algorithm.{key}") for key in ("kl_coefficient", "kl_in", "kl_estimator")]
    assert found == ([None] * 3 if lost else [0.01, "reward", "k1"])
    assert [lost in why for why, settings in recipe.absent.items() if "--kl-coef 0.01" in settings] == [True] * bool(
        lost
    )


@pytest.mark.parametrize(
    ("flags", "is_weighed"),
    [
        ("--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k3", True),
        ("--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00", False),
        ("--advantage-estimator grpo", False),
        ("--advantage-estimator gspo --kl-coef 0.01", False),
        ("--advantage-estimator ppo --kl-coef 0.01", False),
    ],
)
def test_a_kl_is_weighed_where_there_is_one_in_the_loss(tmp_path: Path, flags: str, is_weighed: bool) -> None:
    before = "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl"
    recipe = from_slime(script(tmp_path, before, f"{flags} --use-unbiased-kl"), {"BASE": "/b"})
    assert recipe.get("algorithm.kl_unbiased") is (True if is_weighed else None)
    said_of_it = [why for why, flags in recipe.always.items() if "--use-unbiased-kl" in flags]
    assert said_of_it == ["there is no KL in the loss, which it would weigh"] * (not is_weighed)
    assert not any("--use-unbiased-kl" in flags for flags in recipe.absent.values())
