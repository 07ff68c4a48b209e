"""The protocol of an inference engine: token ids in, token ids out, new weights in between."""

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
"""Token ids; arrays are int32."""
PauseMode = Literal["keep", "abort"]
KeysAndValues = Literal["recompute", "keep"]
"""Treatment of the KV cache of responses in flight when weights change: recomputed, or kept as older weights made it.
"""
EngineMemory = Literal["weights", "kv_cache"]
"""Memory that an engine holds on its GPUs, apart from what a step needs for itself."""


class EngineDiedError(RuntimeError):
    """The engine failed while it served; `__cause__` is the original error. The engine must be created again."""


class UpdateError(RuntimeError):
    """A weight update out of order, or one that does not bring every tensor exactly once."""


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

    `begun` maps samples that were interrupted to the tokens that they have; if it is not empty, only these samples are
    asked for. Their answers continue after these tokens, which count towards `max_tokens` and are skipped in the random
    streams.

    Example: Request([5, 9], SamplingParameters(samples=8, max_tokens=1024, seed=7), priority=4096)
    """

    prompt_token_ids: list[int]
    sampling: SamplingParameters
    priority: int = 0
    """If not all requests fit, those with lower values are served first."""
    conversation: int | None = None
    """Requests of one conversation share a prefix, and go to the same engine unless it is much busier than others."""
    cache_salt: str = ""
    """Requests share prefixes in the KV cache only with requests of the same salt."""
    begun: Mapping[int, TokenIds] = field(default_factory=dict)
    """Sample -> its tokens so far. The router passes arrays: lists would take seconds and gigabytes for thousands of
    long responses.
    """

    @property
    def samples(self) -> Sequence[int]:
        """The indices of the samples that are asked for."""
        return sorted(self.begun) if self.begun else range(self.sampling.samples)

    def begun_of(self, sample: int) -> TokenIds:
        """The tokens that a sample has already."""
        return self.begun.get(sample, ())

    def prompt_of(self, sample: int) -> list[int]:
        """All tokens before the first one to sample: the prompt, and what the sample has already."""
        if not self.begun:
            return self.prompt_token_ids
        return [*self.prompt_token_ids, *np.asarray(self.begun_of(sample), np.int32).tolist()]


@dataclass(frozen=True)
class RequestEnded:
    """The end of a submitted request: its samples, or why it cannot be served.

    Example: RequestEnded(17, [Turn.of([5, 9], [40, 2], [-0.7, -0.1], [3, 3], "stop")])
    """

    number: int
    answer: list[Turn] | UserError


@dataclass(frozen=True)
class SamplesEnded:
    """Samples have ended, but not yet their whole requests: the engine has room for as many.

    Example: SamplesEnded([17, 17, 21])
    """

    numbers: Sequence[int]
    """The request number of each sample."""


@dataclass(frozen=True)
class Progress:
    """New tokens of unfinished samples: `lengths[i]` tokens of sample `samples[i]` of request `numbers[i]`.

    All arrays are int32, except `log_probs`, which is float32. The last three concatenate the tokens of all samples.
    Tokens that arrive together with the end of their sample are only in the answer.
    """

    numbers: IntArray
    samples: IntArray
    lengths: IntArray
    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray


Event: TypeAlias = RequestEnded | SamplesEnded | Progress
"""An event of submitted requests."""


@dataclass(frozen=True)
class Load:
    """The load of an engine after a step, or aggregated over several steps.

    Example: Load(running=51.5, waiting=12, kv_used=1.0, preempted=3210)
    """

    running: float
    """Samples being computed, without those that just ended; the mean over steps."""
    waiting: float
    """Samples waiting for room; the maximum over steps."""
    kv_used: float | None
    """Share of the KV cache in use; the maximum over steps. None if the engine reserves no KV cache."""
    preempted: int
    """Tokens to be recomputed because their samples were preempted; the sum over steps."""


class Sampler(Protocol):
    """The sampling methods of an engine.

    Every method but `close` raises EngineDiedError once the engine has failed.
    """

    def start(self) -> None:
        """Load the model. Raises UserError for unknown engine arguments."""

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """Sample; return one list of `samples` answers per request, in order, when all are finished.

        The requests of one call enter the engine together. Raises UserError for a request that cannot be served.
        """

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Accept numbered requests and return at once; `events` reports on them.

        The requests of one call enter the engine together, or none of them does.
        """

    def events(self, engines: int = 1) -> Iterator[Sequence[Event]]:
        """Yield the ends of submitted requests as they come, until `close`; all but short answers include their text.

        Ends that are available at the same time are yielded together. The iterator may end before `close`: the caller
        then calls it again. A sample that ends before the last one of its request is soon reported (`SamplesEnded`),
        unless the request is aborted.

        An engine with `Ability.PROGRESS` also reports new tokens, every 64 tokens or 50 ms, so that another engine can
        continue the samples (`Request.begun`). If more than ten `engines` share one reader, each reports proportionally
        less often, so that the reader keeps up. An engine has one reader at a time.
        """

    def abort(self, numbers: Collection[int]) -> None:
        """End submitted requests: they are answered with the tokens so far, or with none without `Ability.PROGRESS`.

        Unknown numbers are ignored.
        """

    def load(self) -> Load | None:
        """The load over all steps since the last call; None if there were none, or if the engine cannot see steps."""

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """Yield the token ids of a request's single sample as they are sampled; together they are those of `generate`.

        Raises UserError as `generate`, and for a request of several samples.
        """

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling after the current token. "keep" continues requests after `resume`, "abort" ends them as they
        are.
        """

    def resume(self) -> None:
        """Resume after `pause`."""

    def version(self) -> int:
        """The version of the served weights: 0 for those of the model's folder, -1 without weights."""

    def close(self) -> None:
        """Free everything; unfinished `generate` calls raise EngineDiedError."""


class LayoutSource(Protocol):
    """The methods that tell where an engine keeps its weights."""

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[PackedTrace]:
        """Trace where each worker keeps the tensors of a HuggingFace checkpoint, or why it cannot tell.

        Raises UserError for an engine version whose weight layout is not known.
        """

    def worker_parts(self) -> list[int]:
        """For each worker, the index of its machine among those that the engine spans, which have one process each."""


class WeightTarget(Protocol):
    """The methods that replace an engine's weights.

    An update is a transaction: `begin_update`, the weights, `commit_update`. Between begin and commit the engine serves
    nothing, and requests wait. If an update fails, this lasts until another one is committed. The weights come either
    through the engine's own loader, by one `write` per bucket, or straight into the parameters, by `receive`.
    """

    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """Begin to replace all weights by those of `version`, the HF tensors `names`.

        Repeating a begun update starts it over, as it may have failed on another engine. Raises UpdateError if
        `version` is not above the current one, or if an update to another version is under way.
        """

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the shared-memory segments of later buckets; afterwards the segments' names may become invalid."""

    def write(self, bucket: Bucket) -> None:
        """Load the bucket's tensors; its segment can be reused when this returns.

        Raises UpdateError without `begin_update`, and for a tensor that is not part of the update or was already
        written.
        """

    def call_receivers(self, method: Callable[[WeightReceiver, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call a method of the `WeightReceiver` of every worker. Raises TransferError if one of them does."""

    def receive(self, version: int) -> None:
        """Receive all weights of the update by the `WeightReceiver` of every worker.

        Raises UpdateError as `write`, and TransferError if a rank is gone, silent or failed, or sent wrong bytes; the
        transfer must then be connected again.
        """

    def commit_update(self, version: int, kv: KeysAndValues = "recompute") -> int:
        """Serve the new weights. Unfinished responses continue with them, their KV cache recomputed or kept.

        Returns the number of tokens to recompute, counting a shared prompt once; 0 if unknown.

        Responses without a token yet never use keys and values of older weights, even if others keep theirs. Raises
        UpdateError if `version` is not the one begun, if a tensor is missing, and for "keep" without `Ability.KEPT_KV`.
        """


class Sleeper(Protocol):
    """The methods of an engine that takes turns with others on its GPUs.

    The engine must have been created with `EngineKind.able_to_sleep`. Calls that need memory which is away raise
    RuntimeError.
    """

    def sleep(self) -> None:
        """Free the memory of weights and KV cache. The weights are kept elsewhere; unfinished requests end."""

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """Restore these parts, if they are away: the weights as they were, the KV cache empty.

        Raises DeviceFullError if memory is counted (`count_memory`) and they do not fit.
        """

    def count_memory(self, memory: CountedMemory) -> None:
        """From now on count the memory held in `memory`, which stands in for a GPU's limit. Raises as `wake_up`."""


class Profiled(Protocol):
    """The methods that record a timeline of the processes that an engine has started."""

    def start_profiler(self) -> None:
        """Start recording each process that the engine has started."""

    def stop_profiler(self, most_events: int, since_us: float) -> Mapping[str, bytes]:
        """Stop recording; return the events by process name, without processes that started later.

        At most `most_events` in total, encoded by `megarl.process.profiler.encoded`.
        """


class EnginePart(Protocol):
    """The process of an engine on a machine other than its first; it is only started and closed."""

    def start(self) -> None:
        """Start its workers; return when those of all machines are up."""

    def close(self) -> None:
        """Stop its workers."""


class Engine(Sampler, LayoutSource, WeightTarget, Sleeper, Profiled, Protocol):
    """An inference engine in this process. Every method may be called from any thread."""
