"""Protocol of an inference engine for the training loop: token ids in, token ids out, new weights in between."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar, TypeVarTuple

import numpy as np
import torch

from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.data import Turn
from megarl.data.trajectory import FloatArray, IntArray
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.resharding.loader.buckets import Bucket
from megatron_ext.memory.device_memory import CountedMemory

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
TokenIds: TypeAlias = Sequence[int] | IntArray
"""Tokens; an array is one of int32."""
PauseMode = Literal["keep", "abort"]
KeysAndValues = Literal["recompute", "keep"]
"""Keys and values of responses in flight when weights change: recomputed, or those of the weights of their time."""
EngineMemory = Literal["weights", "kv_cache"]
"""Memory that an engine holds on its GPUs, apart from what a step needs for itself."""


class EngineDiedError(RuntimeError):
    """The engine failed while it served; its `__cause__` is what it failed with. It has to be made again."""


class UpdateError(RuntimeError):
    """A weight update in the wrong order, or one that is not the whole model once."""


@dataclass(frozen=True)
class SamplingParameters:
    """How to sample.

    `temperature` 0 is greedy; `top_k` -1 considers every token. A response ends after one of `stop_token_ids`, after
    one of the model's own end-of-sequence tokens (its generation_config.json), or after `max_tokens` tokens. With a
    `seed`, the samples of a request are reproducible and each has a random stream of its own, derived from the seed
    and the sample's position; requests that share a prompt need different seeds.
    """

    samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    `begun`, if there is any, names the samples that are asked for, with the tokens that each has: they were cut before.
    The turns of the answer are theirs alone and begin behind these tokens, in `max_tokens` as in the random streams.

    Example: Request([5, 9], SamplingParameters(samples=8, max_tokens=1024, seed=7), priority=4096)
    """

    prompt_token_ids: list[int]
    sampling: SamplingParameters
    priority: int = 0
    """Where there is no room for all, lower ones are served first."""
    conversation: int | None = None
    """Requests of the same one begin alike, and go to the same engine as long as it is not much busier."""
    cache_salt: str = ""
    """Requests share keys and values with those that have the same one, and with no others."""
    begun: Mapping[int, TokenIds] = field(default_factory=dict)
    """The router gives arrays: lists of the tokens of thousands of long responses would take seconds and gigabytes."""

    @property
    def samples(self) -> Sequence[int]:
        """The samples that are asked for, by their places among all."""
        return sorted(self.begun) if self.begun else range(self.sampling.samples)

    def begun_of(self, sample: int) -> TokenIds:
        """The tokens that a sample has already."""
        return self.begun.get(sample, ())

    def prompt_of(self, sample: int) -> list[int]:
        """All tokens that come before what is sampled."""
        if not self.begun:
            return self.prompt_token_ids
        return [*self.prompt_token_ids, *np.asarray(self.begun_of(sample), np.int32).tolist()]


@dataclass(frozen=True)
class RequestEnded:
    """The end of a submitted request: its samples, or the reason for which it cannot be served.

    Example: RequestEnded(17, [Turn.of([5, 9], [40, 2], [-0.7, -0.1], [3, 3], "stop")])
    """

    number: int
    answer: list[Turn] | UserError


@dataclass(frozen=True)
class SamplesEnded:
    """Ends of samples before the last of their request, which was submitted: there is room for as many.

    Example: SamplesEnded([17, 17, 21])
    """

    numbers: Sequence[int]
    """The request of each of them."""


@dataclass(frozen=True)
class Progress:
    """New tokens of samples that have not ended: `lengths[i]` of sample `samples[i]` of request `numbers[i]`.

    All arrays are int32 but `log_probs`, float32; the last three have the tokens of all, end to end. Tokens that come
    with the end of their sample are in the answer alone.
    """

    numbers: IntArray
    samples: IntArray
    lengths: IntArray
    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray


Event: TypeAlias = RequestEnded | SamplesEnded | Progress
"""News that an engine has of requests that were submitted."""


@dataclass(frozen=True)
class Load:
    """The work that an engine has after a step, or after each of some steps.

    Example: Load(running=51.5, waiting=12, kv_used=1.0, preempted=3210)
    """

    running: float
    """Samples that it computes and that go on; of several steps the mean."""
    waiting: float
    """Samples that it has no room for; of several steps the most."""
    kv_used: float | None
    """Share of its room for keys and values that is in use; of several steps the most. None where there is no room set
    apart for them."""
    preempted: int
    """Tokens that it computes again, since it took the room for keys and values of their samples for others; of several
    steps the sum."""


class Sampler(Protocol):
    """Methods by which an engine samples.

    Every method but `close` raises EngineDiedError once the engine has failed.
    """

    def start(self) -> None:
        """Load the model. Raises UserError for engine arguments that don't exist."""

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Sample; one list per request with `samples` answers, in order. Returns when all are finished.

        The requests of one call enter the engine together. Raises UserError for a request that cannot be served.
        """

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Take numbered requests in and return at once; `events` gives what becomes of them.

        The requests of one call enter the engine together, or none of them does.
        """

    def events(self, engines: int = 1) -> Iterator[Sequence[Event]]:
        """The ends of all submitted requests, as they come, until `close`; all but short answers with their text.

        Ends that are there at the same time come together. It may end before: who is not done calls it again. Each
        sample that ends before the last of its request is told of soon (`SamplesEnded`), but where the request is cut.

        An engine that can (`Ability.PROGRESS`) tells of new tokens meanwhile, of each sample after 64 tokens or 50 ms,
        so that another can continue what it has begun (`Request.begun`). Where more than ten `engines` have one
        reader, each waits longer in proportion, so that it keeps up. It has one reader at a time.
        """

    def abort(self, numbers: Collection[int]) -> None:
        """End submitted requests: their answers have what there is; nothing, without `Ability.PROGRESS`.

        Numbers of others are no error.
        """

    def load(self) -> Load | None:
        """The load of all steps since it was asked for last; None if there were none, or it does not see its steps."""

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """The token ids of a request's one sample, as they are sampled; all together are those of `generate`.

        Raises UserError as `generate`, and for a request of several samples.
        """

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling after the current token: "keep" goes on after `resume`, "abort" returns what there is."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def version(self) -> int:
        """The version of the served weights: 0 for the weights of the model's folder, -1 for none."""

    def close(self) -> None:
        """Free everything; unfinished `generate` calls raise EngineDiedError."""


class LayoutSource(Protocol):
    """Methods by which an engine says where it keeps its weights."""

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[PackedTrace]:
        """Where each worker keeps the tensors of a HuggingFace checkpoint, and why it cannot say so of some.

        Raises UserError for a version of the engine of which this is not known.
        """

    def worker_parts(self) -> list[int]:
        """The number of each worker's process; the engine has one process on each machine that it spans."""


class WeightTarget(Protocol):
    """Methods by which the weights of an engine are replaced.

    An update is a transaction: `begin_update`, the weights, `commit_update`. From its begin to its commit the engine
    serves nothing; requests wait. If an update fails it stays so, until another one is committed. The weights come
    either by the engine's own loader, with `write` of every bucket, or by `receive` straight into the parameters.
    """

    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """Begin to replace all weights by those of `version`, which consist of the HF tensors `names`.

        An update to the same version starts over: it may have failed on another engine. Raises UpdateError if `version`
        is not above the current one or an update to another is under way.
        """

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the shared-memory segments of coming buckets; afterwards their names are not needed any more."""

    def write(self, bucket: Bucket) -> None:
        """Load the bucket's tensors; when it returns its segment can be used again.

        Raises UpdateError without `begin_update`, and for a tensor that is not among the update's or was written.
        """

    def call_receivers(self, method: Callable[[WeightReceiver, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call a method of the `WeightReceiver` of every worker. Raises TransferError if one of them does."""

    def receive(self, version: int) -> None:
        """Let the `WeightReceiver` of every worker receive all weights of the update.

        Raises UpdateError as `write`, and TransferError if a rank is gone, silent or failed or sent wrong bytes; then
        the transfer is to be connected again.
        """

    def commit_update(self, version: int, kv: KeysAndValues = "recompute") -> int:
        """Serve the new weights. Unfinished responses go on with them, their keys and values recomputed or kept.

        Returns the tokens that are to be recomputed, those of a prompt once; 0 where that is not known.

        Whatever has no token yet meets no keys and values of older weights, also where others keep theirs.
        Raises UpdateError if `version` is not the one begun, if a tensor is missing, and for "keep" where the engine
        cannot (`Ability.KEPT_KV`).
        """


class Sleeper(Protocol):
    """Methods by which an engine takes turns with others on its GPUs.

    It was made with `EngineKind.able_to_sleep`. Nothing may be asked of it that needs what is away: it raises
    RuntimeError.
    """

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back. The weights are kept elsewhere; unfinished requests end."""

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """Have these parts back, if they are away: the weights as they were, the KV cache empty.

        Raises DeviceFullError where they are counted (`count_memory`) and do not fit.
        """

    def count_memory(self, memory: CountedMemory) -> None:
        """Count what it holds, from now on, where there is no GPU to do it. Raises as `wake_up`."""


class Profiled(Protocol):
    """Methods by which the work of the processes that an engine has started gets into a timeline."""

    def start_profiler(self) -> None:
        """Begin to record what each process does that it has started."""

    def stop_profiler(self, most_events: int, since_us: float) -> Mapping[str, bytes]:
        """End that: the events of each, by its name; nothing of a process that has begun since then.

        There are `most_events` of all together, as `megarl.process.profiler.encoded` writes them.
        """


class EnginePart(Protocol):
    """The process of an engine on another machine than its first: nobody calls it but to start and to end it."""

    def start(self) -> None:
        """Start its workers; returns when those of all machines are up."""

    def close(self) -> None:
        """End its workers."""


class Engine(Sampler, LayoutSource, WeightTarget, Sleeper, Profiled, Protocol):
    """An inference engine in this process. Every method may be called from any thread."""
