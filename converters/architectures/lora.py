"""Low-rank adapters of a model's matrices (LoRA, arXiv 2106.09685), with the names and shapes of HuggingFace's PEFT."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from converters.architectures.weight_map import Architecture, Dimension, Kind, Parameter, Part
from converters.errors import UserError, did_you_mean

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers except the output layer."""
MODULE_SUFFIX = "_lora"
"""Suffix of an adapter's module: that of Megatron's `linear_qkv` is `linear_qkv_lora`, next to it."""
_RANK = "lora_rank"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_CUT_ROWS = (Kind.COLUMN, Kind.GATED, Kind.QKV)
_ROUTER = "router.weight"


@dataclass(frozen=True)
class Lora:
    """Each adapted matrix W [out, in] acts as W + alpha / rank * B A, with A [rank, in] and B [out, rank].

    `target_modules` are PEFT's: the end of a module's HuggingFace name, such as `q_proj` or `shared_experts.up_proj`,
    or `all-linear`. Raises UserError if rank or alpha is not positive, or if there is no target.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise UserError(f"lora.rank={self.rank} and lora.alpha={self.alpha:g} must be above 0: correct them")
        if not self.target_modules:
            raise UserError(f"lora.target_modules is empty: name modules such as q_proj, or {ALL_LINEAR}")

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def adapter_architecture(architecture: Architecture, lora: Lora) -> Architecture:
    """The adapter of a model as an architecture of its own, whose tensors are A and B of every adapted matrix.

    HuggingFace names are those of PEFT's adapter_model.safetensors. If Megatron fuses several matrices into one linear
    layer, each has its own A and B, as in PEFT. For a matrix whose input is cut over tensor-parallel ranks, A is cut;
    if its output is cut, B is. The other factor is replicated on all ranks.

    Raises UserError for a target that the model does not have.
    """
    adapted = list(_adapted(architecture, lora.target_modules))
    return replace(
        architecture,
        dimensions={**architecture.dimensions, _RANK: Dimension("lora.rank", lora.rank)},
        weight_map=tuple(factor for parameter, name, shape in adapted for factor in _factors(parameter, name, shape)),
        hf_copies={},
        exported_copies=(),
        hf_unused=frozenset(),
        hf_zero_if_missing=frozenset(),
    )


def base_name(hf_name: str) -> str:
    """The HuggingFace name of the matrix that an adapter's tensor belongs to."""
    return hf_name.removeprefix(_PREFIX).rsplit(".", 2)[0] + _WEIGHT


def target_names(adapter: Architecture) -> list[str]:
    """The last part of the HuggingFace name of every adapted module, as in PEFT's `target_modules`."""
    names = (name for parameter in adapter.weight_map for name, _ in parameter.huggingface)
    return sorted({_module(base_name(name)) for name in names})


def _adapted(architecture: Architecture, targets: Sequence[str]) -> Iterator[tuple[Parameter, str, tuple[str, ...]]]:
    """Yield parameter, HuggingFace name and shape of every target matrix; raises UserError for a target without any."""
    matrices = [
        (parameter, name, shape)
        for parameter in architecture.weight_map
        if parameter.part is Part.LAYERS and not parameter.megatron.endswith(_ROUTER)
        for name, shape in parameter.huggingface
        if len(shape) == 2
    ]
    known = sorted({_module(name) for _, name, _ in matrices})
    for target in targets:
        if target != ALL_LINEAR and not any(_is_target(name, target) for _, name, _ in matrices):
            raise UserError(
                f"lora.target_modules names {target}, which is no linear layer of this {architecture.model_type} model:"
                f" {', '.join(known)} are{did_you_mean(target, known)}"
            )
    for matrix in matrices:
        if any(_is_target(matrix[1], target) for target in targets):
            yield matrix


def _is_target(name: str, target: str) -> bool:
    return target == ALL_LINEAR or f".{name.removesuffix(_WEIGHT)}".endswith(f".{target}")


def _module(name: str) -> str:
    return name.removesuffix(_WEIGHT).rsplit(".", 1)[-1]


def _factors(parameter: Parameter, hf_name: str, shape: tuple[str, ...]) -> tuple[Parameter, Parameter]:
    rows, columns = shape
    module, of_megatron = hf_name.removesuffix(_WEIGHT), parameter.megatron.removesuffix(_WEIGHT)

    def factor(letter: str, dimensions: tuple[str, str], kind: Kind) -> Parameter:
        return replace(
            parameter,
            megatron=f"{of_megatron}{MODULE_SUFFIX}.{_module(hf_name)}.lora_{letter}",
            transformer_engine=None,
            huggingface=((f"{_PREFIX}{module}.lora_{letter}{_WEIGHT}", dimensions),),
            kind=kind,
        )

    return (
        factor("A", (_RANK, columns), Kind.ROW if parameter.kind is Kind.ROW else Kind.REPLICATED),
        factor("B", (rows, _RANK), Kind.COLUMN if parameter.kind in _CUT_ROWS else Kind.REPLICATED),
    )
