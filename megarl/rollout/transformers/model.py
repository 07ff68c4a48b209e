"""A transformers model prepared for sampling: its end-of-sequence tokens, context length and next-token logits."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.rollout.cpu_linear import LinearInAnyBatch
from megarl.rollout.transformers.arguments import TransformersArguments
from megarl.rollout.transformers.corrections import capping_attention, give_norms_of_latents_the_epsilon
from megatron_ext import device
from megatron_ext.routing.routed_experts import Routing


class Computed(NamedTuple):
    """Results of a forward pass over R rows of T tokens.

    Example: Computed(torch.zeros(1, 64), np.zeros((1, 5, 2, 2), np.int16))
    """

    logits: Tensor
    """float32 [R, vocabulary], of the token after each row."""
    experts: npt.NDArray[np.int16] | None
    """[R, T, layers with experts, top-k], the experts of each token; None if not recorded."""


class SamplingModel:
    """The model of a HuggingFace folder, with everything needed to sample from it."""

    def __init__(self, folder: Path, arguments: TransformersArguments) -> None:
        try:
            self.module = _load(folder, arguments)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"transformers cannot serve {folder} with {arguments}: {error}") from error
        self.module.eval().to(device.device())
        config = self.module.config
        give_norms_of_latents_the_epsilon(self.module)
        self.vocabulary: int = config.vocab_size
        self.max_tokens: int = arguments.max_model_len or config.max_position_embeddings
        self.end_token_ids = _end_token_ids(folder, config)
        self._routing_recorder = _RoutingRecorder(self.module) if arguments.enable_return_routed_experts else None
        if arguments.float32_logits:
            _compute_logits_in_float32(self.module.get_output_embeddings())

    @property
    def routing(self) -> Routing | None:
        """Sizes of the routing, if experts are recorded."""
        return None if self._routing_recorder is None else self._routing_recorder.routing

    @torch.inference_mode()
    def compute(self, token_ids: list[list[int]], cache: DynamicCache) -> Computed:
        """Run rows of tokens of equal length that follow the tokens in `cache`; appends to `cache`."""
        rows = torch.tensor(token_ids, device=self.module.device)
        with _in_any_batch():
            output = self.module(rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
        experts = None if self._routing_recorder is None else self._routing_recorder.take(len(token_ids))
        return Computed(output.logits[:, -1].float(), experts)

    def compute_prompt(self, token_ids: list[int], begun: int, cache: DynamicCache) -> Computed:
        """Run one row whose last `begun` tokens were sampled earlier, such as by an engine that has died.

        On a CPU these are fed one by one, as when they were sampled: fed together they would round differently.
        """
        first = len(token_ids) - (begun if device.device().type == "cpu" else 0)
        parts = [self.compute([token_ids[:first]], cache)]
        parts += [self.compute([[token]], cache) for token in token_ids[first:]]
        experts = [part.experts for part in parts if part.experts is not None]
        return Computed(parts[-1].logits, np.concatenate(experts, axis=1) if experts else None)

    def empty_cache(self) -> DynamicCache:
        """A cache without keys and values."""
        return DynamicCache(config=self.module.config)


def _in_any_batch() -> AbstractContextManager[object]:
    """Make linear layers batch-invariant on a CPU.

    After an engine's death another one continues only its unfinished samples, so their batches are smaller.
    """
    return LinearInAnyBatch() if device.device().type == "cpu" else nullcontext()


def _load(folder: Path, arguments: TransformersArguments) -> PreTrainedModel:
    options: dict[str, Any] = {
        "attn_implementation": capping_attention(read_json(folder / CONFIG), arguments.attn_implementation),
        "experts_implementation": arguments.experts_implementation,
    }
    options = {name: value for name, value in options.items() if value is not None}
    options["trust_remote_code"] = False
    if arguments.load_format == "auto":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=arguments.dtype, use_safetensors=True, **options)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype != "auto" else config.dtype or torch.float32
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    # `from_pretrained` does this besides loading weights.
    model.tie_weights()
    kept = model._get_dtype_plan(dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        for part in kept:
            if part in name:
                tensor.data = tensor.to(kept[part])
    return model


class _RoutingRecorder:
    """Records the experts to which a forward pass routes its tokens, layer by layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        # The experts modules of all transformers models have an argument of this name.
        layers = [each for each in model.modules() if _CHOICE in _arguments(each)]
        if not layers:
            raise UserError(
                f"a {model.config.model_type} model has no experts that rollout.engine_args."
                "enable_return_routed_experts could return: leave it out, and set algorithm.router_replay=none"
            )
        self.routing = Routing(len(layers), model.config.num_experts_per_tok, int(layers[0].num_experts))
        self._choices: list[Tensor] = []
        for layer in layers:
            note = partial(self._note, _arguments(layer).index(_CHOICE))
            layer.register_forward_pre_hook(note, with_kwargs=True)

    def take(self, rows: int) -> npt.NDArray[np.int16]:
        """Return the choices of the pass, [rows, tokens, layers, top-k], and forget them."""
        choices, self._choices = self._choices, []
        return torch.stack(choices, 1).unflatten(0, (rows, -1)).to("cpu", torch.int16).numpy()

    def _note(self, place: int, _layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._choices.append(named[_CHOICE] if _CHOICE in named else arguments[place])


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


_CHOICE = "top_k_index"


def _end_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """The model's own end-of-sequence tokens."""
    is_written = (folder / GENERATION_CONFIG_NAME).exists()
    generation = GenerationConfig.from_pretrained(folder) if is_written else GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)


def _compute_logits_in_float32(output_layer: nn.Module) -> None:
    weight = output_layer.weight
    assert isinstance(weight, Tensor)

    def multiply(_layer: nn.Module, arguments: tuple[Tensor], _output: Tensor) -> Tensor:
        return F.linear(arguments[0].float(), weight.float())

    output_layer.register_forward_hook(multiply)
