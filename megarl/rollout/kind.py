"""The particulars of a kind of engine, as data: whoever starts, places or configures engines reads them here."""

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
"""The setting for which engines say which experts each token went to."""
QUANTISATION = "quantization_config"
"""The field of config.json by which megarl gives an engine a number format."""
NUMBER_FORMAT = "megarl_number_format"
"""Field of `quantization_config` with the format's name: weights are quantised on reading. Engines ignore it."""


def quantisation(number_format: "NumberFormat", architecture: "Architecture") -> dict[str, Any]:
    """The `quantization_config` with which an engine holds the model in a number format, whatever form it reads."""
    return {**number_format.engine_config(architecture), NUMBER_FORMAT: number_format.name}


class Ability(Enum):
    """Something that a schedule or an algorithm may ask of an engine, beyond tokens; the value says what it does."""

    LOG_PROBS = "say with which log-prob it drew each token"
    PRIORITIES = "serve requests in the order of their priorities"
    KEPT_KV = "let responses keep their keys and values when weights change, apart from those of new ones"
    """Keys and values carry a salt for each version, so that no prompt meets those of older weights."""
    PROGRESS = "tell of the tokens of a response before it ends"
    """Where it cannot, a response starts over after its engine was killed, or the run was."""


def two_at_most(arguments: Arguments, names: Collection[str]) -> Arguments:
    """The sizes of these names that are given, none above two."""
    return {name: min(2, size) for name in names if (size := arguments.get(name)) is not None}


class EngineSizes(NamedTuple):
    """How an engine cuts the model: attention over `tensor` ranks, whole experts over `expert` ranks (None: cut, too).

    Example: EngineSizes(tensor=4, expert=None, dtype="bf16")
    """

    tensor: int
    expert: int | None
    dtype: str
    """bf16, or fp8 for weights in blocks."""
    is_eager: bool = False
    """Its kernels are launched one by one, without recorded graphs."""
    kv_bytes: int = 2
    """Bytes of a number of keys and values: 2 in the model's type, 1 in FP8."""
    kv_ranks: int = 1
    """Ranks that share out the tokens of which each would else have all keys and values, or the latent."""


class Cut(NamedTuple):
    """Into how many parts something of a model is cut, and the arguments that say so."""

    parts: int = 1
    said_by: str = ""
    """Names of arguments below `rollout.engine_args`, with " x " in between."""


class EngineCuts(NamedTuple):
    """How an engine cuts a model over its workers.

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
    """Versions of those of some packages that are there."""
    versions: Sequence[str]
    """The versions of the engine of which one has to be there."""
    set_up: Mapping[str, str]
    """Device -> the command that installs it."""
    needed: Mapping[str, Sequence[str]]
    """Device -> packages without which the engine does not serve on it."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """All that megarl has to know of an inference engine before, and beside, running it.

    Nothing of the engine is imported for it: the machine that submits a job need not have it.
    """

    title: str
    """The engine's name, as its authors write it."""
    engine_class: tuple[str, str]
    """Module and name of the `Engine`; made with the model's folder and the engine's arguments."""
    argument_class: tuple[str, str]
    """Module and name of the dataclass that has all arguments of the engine."""
    refused: Mapping[str, Refusal]
    """Arguments, or values of them, with which training would fail or be wrong."""
    tested: Mapping[str, str]
    """Argument -> the test, below tests/, that runs it."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """Argument -> its values, where they are fewer than those of its type, or megarl computes with them."""
    only_known: Set[str] = frozenset()
    """Arguments whose type allows any string, although only the values that the type lists work."""
    workers: Callable[[Arguments], int]
    """How many processes, each with a GPU of its own where there are any, an engine with these arguments has."""
    offers: Collection[Ability]
    """All that may be asked of this kind; it lacks the rest."""
    sizes: Callable[[Arguments], EngineSizes]
    """How an engine with these arguments cuts and holds the model, for commands that count it in closed form; UserError
    for sizes that they do not know, which says "this command" in place of the command's name."""
    cuts: Callable[[Arguments], EngineCuts] = lambda _arguments: EngineCuts()
    """How an engine with these arguments cuts a model; UserError where its workers cannot be shared out like that."""
    quantised: "Callable[[Arguments, NumberFormat, Architecture], Arguments] | None" = None
    """Arguments with which an engine holds the model in a number format; None where no engine of this kind can.
    UserError for arguments that contradict it, and for a model that does not fit."""
    number_formats: Sequence[str] = ()
    """Names of the number formats in which engines of this kind can hold a model."""
    drafts: Callable[[Arguments], bool] = lambda _arguments: False
    """Whether an engine with these arguments drafts with the policy's layers for multi-token prediction, and so holds
    them; UserError where it drafts otherwise."""
    context_argument: str
    """The argument that limits how many tokens a prompt and its response may have."""
    max_concurrent_samples: Callable[[Arguments], int | None] = lambda _arguments: None
    """How many samples an engine with these arguments computes at the same time; None where that is not known."""
    tiny: Callable[[Arguments], Arguments] = lambda _arguments: {}
    """Arguments with which an engine has two workers, on one machine, for each kind of parallelism of which it has
    more: `+scale=tiny`."""
    nodes: Callable[[Arguments], int] = lambda _arguments: 1
    """How many machines an engine with these arguments spans. On each it has a process: the first is the engine."""
    part_class: tuple[str, str] | None = None
    """Module and name of the `EnginePart` that is its process on every other machine; None where it spans one."""
    part_arguments: Callable[[int, tuple[str, int]], Arguments] = lambda _number, _first: {}
    """Arguments that tell a process of an engine over machines its number, and a free address of the first machine."""
    loopback_environment: Mapping[str, str] = field(default_factory=dict)
    """With these environment variables an engine listens on this machine alone."""
    kernel_folders: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> name of a folder, of kernels that an engine compiles and would keep at home."""
    memory_share: Callable[[Arguments, float, bool], float] = lambda _arguments, _memory_bytes, _is_latent: 0.9
    """Share that an engine with these arguments takes of a GPU of so many bytes; the last says whether its model has
    latent attention."""
    computes_beside: bool = False
    """Whether that share is for weights, keys and values alone, and what it computes with lies beside it."""
    prefill_tokens: Callable[[Arguments], int] = lambda _arguments: 8192
    """How many tokens of prompts an engine with these arguments computes at a time, on a GPU of 80 GB."""
    gpu_share: Callable[[float], Arguments] = lambda _share: {}
    """Arguments with which an engine leaves others their room on a GPU of which it has this share."""
    adapter_slot: "Callable[[Arguments, Architecture, Lora, Sequence[str]], Arguments] | None" = None
    """Arguments with which an engine takes this adapter, of these modules of its model, beside its weights; None
    where no engine of this kind can. UserError for arguments, a model or an adapter that do not go with it."""
    without_weights: Arguments
    """With these arguments an engine starts without reading weights."""
    able_to_sleep: Arguments = field(default_factory=dict)
    """With these arguments an engine can `sleep`."""
    float32_logits: Arguments
    """With these arguments an engine does not round logits; what is given wins, also value by value of a group."""
    bounded_kv: Callable[[Arguments], Arguments] | None = None
    """Arguments with which the scales of keys and values in FP8 follow from the weights; None where no engine of this
    kind can. UserError for arguments with which there are none."""
    returning_experts: Arguments | None = None
    """With these arguments an engine says which experts each token went to; None where no engine of this kind does."""
    beside_returned_experts: Mapping[str, Refusal] = field(default_factory=dict)
    """Arguments, or values of them, with which an engine would not start with those, or would say something else."""
    layout_versions: Sequence[str] = ()
    """Versions (major.minor) of which it is known where a worker keeps its weights; empty where any version says so."""
    rehearsal: tuple[str, str] | None = None
    """Module and name of the function that builds the workers of an engine with no memory behind: of a config.json, the
    engine's arguments, and shapes and types of the tensors of the checkpoint it makes the `RehearsedWorker` of each. It
    wants a process of its own. None where no engine of this kind can be built so."""
    packages: Mapping[str, str]
    """Device, as `device.backend` tells them apart, -> the distribution that is the engine there."""
    own_environment: OwnEnvironment | None = None
    """Where that is installed, if it is not among megarl's own packages."""
    one_of: Sequence[tuple[str, str, str]] = ()
    """Two sizes, of which only one may be above 1, and why."""

    def arguments(self) -> Mapping[str, FieldType]:
        """Name -> type of the engine's options; empty where it is not installed."""
        try:
            return read_fields(*self.argument_class)
        except ModuleNotFoundError:
            return {}

    def context(self, given: Arguments) -> int | None:
        """How many tokens these arguments limit a prompt and its response to, if they do."""
        return given.get(self.context_argument)

    def check(self, given: Arguments) -> None:
        """Raise UserError for an option that the installed engine lacks, with the nearest it has, a refused one, and a
        value that an option cannot have.

        Where the engine is not installed (the machine that submits a job), names are checked where it starts, and
        values of those that are in no table.
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
        """Whether it is known where a worker of this version keeps its weights."""
        return not self.layout_versions or ".".join(version.split(".")[:2]) in self.layout_versions

    def with_float32_logits(self, rollout: RolloutConfig) -> RolloutConfig:
        """`rollout` with the arguments that make the engine round no logits."""
        given = dict(rollout.engine_args)
        for name, value in self.float32_logits.items():
            if isinstance(value, Mapping):
                given[name] = {**value, **(given.get(name) or {})}
            else:
                given.setdefault(name, value)
        return replace(rollout, engine_args=given)
