"""Recipes of published models are whole: every size fits the model's config.json, and every GPU has its work."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import read_json, unquantised
from converters.number_formats import AS_TRAINED
from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.config.folder import recipes_folder
from megarl.config.megatron import megatron_options
from megarl.config.validate import CHECKS, validate
from megarl.models.policy import check_layout, check_name, check_sizes
from megarl.output.places import check_output
from megarl.planning.refit import read_model
from megarl.rollout import engine_kind
from megarl.rollout.number_format import in_number_format
from megarl.schema import MegarlConfig

GPUS_OF_A_NODE = 8
LARGEST_BUCKET_OF_PIECES = 640 * 2**20


@dataclass(frozen=True)
class Recipe:
    """The model of a recipe, by its name in configs/models."""

    name: str
    model: str
    device: str = "H100"
    """The GPU of `megarl plan` that the recipe says it is for."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


RECIPES = (
    Recipe("dapo_qwen2_5_32b", "qwen2_5_32b"),
    Recipe("dapo_qwen3_moe", "qwen3_30b_a3b"),
    Recipe("grpo_deepseek_v3", "deepseek_v3", marks=(pytest.mark.long,)),
    Recipe("grpo_glm_4_5", "glm_4_5", marks=(pytest.mark.long,)),
    Recipe("grpo_kimi_k2", "kimi_k2", "H200", marks=(pytest.mark.long,)),
    Recipe("grpo_llama3_1_70b", "llama3_1_70b"),
    Recipe("grpo_lora_qwen3_8b", "qwen3_8b"),
    Recipe("grpo_qwen3_1_7b", "qwen3_1_7b"),
    Recipe("grpo_qwen3_235b", "qwen3_235b", marks=(pytest.mark.long,)),
    Recipe("grpo_qwen3_moe", "qwen3_30b_a3b"),
    Recipe("gspo_qwen3_moe", "qwen3_30b_a3b"),
    Recipe("ppo_qwen2_5_7b", "qwen2_5_7b"),
    Recipe("ppo_qwen3_moe", "qwen3_30b_a3b"),
)
FINE_TUNING = Recipe("sft_qwen3_moe", "qwen3_30b_a3b")
LARGE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@pytest.fixture
def model(recipe: Recipe, tmp_path: Path) -> Path:
    """A folder of the model as far as configurations are checked."""
    text = (recipes_folder() / "models" / f"{recipe.model}.json").read_text()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**json.loads(text), "num_nextn_predict_layers": 0}))
    return folder


@pytest.fixture
def config(recipe: Recipe, model: Path, tmp_path: Path) -> MegarlConfig:
    prompts = tmp_path / "prompts.parquet"
    prompts.touch()
    given = [f"model.path={model}", f"data.train_files=[{prompts}]", f"output_dir={tmp_path / 'run'}"]
    return compose(recipe.name, [*given, "cluster.address=auto"])


def test_every_recipe_of_a_large_model_is_here() -> None:
    others = ("quickstart", "eval", "chat", FINE_TUNING.name)
    files = [file.stem for file in recipes_folder().glob("*.yaml")]
    assert sorted(name for name in files if not name.startswith(others)) == [each.name for each in RECIPES]


@pytest.mark.parametrize("recipe", [FINE_TUNING])
def test_the_recipe_of_fine_tuning_passes_every_check_and_its_model_can_be_cut_so(
    recipe: Recipe, model: Path, tmp_path: Path
) -> None:
    (chats := tmp_path / "chats.parquet").touch()
    given = [f"model.path={model}", f"sft.train_files=[{chats}]", f"output_dir={tmp_path}", "cluster.address=auto"]
    config = compose(recipe.name, given)
    validate(config, "sft")
    assert config.model.name == recipe.model
    check_name(config.model)
    check_layout(read_architecture(json.loads((model / "config.json").read_text())), megatron_options(config))
    assert config.cluster.trainer_ranks % GPUS_OF_A_NODE == 0


@LARGE
def test_a_recipe_passes_every_check_and_its_model_can_be_cut_so(config: MegarlConfig, model: Path) -> None:
    assert check_output in CHECKS["train"]
    validate(config, "train")
    architecture = read_architecture(json.loads((model / "config.json").read_text()))
    check_layout(architecture, megatron_options(config))
    check_layout(architecture, megatron_options(config, config.critic))


@LARGE
def test_a_recipe_names_its_model_and_takes_no_other(recipe: Recipe, config: MegarlConfig, model: Path) -> None:
    assert config.model.name == recipe.model
    check_name(config.model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 7}))
    layers = f"has num_hidden_layers=7 in its config.json, and the recipe is for {recipe.model}, which has \\d+: take"
    with pytest.raises(UserError, match=layers):
        check_name(config.model)
    config.model.name = None
    check_name(config.model)


def test_a_model_that_nobody_knows_is_named() -> None:
    with pytest.raises(UserError, match=r"^model\.name=qwen3_30b is not known; did you mean qwen3_235b\?"):
        check_sizes("qwen3_30b", {}, "model")


@LARGE
def test_every_gpu_has_its_work(config: MegarlConfig) -> None:
    workers = engine_kind(config.rollout.engine).workers(config.rollout.engine_args)
    engines = config.rollout.replicas * workers
    nodes = config.rollout.engine_args.get("nnodes", 1)
    assert workers <= nodes * GPUS_OF_A_NODE
    for pool in config.cluster.pools.values():
        assert config.cluster.trainer_ranks == engines == pool.nodes * (pool.gpus or GPUS_OF_A_NODE)
    ranks = config.cluster.trainer_ranks
    assert ranks < GPUS_OF_A_NODE or ranks % GPUS_OF_A_NODE == 0


@LARGE
def test_an_engine_cuts_no_block_of_its_number_format(config: MegarlConfig, model: Path) -> None:
    # The policy is in bf16, whatever was released.
    fields = unquantised(read_json(model / "config.json"))
    is_told = in_number_format(config.rollout, fields) != config.rollout.engine_args
    assert is_told == (config.rollout.weights != AS_TRAINED)


@LARGE
def test_lengths_and_buckets_hold_what_comes(recipe: Recipe, config: MegarlConfig) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert config.rollout.engine_args["max_model_len"] == longest
    if on_several_machines(config):
        # Weights go in pieces there, and larger buckets would only take memory.
        assert config.refit.bucket_bytes <= LARGEST_BUCKET_OF_PIECES
    else:
        largest = max(map(prod, read_model(recipe.model).hf_shapes.values()))
        assert 2 * largest <= config.refit.bucket_bytes <= 2 * largest + 2**27


def on_several_machines(config: MegarlConfig) -> bool:
    """Whether the recipe itself says that trainer and engines are not on one machine."""
    engine_nodes = config.rollout.engine_args.get("nnodes", 1)
    return max(engine_nodes, *(pool.nodes for pool in config.cluster.pools.values()), 1) > 1


@pytest.mark.parametrize("recipe", [pytest.param(each, marks=each.marks, id=each.name) for each in RECIPES])
def test_the_refit_of_a_recipe_can_be_planned(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-name", recipe.name, "--model", recipe.model, "--device", recipe.device]
    assert main(["plan", *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trainer_gpus"] == compose(recipe.name, ["model.path=m", "output_dir=o"]).cluster.trainer_ranks
