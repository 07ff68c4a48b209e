"""Arguments of slime's engines are those of the engine here, or are left out together."""

from pathlib import Path

import pytest
from slime_scripts import script
from verl_scripts import said

from converters.errors import UserError
from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.recipe import TranslatedRecipe

HAVE = "--sglang-mem-fraction-static 0.7"


def with_arguments(folder: Path, arguments: str) -> TranslatedRecipe:
    return from_slime(script(folder, HAVE, f"{HAVE} {arguments}"), {"BASE": "/b"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sglang-server-concurrency 1024"],
        ["--sglang-dp-size 8", "--sglang-enable-dp-attention", "--sglang-enable-dp-lm-head"],
        ["--sglang-enable-dp-attention", "--sglang-dp-size 8"],
        [
            "--sglang-speculative-num-steps 3",
            "--sglang-speculative-algorithm EAGLE",
            "--sglang-speculative-eagle-topk 1",
        ],
    ],
)
def test_arguments_that_are_left_out_take_theirs_with_them(tmp_path: Path, arguments: list[str]) -> None:
    recipe = with_arguments(tmp_path, " ".join(arguments))
    names = ("server_concurrency", "dp", "speculative")
    assert not [each for each in recipe.get("rollout.engine_args") if any(name in each for name in names)]
    found = [found for found in recipe.absent.values() if set(arguments) <= set(found)]
    assert len(found) == 1


def test_arguments_of_a_single_group_stay(tmp_path: Path) -> None:
    recipe = with_arguments(tmp_path, "--sglang-dp-size 1 --sglang-moe-dense-tp-size 1")
    assert recipe.get("rollout.engine_args.dp_size") == 1
    assert recipe.get("rollout.engine_args.moe_dense_tp_size") == 1


def test_the_interval_of_weights_is_staleness(tmp_path: Path) -> None:
    recipe = with_arguments(tmp_path, "--update-weights-interval 4")
    (why,) = [why for why, found in recipe.absent.items() if found == ["--update-weights-interval 4"]]
    assert "schedule.max_staleness" in why
    recipe = with_arguments(tmp_path, "--update-weights-interval 1")
    assert "--update-weights-interval 1" in said(recipe.always)


def test_layers_of_their_own_are_of_models_that_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--spec cannot be taken over: such layers are of a model that is not converted"
    ):
        with_arguments(tmp_path, '--spec "slime_plugins.models.glm4" "get_glm_spec"')


def test_what_is_only_compared_may_be_unknown(tmp_path: Path) -> None:
    recipe = with_arguments(tmp_path, "--moe-layer-freq $PATTERN --ref-load $WHERE")
    assert {"--moe-layer-freq", "--ref-load $WHERE"} <= set(said(recipe.always))
