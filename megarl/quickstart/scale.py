"""`+scale=tiny`: runs a large model's recipe with its structure, on a model, sizes and lengths that fit a laptop.

The model is a tiny one of the recipe's model family, with random weights, and the data are sums. This proves that
everything in the recipe works together and trains, not that it learns.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from converters.durable import complete
from converters.errors import UserError
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0
from megarl.config.folder import known_model
from megarl.output.lock import sole_writer
from megarl.output.places import check_name
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout import engine_kind
from megarl.rollout.argument_values import PREFIX
from megarl.schema import MegarlConfig, RolloutConfig

INPUTS = "tiny"
"""Folder of model and data below `output_dir`."""
_MODEL, _DATA = f"{INPUTS}/model", f"{INPUTS}/data"
MOST_RANKS, MOST_OF_A_CRITIC = 4, 2
"""Maximum ranks of the policy, and of a critic: with an engine of two workers, eight processes compute."""
_CUT = 2
"""Size of each kind of parallelism that is larger in the recipe."""
_CUT_IN_ORDER = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERTS = "expert_model_parallel_size"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_LAYERS_OF_A_STAGE = 2
_FAMILIES = {"kimi_k2": "deepseek_v3"}
"""Model type in config.json -> the tiny model with the same architecture, if their names differ."""
_HELD_OUT = 16
_PROMPT_TOKENS, _RESPONSE_TOKENS = 16, 16
# Half of each size is a multiple of the FP8 blocks, too.
_IN_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 256,
}
_LATENT_IN_BLOCKS = {"q_lora_rank": 128}


def tiny(config: MegarlConfig) -> dict[str, Any]:
    """Key -> value of the overrides for the tiny scale.

    Each kind of parallelism in the recipe gets the size 2, as far as `MOST_RANKS` allow. Raises UserError for a recipe
    that does not name its model.
    """
    family_of(config)
    output = Path(config.output_dir)
    return {
        # The tiny model is not the named one.
        "model.name": None,
        "model.path": output / _MODEL,
        "data.train_files": [str(output / _DATA / "train.parquet")],
        "data.eval_files": [str(output / _DATA / "eval.parquet")],
        "data.max_prompt_tokens": _PROMPT_TOKENS,
        "reward.function": f"{Path(__file__).with_name('digits.py')}:share_of_digits",
        "reward.overlong_buffer_tokens": min(4, config.reward.overlong_buffer_tokens),
        "algorithm.updates_per_step": min(2, config.algorithm.updates_per_step),
        "critic.warmup_steps": min(1, config.critic.warmup_steps),
        "lora.rank": min(4, config.lora.rank),
        "loop.steps": 2,
        "loop.prompts_per_step": 8,
        "loop.samples_per_prompt": min(4, config.loop.samples_per_prompt),
        "loop.max_tokens_per_micro_batch": 256,
        "loop.eval_every": 2,
        "refit.bucket_bytes": 8 * 1024**2,
        "rollout.replicas": 1,
        "rollout.max_response_tokens": _RESPONSE_TOKENS,
        **dict(_engine(config.rollout)),
        **dict(_ranks(config)),
        **dict(_pools(config)),
    }


def write_inputs(config: MegarlConfig, family: str) -> None:
    """Write the model of `family` and the data for a tiny-scale configuration, unless they exist.

    Raises UserError if another run is writing to the output_dir, or nobody can.
    """
    check_name("output_dir", config.output_dir)
    disable_progress_bar()
    fields = model_fields(config, family)
    with sole_writer(Path(config.output_dir)) as output:
        _write_whole(output / _MODEL, lambda folder: write_tiny_model(family, folder, fields=fields))
        _write_whole(output / _DATA, lambda folder: write_arithmetic(folder, held_out=_HELD_OUT))


def _write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` create a folder unless it exists; an interrupted run leaves none that the next would take for it."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write(partial)
    complete(partial, folder)


def model_fields(config: MegarlConfig, family: str) -> dict[str, Any]:
    """Fields of the tiny model's config.json: as many layers as the pipeline needs, and sizes that fit FP8."""
    fields: dict[str, Any] = {"num_hidden_layers": _layers(config.megatron)}
    if config.rollout.weights in (FP8_BLOCK.name, FP8_BLOCK_UE8M0.name):
        fields |= _IN_BLOCKS | (_LATENT_IN_BLOCKS if family == "deepseek_v3" else {})
    return fields


def family_of(config: MegarlConfig) -> str:
    """The tiny model with the architecture of the recipe's model. Raises UserError if the recipe does not name one."""
    if config.model.name is None:
        raise UserError("+scale=tiny makes a small model of the recipe's kind, and this recipe has no model.name")
    model_type = known_model(config.model.name)["model_type"]
    return _FAMILIES.get(model_type, model_type)


def _layers(megatron: Mapping[str, Any]) -> int:
    stages = megatron.get("pipeline_model_parallel_size", 1)
    if stages == 1:
        return _LAYERS_OF_A_STAGE
    first, last = (megatron.get(key) or _LAYERS_OF_A_STAGE for key in (_FIRST, _LAST))
    return first + (stages - 2) * _LAYERS_OF_A_STAGE + last


def _ranks(config: MegarlConfig) -> Iterator[tuple[str, Any]]:
    """Parallel sizes of the policy and of the critic, and their numbers of ranks."""
    sizes = _sizes(config.megatron, config.cluster.trainer_ranks, MOST_RANKS)
    yield "cluster.trainer_ranks", sizes.pop("ranks")
    yield from ((f"megatron.{key}", value) for key, value in sizes.items())
    for key, value in ((_FIRST, 2), (_LAST, 1)):
        if config.megatron.get(key) is not None:
            yield f"megatron.{key}", value if sizes["pipeline_model_parallel_size"] > 1 else None
    if config.critic.ranks is not None:
        sizes = _sizes({**config.megatron, **config.critic.megatron}, config.critic.ranks, MOST_OF_A_CRITIC)
        yield "critic.ranks", sizes.pop("ranks")
        yield from ((f"critic.megatron.{key}", value) for key, value in sizes.items())


def _sizes(megatron: Mapping[str, Any], ranks: int, most: int) -> dict[str, int]:
    sizes, found = {}, 1
    for key in _CUT_IN_ORDER:
        sizes[key] = _CUT if megatron.get(key, 1) > 1 and found * _CUT <= most else 1
        ranks //= megatron.get(key, 1)
        found *= sizes[key]
    # The remaining ranks are data-parallel.
    if ranks > 1 and found * _CUT <= most:
        found *= _CUT
    of_a_stage = found // sizes["pipeline_model_parallel_size"]
    sizes[_EXPERTS] = min(_CUT, megatron.get(_EXPERTS, 1), of_a_stage)
    return {**sizes, "ranks": found}


def _engine(rollout: RolloutConfig) -> Iterator[tuple[str, Any]]:
    kind = engine_kind(rollout.engine)
    arguments = {kind.context_argument: _PROMPT_TOKENS + _RESPONSE_TOKENS, **kind.tiny(rollout.engine_args)}
    yield from ((f"{PREFIX}{name}", value) for name, value in arguments.items())


def _pools(config: MegarlConfig) -> Iterator[tuple[str, Any]]:
    """Pools on one machine; which roles take turns stays the same."""
    for name in config.cluster.pools:
        yield f"cluster.pools.{name}.nodes", 1
        yield f"cluster.pools.{name}.gpus", None
