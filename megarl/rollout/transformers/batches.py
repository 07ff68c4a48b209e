"""Batches: samples of one request, which advance together by one token per step.

The samples of a request share a prompt and so always have the same length: nothing is padded. A batch never mixes
requests, so a response depends only on its own request, to the last bit, whatever else is served.
"""

from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from megarl.data import FinishReason, Turn
from megarl.data.stretches import Values
from megarl.rollout.protocol import Request
from megarl.rollout.request_in_flight import Answer, Listener, RequestInFlight, SampleInFlight
from megarl.rollout.sampling import check_request
from megarl.rollout.transformers.model import SamplingModel
from megarl.rollout.transformers.sampling import kept_log_probs, tokens_at
from megatron_ext.routing.routed_experts import Routing


@dataclass(eq=False, kw_only=True)
class _Row(SampleInFlight):
    """One sample, and its stream of random numbers."""

    random: np.random.Generator
    experts: list[npt.NDArray[np.int16]] = field(default_factory=list)
    """[layers, top-k] for each of its tokens but the last, as routed when the token was first fed; empty if not
    recorded.
    """


class _Batch:
    """Samples of one request, with the KV cache of all their tokens but the last."""

    def __init__(self, in_flight: RequestInFlight, request: Request, samples: Sequence[int]) -> None:
        self.in_flight = in_flight
        self.priority = request.priority
        self._prompt = request.prompt_of(samples[0])
        self._sampling = request.sampling
        self._begun = begun = len(request.begun_of(samples[0]))
        self._left = request.sampling.max_tokens - begun
        self.rows = [
            _Row(in_flight, sample, random=_stream(request.sampling.seed, sample, begun)) for sample in samples
        ]
        self._cache: DynamicCache | None = None
        # Experts of the prompt's tokens, shared by all samples.
        self._prompt_experts: Values = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def has_begun(self) -> bool:
        """Whether its samples have new tokens, and so a KV cache."""
        return bool(self.rows and self.rows[0].token_ids)

    def forget(self) -> None:
        """Drop the KV cache; the next step recomputes it."""
        self._cache = None

    def step(self, model: SamplingModel, version: int) -> None:
        """Sample one token per row with the weights of `version`, and finish the rows that end with it.

        Raises FloatingPointError if a log-prob is NaN.
        """
        log_probs = kept_log_probs(self._next_logits(model), self._sampling)
        if log_probs.isnan().any():
            raise FloatingPointError("the log-probabilities of a next token are no numbers: weights hold NaN or inf")
        tokens = self._draw(log_probs)
        chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
        ends = model.end_token_ids.union(self._sampling.stop_token_ids)
        kept = []
        for place, (row, token, log_prob) in enumerate(zip(self.rows, tokens.tolist(), chosen.tolist(), strict=True)):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)
            if self.in_flight.listener is not None:
                self.in_flight.listener([token])
            if token in ends:
                self._finish(row, "stop", model)
            elif len(row.token_ids) == self._left:
                self._finish(row, "length", model)
            else:
                kept.append(place)
        if len(kept) < len(self.rows):
            self.rows = [self.rows[place] for place in kept]
            if kept and self._cache is not None:
                self._cache.batch_select_indices(torch.tensor(kept, device=tokens.device))

    def abort(self, model: SamplingModel) -> None:
        """Finish all samples with the tokens that they have."""
        for row in self.rows:
            self._finish(row, "abort", model)
        self.rows = []

    def _next_logits(self, model: SamplingModel) -> Tensor:
        if self.rows[0].token_ids:
            if self._cache is not None:
                computed = model.compute([row.token_ids[-1:] for row in self.rows], self._cache)
            else:
                self._cache = model.empty_cache()
                computed = model.compute([self._prompt + row.token_ids for row in self.rows], self._cache)
            if computed.experts is not None:
                for row, experts in zip(self.rows, computed.experts, strict=True):
                    row.experts.append(experts[-1].copy())
            return computed.logits
        self._cache = model.empty_cache()
        computed = model.compute_prompt(self._prompt, self._begun, self._cache)
        self._cache.batch_repeat_interleave(len(self.rows))
        if computed.experts is not None and model.routing is not None:
            self._prompt_experts = (model.routing.records(computed.experts[0], len(self._prompt)),)
        return computed.logits.expand(len(self.rows), -1)

    def _draw(self, log_probs: Tensor) -> Tensor:
        if self._sampling.temperature == 0:
            return log_probs.argmax(-1)
        numbers = [row.random.random() for row in self.rows]
        return tokens_at(log_probs, torch.tensor(numbers, dtype=torch.float64, device=log_probs.device))

    def _finish(self, row: _Row, reason: FinishReason, model: SamplingModel) -> None:
        # An engine that continues an aborted response feeds all its tokens again, which gives their experts.
        experts = self._experts(row, model.routing) if model.routing is not None and reason != "abort" else ()
        prompt_ids = self.in_flight.prompt_of(row.sample)
        turn = Turn.of(prompt_ids, row.token_ids, row.log_probs, row.versions, reason, experts)
        self.in_flight.finish(row.sample, turn)

    def _experts(self, row: _Row, routing: Routing) -> Values:
        """Expert records of prompt and sampled tokens; the last token was never fed, so its record is empty."""
        nowhere = np.empty((0, routing.layers, routing.topk), dtype=np.int16)
        of_prompt = self._prompt_experts or (routing.records(nowhere, len(self._prompt)),)
        sampled = np.stack(row.experts) if row.experts else nowhere
        return *of_prompt, routing.records(sampled, len(row.token_ids))


def _stream(seed: int | None, sample: int, drawn: int) -> np.random.Generator:
    """The random stream of a sample, past the numbers `drawn` for the tokens that it has."""
    stream = np.random.default_rng(None if seed is None else (seed % 2**64, sample))
    stream.random(drawn)
    return stream


class Batches:
    """All requests in flight, as batches of at most `max_samples`, computed one after the other.

    A batch that has begun is finished first, so that only one has a KV cache; the others follow by priority.
    """

    def __init__(self, model: SamplingModel, max_samples: int) -> None:
        self._model = model
        self._max_samples = max_samples
        self._waiting: list[_Batch] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Answer]:
        """Add all `requests`, or none: raises UserError if one of them cannot be served."""
        for request in requests:
            check_request(request, self._model.max_tokens, self._model.vocabulary, "max_model_len")
        added = [RequestInFlight(request, listener) for request in requests]
        for in_flight, request in zip(added, requests, strict=True):
            samples = request.samples
            # Samples that already have tokens differ in length.
            together = 1 if request.begun else self._max_samples
            for start in range(0, len(samples), together):
                self._queue(_Batch(in_flight, request, samples[start : start + together]))
        return [in_flight.future for in_flight in added]

    def samples(self) -> Iterator[SampleInFlight]:
        """All unfinished samples."""
        return chain.from_iterable(batch.rows for batch in self._waiting)

    def step(self, version: int) -> None:
        """Advance the first batch by one token, sampled with the weights of `version`."""
        batch = self._waiting[0]
        batch.step(self._model, version)
        if not batch:
            del self._waiting[0]

    def counts(self) -> tuple[int, int]:
        """The number of samples in the next step's batch, and of samples that wait."""
        running, *waiting = [len(batch.rows) for batch in self._waiting] or [0]
        return running, sum(waiting)

    def forget(self) -> None:
        """Drop all KV caches."""
        for batch in self._waiting:
            batch.forget()

    def abort(self, answers: Collection[Future[list[Turn]]] | None = None) -> None:
        """Finish all samples, or those of the requests with these answers, with the tokens that they have."""
        batches, self._waiting = self._waiting, []
        for batch in batches:
            if answers is None or batch.in_flight.future in answers:
                batch.abort(self._model)
            else:
                self._waiting.append(batch)

    def fail(self, error: BaseException) -> None:
        """Fail all requests with `error`."""
        for in_flight in {batch.in_flight for batch in self._waiting}:
            in_flight.future.set_exception(error)
        self._waiting.clear()

    def _queue(self, batch: _Batch) -> None:
        """Insert a batch behind those of its priority and before those of higher ones, but never before a begun one."""
        begun = bool(self._waiting) and self._waiting[0].has_begun
        insort(self._waiting, batch, lo=int(begun), key=lambda each: each.priority)
