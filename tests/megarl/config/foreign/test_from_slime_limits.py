"""Limits of a script of slime, of draws, lengths and numbers of responses, are those of the recipe or are said."""

from pathlib import Path

import pytest
from slime_scripts import script
from verl_scripts import said

from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.recipe import TranslatedRecipe, check

LIMIT = "--rollout-max-response-len 8192"


def with_arguments(folder: Path, arguments: str, before: str = LIMIT) -> TranslatedRecipe:
    recipe = from_slime(script(folder, before, arguments), {"BASE": "/b"})
    check(recipe)
    return recipe


def test_a_step_waits_for_its_groups_without_a_limit(tmp_path: Path) -> None:
    recipe = with_arguments(tmp_path, LIMIT)
    assert recipe.get("algorithm.dynamic_sampling") is True
    assert recipe.get("algorithm.max_refills") == 10**6


@pytest.mark.parametrize(
    ("arguments", "absent", "always"),
    [
        (f"{LIMIT} --eval-max-response-len 16384", ["--eval-max-response-len 16384"], []),
        (f"{LIMIT} --eval-max-response-len 8192", [], ["--eval-max-response-len 8192"]),
        (f"{LIMIT} --eval-max-prompt-len 512", ["--eval-max-prompt-len 512"], []),
        (
            f"{LIMIT} --rollout-max-prompt-len 512 --eval-max-prompt-len 512",
            *([], ["--eval-max-prompt-len 512"]),
        ),
    ],
)
def test_held_out_responses_of_another_length_are_said(
    tmp_path: Path, arguments: str, absent: list[str], always: list[str]
) -> None:
    recipe = with_arguments(tmp_path, arguments)
    assert [each for each in said(recipe.absent) if "-max-" in each] == absent
    assert [each for each in said(recipe.always) if "-max-" in each] == always


def test_prompts_beyond_a_limit_are_left_out(tmp_path: Path) -> None:
    assert with_arguments(tmp_path, LIMIT).get("data.overlong_prompts") is None
    recipe = with_arguments(tmp_path, f"{LIMIT} --rollout-max-prompt-len 512")
    assert recipe.get("data.overlong_prompts") == "drop"
    assert recipe.get("data.max_prompt_tokens") == 512


@pytest.mark.parametrize("argument", ["--lr-warmup-samples 640", "--lr-decay-samples 6400"])
def test_schedules_in_samples_are_not_read(tmp_path: Path, argument: str) -> None:
    recipe = with_arguments(tmp_path, f"{LIMIT} {argument}")
    assert argument in said(recipe.always)
    assert recipe.get("megatron.lr_warmup_steps") is recipe.get("megatron.lr_decay_steps") is None


def test_one_response_is_sampled_where_nothing_is_said(tmp_path: Path) -> None:
    file = script(tmp_path, "--n-samples-per-prompt 8 ", "")
    file.write_text(file.read_text().replace("--global-batch-size 64", "--global-batch-size 16"))
    recipe = from_slime(file, {"BASE": "/b"})
    assert recipe.get("algorithm.updates_per_step") == 2
    assert recipe.get("loop.samples_per_prompt") == 1
