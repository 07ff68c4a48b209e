"""Describes a kind of engine as data, for all code that starts, places or configures engines."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.errors import UserError, did_you_mean
from megarl.rollout.argument_values import PREFIX, Values, check_type, check_values
from megarl.schema import RolloutConfig
from megatron_ext.options.dataclass_fields import FieldType, read_fields
from megatron_ext.options.refusal import Refusal, refuse

if TYPE_CHECKING:
    from converters.architectures import Architecture, Lora
    from converters.number_formats import NumberFormat

Arguments = Mapping[str, Any]
"""`rollout.engine_args`: options of an engine by the engine's own names."""


REPLAY = "algorithm.router_replay=rollout"
"""The setting that needs engines to return the experts of each token."""
QUANTISATION = "quantization_config"
"""The field of config.json through which megarl asks an engine for a number format."""
NUMBER_FORMAT = "megarl_number_format"
"""Field of `quantization_config` with the name of the format to which weights are quantised on loading. Engines ignore
it.
"""


def quantisation(number_format: "NumberFormat", architecture: "Architecture") -> dict[str, Any]:
    """The `quantization_config` that makes an engine hold the model in a number format, whatever the checkpoint's."""
    return {**number_format.engine_config(architecture), NUMBER_FORMAT: number_format.name}


class Ability(Enum):
    """An optional feature that a schedule or an algorithm may need; the value says what the engine must do."""

    LOG_PROBS = "say with which log-prob it drew each token"
    PRIORITIES = "serve requests in the order of their priorities"
    KEPT_KV = "let responses keep their keys and values when weights change, apart from those of new ones"
    """Cached keys and values are salted by version, so that no new prompt uses those of older weights."""
    PROGRESS = "tell of the tokens of a response before it ends"
    """Without it, a response starts over after its engine or the run was killed."""


def two_at_most(arguments: Arguments, names: Collection[str]) -> Arguments:
    """The sizes with these names that are given, capped at two."""
    return {name: min(2, size) for name in names if (size := arguments.get(name)) is not None}


class EngineSizes(NamedTuple):
    """How an engine shards the model: attention over `tensor` ranks, whole experts over `expert` ranks.

    Without `expert`, experts are sharded over the `tensor` ranks, too.

    Example: EngineSizes(tensor=4, expert=None, dtype="bf16")
    """

    tensor: int
    expert: int | None
    dtype: str
    """bf16, or fp8 for block-quantised weights."""
    is_eager: bool = False
    """Launches kernels one by one, without CUDA graphs."""
    kv_bytes: int = 2
    """Bytes per element of the KV cache: 2 in the model's dtype, 1 in FP8."""
    kv_ranks: int = 1
    """Ranks that split the tokens of the KV cache, or latent cache, which would otherwise be replicated."""


class Cut(NamedTuple):
    """Into how many parts a part of the model is sharded, and by which arguments."""

    parts: int = 1
    said_by: str = ""
    """Names of arguments below `rollout.engine_args`, joined by " x "."""


class EngineCuts(NamedTuple):
    """How an engine shards a model over its workers.

    Example: EngineCuts(matrices=Cut(4, "tp_size"), experts=Cut(2, "tp_size / ep_size"))
    """

    matrices: Cut = Cut()
    """The matrices of attention and of dense layers."""
    experts: Cut = Cut()
    """The matrices of each expert."""
    stages: Cut = Cut()
    """The layers, which stay whole."""


class OwnEnvironment(NamedTuple):
    """The environment of an engine that is installed apart from megarl."""

    installed_versions: Callable[[Sequence[str]], Mapping[str, str]]
    """The versions of those of the given packages that are installed."""
    versions: Sequence[str]
    """Supported versions of the engine, one of which must be installed."""
    set_up: Mapping[str, str]
    """Device -> the command that installs it."""
    needed: Mapping[str, Sequence[str]]
    """Device -> packages that the engine needs to serve on it."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Everything that megarl needs to know about an inference engine without running it.

    Nothing of the engine is imported: the machine that submits a job need not have it installed.
    """

    title: str
    """The engine's name, as its authors spell it."""
    engine_class: tuple[str, str]
    """Module and name of the `Engine` class, which is called with the model's folder and the engine's arguments."""
    argument_class: tuple[str, str]
    """Module and name of the dataclass with all arguments of the engine."""
    refused: Mapping[str, Refusal]
    """Arguments, or values of them, with which training would fail or go wrong."""
    tested: Mapping[str, str]
    """Argument -> the test, below tests/, that exercises it."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """Argument -> its valid values, if they are fewer than those of its type, or if megarl computes with them."""
    only_known: Set[str] = frozenset()
    """Arguments whose type admits any string, although only the values that the type lists work."""
    workers: Callable[[Arguments], int]
    """The number of worker processes, each with a GPU of its own if there are any, of an engine with these arguments.
    """
    offers: Collection[Ability]
    """The abilities of this kind of engine."""
    sizes: Callable[[Arguments], EngineSizes]
    """How an engine with these arguments shards and holds the model, for commands that count it in closed form. Raises
    UserError for unsupported sizes; its message has "this command" in place of the command's name.
    """
    cuts: Callable[[Arguments], EngineCuts] = lambda _arguments: EngineCuts()
    """How an engine with these arguments shards a model. Raises UserError if the sizes do not fit its workers."""
    quantised: "Callable[[Arguments, NumberFormat, Architecture], Arguments] | None" = None
    """Arguments that make an engine hold the model in a number format; None if this kind cannot. Raises UserError for
    arguments that contradict it, and for a model that does not fit.
    """
    number_formats: Sequence[str] = ()
    """Names of the number formats that this kind supports."""
    drafts: Callable[[Arguments], bool] = lambda _arguments: False
    """Whether an engine with these arguments drafts with the policy's multi-token prediction layers, and so holds them.
    Raises UserError if it drafts in another way.
    """
    context_argument: str
    """The argument that limits the tokens of a prompt and its response together."""
    max_concurrent_samples: Callable[[Arguments], int | None] = lambda _arguments: None
    """How many samples an engine with these arguments computes at the same time; None if unknown."""
    tiny: Callable[[Arguments], Arguments] = lambda _arguments: {}
    """The arguments for `+scale=tiny`: every parallel size above two becomes two, on one machine."""
    nodes: Callable[[Arguments], int] = lambda _arguments: 1
    """How many machines an engine with these arguments spans. It has one process on each; the first is the engine."""
    part_class: tuple[str, str] | None = None
    """Module and name of the `EnginePart`, its process on every other machine; None if it spans only one."""
    part_arguments: Callable[[int, tuple[str, int]], Arguments] = lambda _number, _first: {}
    """Arguments for a process of an engine that spans machines, from its number and a free address on the first
    machine.
    """
    loopback_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that make an engine listen on loopback only."""
    kernel_folders: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> folder name, for compiled kernels that the engine would otherwise keep in the home
    folder.
    """
    memory_share: Callable[[Arguments, float, bool], float] = lambda _arguments, _memory_bytes, _is_latent: 0.9
    """Share of a GPU that an engine takes, from its arguments, the GPU's memory in bytes, and whether the model has
    latent attention.
    """
    computes_beside: bool = False
    """Whether that share covers only weights and KV cache, with activations in addition."""
    prefill_tokens: Callable[[Arguments], int] = lambda _arguments: 8192
    """How many prompt tokens an engine with these arguments computes at a time, on a GPU of 80 GB."""
    gpu_share: Callable[[float], Arguments] = lambda _share: {}
    """Arguments that limit an engine to this share of a GPU."""
    adapter_slot: "Callable[[Arguments, Architecture, Lora, Sequence[str]], Arguments] | None" = None
    """Arguments that give an engine a slot for this adapter, of these modules, beside its base weights; None if this
    kind has none. Raises UserError for arguments, a model or an adapter that it does not support.
    """
    without_weights: Arguments
    """Arguments with which an engine starts without reading weights."""
    able_to_sleep: Arguments = field(default_factory=dict)
    """Arguments with which an engine can `sleep`."""
    float32_logits: Arguments
    """Arguments with which an engine does not round logits. The user's own values take precedence, even within a nested
    group.
    """
    bounded_kv: Callable[[Arguments], Arguments] | None = None
    """Arguments with which the scales of an FP8 KV cache are derived from the weights; None if this kind cannot. Raises
    UserError for arguments with which there are no such scales.
    """
    returning_experts: Arguments | None = None
    """Arguments with which an engine returns the experts of each token; None if this kind cannot."""
    beside_returned_experts: Mapping[str, Refusal] = field(default_factory=dict)
    """Arguments, or values of them, with which returning experts would fail to start, or give wrong experts."""
    layout_versions: Sequence[str] = ()
    """Versions (major.minor) whose weight layout is known; empty if every version's is."""
    rehearsal: tuple[str, str] | None = None
    """Module and name of the function that builds an engine's workers without allocating memory, and returns a
    `RehearsedWorker` for each. Its arguments are a config.json, the engine's arguments, and the shapes and dtypes of
    the checkpoint's tensors. It needs a process of its own. None if this kind cannot be built so.
    """
    packages: Mapping[str, str]
    """Device, by `device.backend` -> the Python distribution of the engine there."""
    own_environment: OwnEnvironment | None = None
    """The environment in which it is installed, if not in megarl's own."""
    one_of: Sequence[tuple[str, str, str]] = ()
    """Pairs of sizes of which only one may be above 1, and the reason."""

    def arguments(self) -> Mapping[str, FieldType]:
        """Name -> type of the engine's options; empty if the engine is not installed."""
        try:
            return read_fields(*self.argument_class)
        except ModuleNotFoundError:
            return {}

    def context(self, given: Arguments) -> int | None:
        """The limit that these arguments set on the tokens of a prompt and its response; None if they set none."""
        return given.get(self.context_argument)

    def check(self, given: Arguments) -> None:
        """Raise UserError for an unknown option, naming the nearest known one, a refused option, or an invalid value.

        If the engine is not installed (on the machine that submits a job), names, and values without a table of valid
        ones, are checked only when the engine starts.
        """
        known = self.arguments()
        for name in given if known else ():
            if name not in known:
                advice = did_you_mean(name, known, f"{PREFIX}{{}}")
                raise UserError(f"{PREFIX}{name}: the installed {self.title} has no such option{advice}")
        refuse(given, self.refused, PREFIX)
        if self.returning_experts is not None and self.returning_experts.items() <= given.items():
            refuse(given, self.beside_returned_experts, PREFIX, f" with {REPLAY}")
        check_values(given, self.values, known)
        for name in self.only_known & given.keys() & known.keys():
            check_type(name, given[name], replace(known[name], kinds=known[name].kinds - {"str"}))
        self.drafts(given)
        for one, other, reason in self.one_of:
            if min(given.get(one) or 1, given.get(other) or 1) > 1:
                raise UserError(f"{PREFIX}{one}={given[one]} is not supported with {other}={given[other]}: {reason}")

    def knows_layouts_of(self, version: str) -> bool:
        """Whether the weight layout of this version is known."""
        return not self.layout_versions or ".".join(version.split(".")[:2]) in self.layout_versions

    def with_float32_logits(self, rollout: RolloutConfig) -> RolloutConfig:
        """`rollout`, with the arguments that keep the engine from rounding logits."""
        given = dict(rollout.engine_args)
        for name, value in self.float32_logits.items():
            if isinstance(value, Mapping):
                given[name] = {**value, **(given.get(name) or {})}
            else:
                given.setdefault(name, value)
        return replace(rollout, engine_args=given)
