"""The policy on disk, checked before any process starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from converters.architectures import Architecture, adapter_architecture, read_architecture
from converters.copying import check_checkpoint, check_distributed
from converters.errors import UserError, names_as_given
from converters.formats.peft import AdapterFolder
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.formats.torch_dist.saved_arguments import check_saved_arguments
from converters.fp8 import is_block_fp8
from converters.hf_to_megatron import HUGGINGFACE
from converters.layouts.megatron import ParallelSizes, check_divisible, megatron_layout
from converters.manifest import manifest_of, require_files
from megarl.config.folder import known_model
from megarl.data.tokenizer import read_tokenizer
from megarl.models.ends import stop_token_ids
from megarl.rollout import engine_kind
from megarl.rollout.argument_values import PREFIX
from megarl.rollout.number_format import in_number_format
from megarl.schema import AlgorithmConfig, ModelConfig, RolloutConfig
from megatron_ext.options.model_fields import without_model_fields
from megatron_ext.options.options import AdapterOptions, MegatronOptions

_SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("num_experts", "n_routed_experts", "moe_intermediate_size"),
)
"""Fields of config.json that must agree with the model that a recipe names."""


@dataclass(frozen=True)
class Model:
    """The policy on disk: its architecture, tokenizer and end tokens."""

    folder: Path
    megatron_checkpoint: Path | None
    """Where the weights are, if not in `folder`."""
    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    @property
    def without_prediction_layers(self) -> Architecture:
        """The architecture without multi-token-prediction layers, as in engines that do not draft with them."""
        return self.architecture.without_mtp


def read_model(config: ModelConfig, extra_stop_token_ids: list[int]) -> Model:
    """Read the model's folders, and check every tensor of the checkpoint by name and shape.

    Raises UserError for a checkpoint that is incomplete or does not fit its config.json, and for stop tokens outside
    the vocabulary.
    """
    folder = Path(config.path)
    megatron_checkpoint = Path(config.megatron_checkpoint) if config.megatron_checkpoint else None
    architecture = read_architecture(read_json(folder / CONFIG))
    _check_in_vocabulary(extra_stop_token_ids, architecture)
    if megatron_checkpoint:
        if found := manifest_of(megatron_checkpoint):
            require_files(*found, but_below=None if _is_below(folder, found[0]) else HUGGINGFACE)
        stored = TorchDistCheckpoint(megatron_checkpoint)
        check_saved_arguments(stored, architecture)
        check_distributed(stored, architecture)
    else:
        check_checkpoint(HuggingFaceCheckpoint(folder), architecture)
    tokenizer = read_tokenizer(folder)
    ends = stop_token_ids(folder, tokenizer, extra_stop_token_ids)
    return Model(folder, megatron_checkpoint, architecture, tokenizer, ends)


def check_name(config: ModelConfig) -> None:
    """Raise UserError if the model differs in size from the one that the recipe names (`model.name`)."""
    if config.name is not None:
        check_sizes(config.name, read_json(Path(config.path) / CONFIG), config.path)


def check_sizes(name: str, found: Mapping[str, Any], place: str) -> None:
    """Raise UserError if `found`, the config.json in `place`, has other sizes than the model `name`."""
    named = known_model(name)
    for key in _SIZES:
        if found.get(key) != named.get(key):
            raise UserError(
                f"{place} has {key}={found.get(key)} in its config.json, and the recipe is for {name}, which"
                f" has {named.get(key)}: take another recipe, or set model.name=null and the sizes that fit"
            )


def _is_below(folder: Path, root: Path) -> bool:
    return root.resolve() in folder.resolve().parents


def check_trainable(model: Model, options: MegatronOptions, algorithm: AlgorithmConfig) -> None:
    """Raise UserError if the policy cannot be trained with these options and this algorithm."""
    check_not_in_fp8(model.folder)
    check_policy(model.architecture, options, algorithm)


def check_policy(architecture: Architecture, options: MegatronOptions, algorithm: AlgorithmConfig) -> None:
    """Raise UserError if a policy of this architecture cannot be trained, whatever its weights."""
    check_layout(architecture, options)
    check_routers(architecture, options)
    check_prediction_layers(architecture, options)
    check_replay(architecture, algorithm)


def check_layout(architecture: Architecture, options: MegatronOptions) -> None:
    """Raise UserError if the model cannot be split by the parallel layout, or options contradict its architecture."""
    megatron_layout(architecture, options.parallel, module_names="local")
    without_model_fields(architecture, options.transformer)
    options.check_widths(architecture.transformer_config)
    if options.adapter is not None:
        _check_adapter(architecture, options.adapter, options.parallel)


def _check_adapter(architecture: Architecture, adapter: AdapterOptions, parallel: ParallelSizes) -> None:
    matrices = adapter_architecture(architecture, adapter.lora)
    try:
        megatron_layout(matrices, parallel, module_names="local")
    except UserError as error:
        raise UserError(f"the adapter of lora.target_modules is cut as its matrices are: {error}") from error
    if adapter.path is not None:
        AdapterFolder(adapter.path).check(architecture)


def check_replay(architecture: Architecture, algorithm: AlgorithmConfig) -> None:
    """Raise UserError if routing is to be replayed and the model has no routers."""
    if algorithm.router_replay != "none" and not architecture.transformer_config.get("num_moe_experts"):
        raise UserError(
            f"algorithm.router_replay={algorithm.router_replay} sends tokens to the experts that the engine chose, and"
            f" this {architecture.model_type} model has no experts: leave it out"
        )


def check_routers(architecture: Architecture, options: MegatronOptions) -> None:
    """Raise UserError for router options (losses, freezing) if the model has no routers."""
    wanted = [name for name in ("moe_z_loss_coeff", "moe_aux_loss_coeff") if _is_set(options.transformer.get(name))]
    wanted = [f"megatron.{name}" for name in wanted] + ["model.freeze_moe_router"] * options.freeze_moe_router
    if wanted and not architecture.transformer_config.get("num_moe_experts"):
        raise UserError(f"{wanted[0]} is for routers, and this {architecture.model_type} model has none: leave it out")


def _is_set(coefficient: float | list[float] | None) -> bool:
    return any(coefficient) if isinstance(coefficient, list) else bool(coefficient)


def check_prediction_layers(architecture: Architecture, options: MegatronOptions, beside: str | None = None) -> None:
    """Raise UserError if multi-token-prediction layers cannot be trained, or left untrained, with these options.

    The model is the policy, or with `beside` the auxiliary model of that configuration group, whose prediction layers
    are never trained.
    """
    if not architecture.mtp_layers:
        return
    trained, parallel = options.mtp_training != "none", options.parallel
    if trained and options.shared_prefixes:
        raise UserError(
            "loop.shared_prefixes computes a prompt once, and the prediction layers of this model would see at its end"
            " the first token of each response: set model.mtp_training=none, or loop.shared_prefixes=false"
        )
    if trained and options.adapter is not None:
        raise UserError(
            "an adapter trains, and the prediction layers of this model are none of it: set model.mtp_training=none"
        )
    waits = options.distributed.get("overlap_grad_reduce") and parallel.pipeline_model_parallel_size > 1
    if not trained and waits:
        own = "set model.mtp_training=detached, or leave overlap_grad_reduce out"
        raise UserError(
            "megatron.overlap_grad_reduce waits for the last stage's copy of the embedding, which nobody uses where"
            " prediction layers are left alone: "
            f"{f'set overlap_grad_reduce=false in {beside}.megatron' if beside else own}"
        )


def check_not_in_fp8(folder: Path) -> None:
    """Raise UserError if the weights in a folder are in FP8, which cannot be trained."""
    if is_block_fp8(read_json(folder / CONFIG)):
        raise UserError(
            f"{folder} is in FP8, and the weights that are trained are not: make a folder in bf16 of it, by megarl"
            " convert and megarl export (docs/convert.md); engines sample in FP8 with rollout.weights=fp8_block"
        )


def check_held(model: Model, rollout: RolloutConfig) -> None:
    """Raise UserError if engines cannot hold the model in the form of `rollout.weights`, split as configured.

    Also if engines are to draft with multi-token-prediction layers and the model has none.
    """
    in_number_format(rollout, read_json(model.folder / CONFIG))
    check_cut(model.without_prediction_layers, rollout)
    check_draft(model.architecture, rollout)


def check_draft(architecture: Architecture, rollout: RolloutConfig) -> None:
    """Raise UserError if engines are to draft with multi-token-prediction layers and the model has none."""
    if engine_kind(rollout.engine).drafts(rollout.engine_args) and not architecture.mtp_layers:
        raise UserError(
            "rollout.engine_args.speculative_config drafts with layers for multi-token prediction, and this"
            f" {architecture.model_type} model has none: leave it out"
        )


def check_cut(architecture: Architecture, rollout: RolloutConfig) -> None:
    """Raise UserError if the model cannot be split over the workers of an engine as `rollout.engine_args` says."""
    matrices, experts, stages = engine_kind(rollout.engine).cuts(rollout.engine_args)
    if stages.parts > architecture.num_layers:
        raise UserError(
            f"{PREFIX}{stages.said_by}={stages.parts} is more than the {architecture.num_layers} layers of the model:"
            " lower it"
        )
    names = {
        "tensor_model_parallel_size": f"{PREFIX}{matrices.said_by}",
        "expert_tensor_parallel_size": f"{PREFIX}{experts.said_by}",
    }
    with names_as_given(names):
        sizes = ParallelSizes(
            world_size=lcm(matrices.parts, experts.parts),
            tensor_model_parallel_size=matrices.parts,
            expert_tensor_parallel_size=experts.parts if architecture.num_experts else None,
        )
        check_divisible(architecture, sizes)


def check_loadable(model: Model, machines: int) -> None:
    """Raise UserError if engines on several `machines` cannot load the initial weights from `model.path`."""
    if model.megatron_checkpoint is None:
        return
    try:
        check_checkpoint(HuggingFaceCheckpoint(model.folder), model.architecture)
    except UserError as error:
        raise UserError(
            f"the trainer and the engines run on {machines} machines, where engines begin with the weights of"
            f" model.path, and it has none: {error}; export model.megatron_checkpoint to HuggingFace for it, or keep to"
            " one machine"
        ) from error


def check_ends(model: Model) -> None:
    """Raise UserError if no token ends a response, since then every response would have full length."""
    if not model.stop_token_ids:
        raise UserError(
            f"no token would end a response: neither tokenizer_config.json of {model.folder} names an eos_token, nor"
            " generation_config.json or config.json an eos_token_id; name it there, or set rollout.stop_token_ids"
        )


def _check_in_vocabulary(tokens: list[int], architecture: Architecture) -> None:
    vocabulary = architecture.gpt_model["vocab_size"]
    if beyond := [token for token in tokens if token >= vocabulary]:
        raise UserError(
            f"rollout.stop_token_ids has {beyond[0]}, and the model's last token is {vocabulary - 1} (vocab_size):"
            " correct it"
        )
