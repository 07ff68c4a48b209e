"""From recipes and overrides to one typed configuration; every wrong key is named with the one that was meant."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from converters.errors import UserError
from megarl.algorithms.compatibility import option_keys
from megarl.config.compose import compose
from megarl.config.folder import recipes_folder
from megarl.config.keys import all_keys, schema_keys
from megarl.config.renamed_keys import ELSEWHERE, MEGATRON_LM_FLAGS, VERL
from megarl.schema import MegarlConfig

GIVEN = ["model.path=m", "output_dir=o"]


@pytest.fixture
def recipes(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text("output_dir: out\nmodel: {path: m}\nloop: {steps: 7}\nmegatron: {lr: 1}\n")
    (tmp_path / "built_on_ours.yaml").write_text("defaults: [grpo_qwen3_moe, _self_]\noutput_dir: out\n")
    (tmp_path / "misspelt.yaml").write_text("output_dir: out\nmodel: {path: m}\nlop: {steps: 7}\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "dangling.yaml").write_text("defaults: [grpo_qwen3_mo, _self_]\n")
    (tmp_path / "built_on_dangling.yaml").write_text("defaults: [dangling, _self_]\n")
    (tmp_path / "wrong_group.yaml").write_text("defaults: [{mine: grpo_qwen3_mo}]\n")
    return str(tmp_path)


OPEN = {"quickstart_distillation": ["teachers.sums.path=t"]}
"""Keys that a recipe leaves open beside what all do."""


@pytest.mark.parametrize("name", sorted(file.stem for file in recipes_folder().glob("*.yaml")))
def test_every_recipe_composes(name: str) -> None:
    config = compose(name, [*GIVEN, *OPEN.get(name, [])])
    assert isinstance(config, MegarlConfig)
    assert (config.model.path, config.output_dir) == ("m", "o")


@pytest.mark.parametrize("name", sorted(file.stem for file in recipes_folder().glob("*.yaml")))
def test_a_recipe_has_the_values_that_stand_in_its_file(name: str) -> None:
    """No preset and no recipe that it builds on wins over it."""
    written = OmegaConf.load(recipes_folder() / f"{name}.yaml")
    assert isinstance(written, DictConfig)
    written.pop("defaults", None)
    composed = OmegaConf.structured(compose(name, [*GIVEN, *OPEN.get(name, [])]))
    written.pop("output_dir", None)
    assert (values := dict(leaves(written)))
    assert {key: OmegaConf.select(composed, key) for key in values} == values


def leaves(node: DictConfig, above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values below a node, without those that are left open or refer to others."""
    for key in node:
        if isinstance(node._get_node(key), DictConfig):
            yield from leaves(node[key], f"{above}{key}.")
        elif not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield f"{above}{key}", node[key]


def test_works_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose("quickstart", GIVEN).cluster.trainer_ranks == 2


def test_overrides_reach_keys_that_the_recipe_does_not_mention(recipes: str) -> None:
    overrides = [
        "loop.seed=3",
        "rollout.engine_args.dtype=float32",
        "+data.shuffle=false",
        "megatron.sequence_parallel=true",
    ]
    config = compose("mine", [*overrides, "sft.stop_at_exact_match=0.5"], recipes)
    assert (config.loop.steps, config.loop.seed, config.data.shuffle) == (7, 3, False)
    assert config.rollout.engine_args == {"dtype": "float32"}
    assert config.sft.stop_at_exact_match == 0.5
    assert config.megatron == {"lr": 1.0, "sequence_parallel": True}
    assert isinstance(config.megatron["lr"], float)


def test_the_last_of_two_overrides_wins(recipes: str) -> None:
    assert compose("mine", ["loop.steps=1", "loop.steps=2"], recipes).loop.steps == 2


def test_own_recipes_build_on_ours(recipes: str) -> None:
    config = compose("built_on_ours", ["model.path=m"], recipes)
    assert config.megatron["expert_model_parallel_size"] == 8


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["loop.stps=3"], r"loop\.stps does not exist; did you mean loop\.steps\?"),
        (["lop.seed=3"], r"lop\.seed does not exist; did you mean loop\.seed\?"),
        (["++loop.stps=3"], r"loop\.stps does not exist"),
        (["steps=3"], r"did you mean (loop\.steps or sft|sft\.steps or loop)\.steps\?"),
        (["rollout.n=3"], r"rollout\.n does not exist; did you mean loop\.samples_per_prompt\?"),
        (["learning_rate=3"], r"did you mean megatron\.lr\?"),
        (["megatron.learning_rate=3"], r"did you mean megatron\.lr\?"),
        (["zzz.qqq=3"], r"zzz\.qqq does not exist$"),
        (["loop=3"], r"loop is a group of keys; set one of them, such as loop\.steps"),
        (["rollout.engine_args=8"], r"rollout\.engine_args is a group of keys; .* such as rollout\.engine_args\.NAME="),
        (["reward.functions.a=math"], r"reward\.functions\.a is a group of keys; .* reward\.functions\.a\.\w+="),
        (
            ["algorithm.corrections=[{kind: icepop, lo: 1}]"],
            r"algorithm\.corrections\[0\]\.lo does not exist; did you mean algorithm\.corrections\[0\]\.low\?",
        ),
        (
            ["algorithm.corrections=[icepop]"],
            r"corrections\[0\]=icepop: .* is a group of keys; .*corrections\[0\]\.kind=",
        ),
        (["loop.steps=many"], r"loop\.steps: Value 'many'"),
        (["loop.steps=null"], r"loop\.steps"),
        (["loop.steps"], "^override 'loop.steps' is not of the form key=value: give loop.steps=VALUE$"),
        (["+loop.steps"], "^override '.loop.steps' is not of the form key=value: give loop.steps=VALUE$"),
        (["loop steps"], "^override 'loop steps' is not of the form key=value: token recognition error"),
        (["=3"], "override .=3. is not of the form key=value: it has no key"),
        (["+=3"], "override .[+]=3. is not of the form key=value: it has no key"),
        (["hydra.run.dir=out"], "override 'hydra.run.dir=out' would set Hydra's own options.* output_dir says"),
        (["hydra/job_logging=none"], "'hydra/job_logging=none' would set Hydra's own options"),
        (
            ["data.train_files=a.parquet"],
            r"^data\.train_files=a\.parquet: .* is a list; .*'data\.train_files=\[a\.parquet\]'$",
        ),
        (["+cluster.pools.all.roles=trainer"], r"'cluster\.pools\.all\.roles=\[trainer\]'$"),
        (["data.train_files=a,b"], r"gives several values: a list has them in brackets, 'data\.train_files=\[a,b\]'"),
        (["loop.steps=range(1,3)"], r"loop\.steps=range\(1,3\)' gives several values"),
        (["model.dtype=${nowhere}"], "nowhere"),
        (["~model.path"], r"leaves model\.path open: give it as model\.path=\.\.\."),
        (["output_dir=???"], r"leaves output_dir open"),
        (["megatron.tensor_parallel_size=2"], r"did you mean megatron\.tensor_model_parallel_size\?"),
        (["megatron.lr=fast"], r"megatron\.lr=fast"),
        (["megatron.bf16=true"], r"megatron\.bf16 follows from model\.dtype"),
        (["rollout.engine_args.max_num_seq=2"], r"did you mean rollout\.engine_args\.max_num_seqs\?"),
    ],
)
def test_wrong_overrides_are_named(recipes: str, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        compose("mine", overrides, recipes)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("actor_rollout_ref.actor.lr", "megatron.lr"),
        ("actor_rollout_ref.actor.max_grad_norm", "megatron.clip_grad"),
        ("actor_rollout_ref.actor.tensor_model_parallel_size", "megatron.tensor_model_parallel_size"),
        ("actor_rollout_ref.actor.pipeline_model_parallel_size", "megatron.pipeline_model_parallel_size"),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", "megatron.expert_model_parallel_size"),
        ("actor_rollout_ref.model.backend", "leave it out"),
        ("actor_rollout_ref.rollout.tensor_parallel_size", "rollout.engine_args.tensor_parallel_size"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs", "rollout.engine_args.max_num_seqs"),
        ("actor_rollout_ref.rollout.enable_vision", "leave it out"),
        ("actor_rollout_ref.actor.lora.rank", r"lora\.rank"),
        ("trainer.async_weight_update", "leave it out"),
        ("reward_model.style", "reward.function"),
        ("trainer.total_training_steps", "loop.steps"),
    ],
)
def test_keys_of_verl_are_translated(recipes: str, key: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"^configuration key {key} does not exist; it is a key of verl.*{says}"):
        compose("mine", [f"{key}=1"], recipes)


def test_translations_name_keys_that_exist() -> None:
    for target in {*VERL.values(), *MEGATRON_LM_FLAGS.values(), *ELSEWHERE.values()}:
        for part in target.split(" and "):
            assert part.split("=")[0].split(" ")[0] in {*all_keys(), *option_keys()}, target


def test_keys_of_verl_that_we_share_are_not_refused(recipes: str) -> None:
    shared = [key for key in VERL if key in set(schema_keys())]
    assert shared == ["data.train_files"]
    assert compose("mine", ["data.train_files=[a.parquet]"], recipes).data.train_files == ["a.parquet"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstrt", "there is no recipe quickstrt; did you mean quickstart"),
        ("configs/grpo_qwen3_moe", "a recipe's name has no folder in it, .*; did you mean grpo_qwen3_moe"),
        ("../configs/gspo_qwen3_moe.yaml", "a recipe's name has no folder in it, .*; did you mean gspo_qwen3_moe"),
        ("/tmp/zzz", "there is no recipe /tmp/zzz: a recipe's name has no folder in it, .*; there are .*mine"),
        ("zzz", "there is no recipe zzz; there are .*grpo_qwen3_moe.*mine"),
        ("misspelt", r"lop\.steps does not exist"),
        ("broken", "recipe broken cannot be composed"),
        *(
            (name, "^recipe dangling builds on grpo_qwen3_mo, which does not exist; did you mean grpo_qwen3_moe[?]$")
            for name in ("dangling", "built_on_dangling")
        ),
        ("wrong_group", "^recipe wrong_group builds on mine/grpo_qwen3_mo, which does not exist; did you mean grpo_"),
        ("empty", r"^recipe empty is empty: .*empty\.yaml has no key"),
    ],
)
def test_wrong_recipes_are_named(recipes: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        compose(name, [], recipes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "override", "says"),
    [
        ("quickstart", "+algorithm=gsp", "there is no preset algorithm=gsp; did you mean gspo?"),
        ("quickstart_ppo", "algorithm=zzz", "there is no preset algorithm=zzz; there are .*gspo"),
        ("quickstart", "algorithm=gspo", r"has no preset to replace: add one with \+algorithm=gspo"),
    ],
)
def test_a_wrong_preset_is_named(recipe: str, override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        compose(recipe, [*GIVEN, override])


def test_a_folder_of_recipes_that_is_not_there() -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        compose("quickstart", GIVEN, "nowhere")
