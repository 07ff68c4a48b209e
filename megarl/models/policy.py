"""The policy as it lies on disk, checked before any process starts."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from converters.architectures import Architecture, read_architecture
from converters.copying import check_checkpoint, check_distributed
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.fp8 import is_block_fp8
from converters.hf_to_megatron import HUGGINGFACE
from converters.layouts.megatron import megatron_layout
from converters.manifest import manifest_of, require_files
from megarl.rollout.number_format import in_number_format
from megarl.schema import AlgorithmConfig, ModelConfig, RolloutConfig
from megatron_ext.options import MegatronOptions
from megatron_ext.supported_options import without_model_fields


@dataclass(frozen=True)
class Model:
    """The policy as it lies on disk: what it is and how its tokens are made."""

    folder: Path
    megatron_checkpoint: Path | None
    """Where the weights are, if not in `folder`."""
    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]


def read_model(config: ModelConfig, extra_stop_token_ids: list[int]) -> Model:
    """Read the model's folders, checked whole: a missing or misshapen tensor is found here.

    Raises UserError for what cannot be trained.
    """
    folder = Path(config.path)
    megatron_checkpoint = Path(config.megatron_checkpoint) if config.megatron_checkpoint else None
    architecture = read_architecture(read_json(folder / CONFIG))
    if architecture.mtp_layers:
        raise UserError(
            f"{folder / 'config.json'} has {architecture.mtp_layers} layers for multi-token prediction, whose training"
            " is not supported yet; train a copy of the model that leaves them out (num_nextn_predict_layers: 0, no"
            f" tensors of model.layers.{architecture.num_layers} and after)"
        )
    if megatron_checkpoint:
        if found := manifest_of(megatron_checkpoint):
            require_files(*found, but_below=None if _is_below(folder, found[0]) else HUGGINGFACE)
        check_distributed(TorchDistCheckpoint(megatron_checkpoint), architecture)
    else:
        check_checkpoint(HuggingFaceCheckpoint(folder), architecture)
    tokenizer = read_tokenizer(folder)
    stop_token_ids = _stop_token_ids(folder, tokenizer, extra_stop_token_ids)
    return Model(folder, megatron_checkpoint, architecture, tokenizer, stop_token_ids)


def _is_below(folder: Path, root: Path) -> bool:
    return root.resolve() in folder.resolve().parents


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a HuggingFace folder. Raises UserError where it is missing or damaged."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file leads them to
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]}); copy"
            " tokenizer.json and tokenizer_config.json of the model there again"
        ) from error
    # Without its files transformers makes one that knows nothing but special tokens, if any.
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):
        raise UserError(
            f"{folder} has no tokenizer that knows any word; copy tokenizer.json and tokenizer_config.json of the model"
            " there"
        )
    return tokenizer


def check_layout(architecture: Architecture, options: MegatronOptions) -> None:
    """Raise UserError if the model cannot be cut by the parallel layout, or the options are those of another model."""
    megatron_layout(architecture, options.parallel, module_names="local")
    without_model_fields(architecture, options.transformer)


def check_replay(architecture: Architecture, algorithm: AlgorithmConfig) -> None:
    """Raise UserError if the routing of a model is to be replayed that has none."""
    if algorithm.router_replay != "none" and not architecture.transformer_config.get("num_moe_experts"):
        raise UserError(
            f"algorithm.router_replay={algorithm.router_replay} sends tokens to the experts that the engine chose, and"
            f" this {architecture.model_type} model has no experts: leave it out"
        )


def check_held(model: Model, rollout: RolloutConfig) -> None:
    """Raise UserError if engines cannot hold the weights that are trained as `rollout.weights` says."""
    config = read_json(model.folder / CONFIG)
    if is_block_fp8(config):
        raise UserError(
            f"{model.folder} is in FP8, and the weights that are trained are not: make a folder in bf16 of it, by"
            " megarl convert and megarl export, and set rollout.weights=fp8_block to sample in FP8"
        )
    in_number_format(rollout, config)


def check_loadable(model: Model, machines: int) -> None:
    """Raise UserError if engines cannot load the weights that the ranks begin with."""
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


def _stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, extra: list[int]) -> tuple[int, ...]:
    stop = {tokenizer.eos_token_id, *extra}
    generation = folder / "generation_config.json"
    if generation.exists():
        ends = read_json(generation).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if wrong := [end for end in ends if end is not None and (type(end) is not int or end < 0)]:
            raise UserError(
                f"{generation} has eos_token_id {wrong[0]!r}, where the number of a token belongs; correct it"
            )
        stop |= set(ends)
    return tuple(sorted(stop - {None}))
