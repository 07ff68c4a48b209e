"""Lengths of a command of verl, warm-ups, decays and how long checkpoints stay: in a recipe they are as long."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl_scripts import ACTOR, PPO_KEYS, said

from converters.errors import UserError
from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import check

WARM_UPS = [f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", "critic.optim.lr_warmup_steps_ratio=0.05"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_share_of_the_run_is_a_warm_up_or_is_said(tmp_path: Path, is_there: bool) -> None:
    """In verl's own example the length is in epochs, so that the share depends on the data."""
    file = tmp_path / "train.parquet"
    if is_there:
        pq.write_table(pa.table({"prompt": ["What?"] * 70}), file)
    recipe = from_verl([*PPO_KEYS, *WARM_UPS, "trainer.total_epochs=15", f"data.train_files={file}"], {})
    found = [recipe.get(f"{group}.lr_warmup_steps") for group in ("megatron", "critic.megatron")]
    # 15 epochs of 4 rollouts, with 2 optimizer steps each.
    assert found == ([2 * 6, 2 * 3] if is_there else [None, None])
    assert said(recipe.absent) == ([] if is_there else WARM_UPS)


def test_a_warm_up_in_steps_counts_before_one_in_a_share() -> None:
    given = [*PPO_KEYS, *WARM_UPS, f"{ACTOR}optim.lr_warmup_steps=5", "trainer.total_training_steps=100"]
    recipe = from_verl(given, {})
    assert recipe.get("megatron.lr_warmup_steps") == 2 * 5
    assert recipe.get("critic.megatron.lr_warmup_steps") == 2 * 5
    assert WARM_UPS[0] in said(recipe.always)


@pytest.mark.parametrize(("given", "alone"), [(0, None), (1, None), (2, 1), (20, 19)])
def test_the_critic_is_alone_before_the_step_that_is_named(given: int, alone: int | None) -> None:
    """verl counts steps from 1 and updates its actor where critic_warmup <= global_steps."""
    recipe = from_verl([*PPO_KEYS, f"trainer.critic_warmup={given}"], {})
    assert recipe.get("critic.warmup_steps") == alone
    assert recipe.absent == {}


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        (["trainer.critic_warmup=5", f"{ACTOR}optim.lr_decay_style=cosine"], 2 * 100),
        (["trainer.critic_warmup=5", f"{ACTOR}optim.lr_decay_style=cosine", f"{ACTOR}optim.lr_decay_steps=40"], 2 * 40),
        (["trainer.critic_warmup=5", f"{ACTOR}optim.lr_decay_style=cosine", f"{ACTOR}optim.lr_warmup_steps=150"], 301),
        (["trainer.critic_warmup=5"], None),
        ([f"{ACTOR}optim.lr_decay_style=cosine"], None),
    ],
)
def test_steps_of_the_critic_alone_are_steps_of_the_decay(given: list[str], ends: int | None) -> None:
    recipe = from_verl([*PPO_KEYS, "trainer.total_training_steps=100", *given], {})
    check(recipe)
    assert recipe.get("megatron.lr_decay_steps") == ends


def test_a_warm_up_of_the_critic_is_a_number() -> None:
    with pytest.raises(UserError, match=r"trainer\.critic_warmup=some is no number of steps"):
        from_verl([*PPO_KEYS, "trainer.critic_warmup=some"], {})


@pytest.mark.parametrize("name", ["lr_scheduler_type", "warmup_style"])
def test_the_decay_of_an_fsdp_trainer_goes_as_low(name: str) -> None:
    """verl decays along half a cosine to min_lr_ratio of the rate, over the whole run, as Megatron's cosine does."""
    given = [f"{ACTOR}optim.{name}=cosine", f"{ACTOR}optim.min_lr_ratio=0.1", f"{ACTOR}optim.num_cycles=0.5"]
    given += [f"{ACTOR}strategy=fsdp"]
    recipe = from_verl([*PPO_KEYS, *given, f"{ACTOR}optim.lr=2e-6", f"critic.optim.{name}=constant"], {})
    check(recipe)
    assert [recipe.get(f"megatron.{each}") for each in ("lr_decay_style", "min_lr")] == ["cosine", 0.1 * 2e-6]
    assert [recipe.get(f"critic.megatron.{each}") for each in ("lr_decay_style", "min_lr")] == ["constant", 0.0]
    assert said(recipe.absent) == [f"{ACTOR}strategy=fsdp"]


def test_a_constant_rate_has_no_smallest_one() -> None:
    given = f"{ACTOR}optim.min_lr_ratio=0.1"
    recipe = from_verl([*PPO_KEYS, given], {})
    assert recipe.get("megatron.min_lr") is None
    assert given in said(recipe.always)
    assert recipe.absent == {}


@pytest.mark.parametrize(
    ("given", "last", "every"),
    [
        ([], None, 20),
        (["trainer.max_actor_ckpt_to_keep=null"], None, 20),
        (["trainer.max_actor_ckpt_to_keep=3"], 3, None),
    ],
)
def test_checkpoints_stay_as_they_do_there(given: list[str], last: int | None, every: int | None) -> None:
    recipe = from_verl(["trainer.save_freq=20", *given], {})
    assert [recipe.get(f"checkpoint.{name}") for name in ("every", "keep_last", "keep_every")] == [20, last, every]


def _rows(folder: Path, count: int) -> str:
    pq.write_table(pa.table({"prompt": ["What?"] * count}), folder / "train.parquet")
    return f"data.train_files={folder / 'train.parquet'}"


@pytest.mark.parametrize(
    ("program", "filters", "prompts", "steps", "refills"),
    [
        ("recipe.dapo.main_dapo", True, 16, 8, 9 * 48 // 16 - 1),
        ("recipe.dapo.main_dapo", False, 48, 8, None),
        # The trainer of verl 0.8 draws prompts one by one where it filters; without a filter those before drew 48.
        ("verl.trainer.main_ppo", True, 16, 26, 10**6),
        ("verl.trainer.main_ppo", False, 48, 8, None),
    ],
)
def test_batches_that_are_drawn_are_trained_on_and_counted_as_there(
    tmp_path: Path, program: str, filters: bool, prompts: int, steps: int, refills: int | None
) -> None:
    filter_groups = [f"+algorithm.filter_groups.{each}" for each in (f"enable={filters}", "max_num_gen_batches=9")]
    given = [*PPO_KEYS, "+data.gen_batch_size=48", *filter_groups, "trainer.total_epochs=2", _rows(tmp_path, 210)]
    given += [f"{ACTOR}optim.lr_warmup_steps_ratio=0.5"]
    (tmp_path / "run.sh").write_text(f"python3 -m {program} {' '.join(given)}\n")
    recipe = from_verl([str(tmp_path / "run.sh")], {})
    assert [recipe.get(f"loop.{each}") for each in ("prompts_per_step", "steps")] == [prompts, steps]
    assert recipe.get("algorithm.updates_per_step") == prompts // 8
    assert recipe.get("algorithm.max_refills") == refills
    assert recipe.get("megatron.lr_warmup_steps") == steps // 2 * (prompts // 8)
    assert ("data.train_batch_size=16" in said(recipe.always)) is not filters
    assert recipe.absent == {}


def test_a_batch_that_is_drawn_is_cut_into_mini_batches() -> None:
    with pytest.raises(UserError, match=r"data\.gen_batch_size=20 cannot be cut into mini-batches of"):
        from_verl([*PPO_KEYS, "data.gen_batch_size=20"], {})


@pytest.mark.parametrize(("given", "steps"), [(500, 33), (20, 20)])
def test_a_run_ends_with_its_epochs_and_its_rate_is_planned_for_all_steps(
    tmp_path: Path, given: int, steps: int
) -> None:
    settings = [f"trainer.total_training_steps={given}", "trainer.total_epochs=1", _rows(tmp_path, 33 * 16 + 3)]
    settings += [f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", f"{ACTOR}optim.lr_decay_style=cosine"]
    recipe = from_verl([*PPO_KEYS, *settings], {})
    check(recipe)
    assert recipe.get("loop.steps") == steps
    assert recipe.get("megatron.lr_warmup_steps") == 2 * given // 10
    assert recipe.get("megatron.lr_decay_steps") == (2 * 500 if given > steps else None)
    assert recipe.get("critic.megatron.lr_decay_steps") is None


@pytest.mark.parametrize(
    ("engine", "given", "options"),
    [
        ("fsdp", [], [None, None, None]),
        ("veomni", [], ["cosine", None, None]),
        ("veomni", ["lr_scheduler_type=constant"], ["constant", None, None]),
        ("veomni", ["lr_min=1e-8", "lr_start=1e-9"], ["cosine", 1e-8, 1e-9]),
        ("torchtitan", ["min_lr_factor=0.1"], ["linear", 0.1 * 1e-6, None]),
        ("torchtitan", ["decay_type=cosine"], ["cosine", None, None]),
        ("automodel", [], ["cosine", 0.01 * 1e-6, None]),
        ("automodel", ["lr_warmup_steps=3"], ["cosine", 0.01 * 1e-6, 0.1 * 1e-6]),
        ("automodel", ["lr_scheduler_type=constant"], ["constant", None, None]),
    ],
)
def test_a_trainer_has_the_decay_that_it_has_there(engine: str, given: list[str], options: list[object]) -> None:
    settings = [f"{ACTOR}optim.{each}" for each in given]
    recipe = from_verl([*PPO_KEYS[:3], f"model_engine={engine}", "trainer.total_training_steps=9", *settings], {})
    check(recipe)
    assert [recipe.get(f"megatron.{name}") for name in ("lr_decay_style", "min_lr", "lr_warmup_init")] == options
    style = {"veomni": "cosine", "torchtitan": "linear", "automodel": "cosine"}.get(engine)
    assert recipe.get("critic.megatron.lr_decay_style") == style
    assert said(recipe.absent) == [f"{ACTOR}strategy={engine}"]
