"""Sequences in flight: converts requests to vLLM's core requests, and the core's outputs to turns."""

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from converters.errors import UserError
from megarl.data import FinishReason, Turn
from megarl.data.stretches import Values
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import Answer, Listener, RequestInFlight, SampleInFlight
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sampling import check_request, derive_seed
from megarl.rollout.vllm.core import Core, SampleOutput, SampleRequest
from megarl.rollout.vllm.cpu.corrections import DRAWN


@dataclass(eq=False, kw_only=True)
class _SequenceInFlight(SampleInFlight):
    asked: SampleRequest
    experts: list[Any] = field(default_factory=list)
    """Rows of experts that vLLM returned for fed tokens; empty if it returns none."""
    cached_tokens: int | None = None
    """Prompt tokens that the core found in its prefix cache at the start."""

    def finish(self, reason: FinishReason, returned: ReturnedExperts | None) -> None:
        prompt_ids = self.request.prompt_of(self.sample)
        experts: Values = ()
        # An engine that continues an aborted response feeds all its tokens again, which gives their experts.
        if returned is not None and reason != "abort":
            experts = returned.records(self.experts, len(prompt_ids) + len(self.token_ids))
        tokens = self.token_ids, self.log_probs, self.versions
        turn = Turn.of(prompt_ids, *tokens, reason, experts, self.cached_tokens)
        self.request.finish(self.sample, turn)


class SequencesInFlight:
    """All sequences in the core, by its request ID; a prompt and a response together have at most `max_tokens`.

    With `returned` the core returns experts, which turns then include. With `adapted` all sequences use the adapter in
    the core's slot.
    """

    def __init__(
        self,
        core: Core,
        max_tokens: int,
        vocabulary: int,
        returned: ReturnedExperts | None = None,
        *,
        adapted: bool = False,
    ) -> None:
        self._core, self._returned, self._adapted = core, returned, adapted
        self._tasks = core.supported_tasks()
        self._max_tokens, self._vocabulary = max_tokens, vocabulary
        self._ids = itertools.count()
        self._sequences: dict[str, _SequenceInFlight] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def add(self, requests: Sequence[Request], version: int, listener: Listener | None = None) -> list[Answer]:
        """Pass all samples of `requests` to the core, or none: raises UserError if one request cannot be served.

        They share cached prefixes with sequences of the same salt and the same `version` of the weights.
        """
        prepared = [self._core_requests(request) for request in requests]
        added = [RequestInFlight(request, listener) for request in requests]
        for in_flight, request, asked in zip(added, requests, prepared, strict=True):
            places = zip(request.samples, asked, strict=True)
            samples = [_SequenceInFlight(in_flight, sample, asked=each) for sample, each in places]
            self._core.add([self._named(each, version) for each in samples], request.conversation)
        return [in_flight.future for in_flight in added]

    def all(self) -> Iterable[SampleInFlight]:
        """All unfinished samples."""
        return self._sequences.values()

    def begin_anew(self, version: int) -> None:
        """Restart sequences without a token under `version`, so that they use no cached prefixes of older weights."""
        unbegun = {name: sequence for name, sequence in self._sequences.items() if not sequence.token_ids}
        self._core.abort(list(unbegun))
        for name in unbegun:
            del self._sequences[name]
        for _, siblings in itertools.groupby(unbegun.values(), key=lambda sequence: id(sequence.request)):
            of_one = list(siblings)
            named = [self._named(sequence, version) for sequence in of_one]
            self._core.add(named, of_one[0].request.conversation)

    def collect(self, outputs: Sequence[SampleOutput], version: int) -> None:
        """Add the core's new tokens, sampled with `version`, to their sequences."""
        for output in outputs:
            sequence = self._sequences[output.request_id]
            if output.prefill_stats is not None:
                sequence.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.new_token_ids:
                log_probs = output.new_logprobs.logprobs[:, 0].tolist()
                if not all(map(math.isfinite, log_probs)):
                    raise FloatingPointError(
                        f"vLLM gave the log-probabilities {log_probs}; the weights hold NaN or inf"
                    )
                sequence.token_ids += output.new_token_ids
                sequence.log_probs += log_probs
                sequence.versions += [version] * len(output.new_token_ids)
                if sequence.request.listener is not None:
                    sequence.request.listener(output.new_token_ids)
            if output.routed_experts is not None:
                # Copied because in vLLM 0.32 they are views of the whole step's rows, in pinned memory.
                sequence.experts.append(output.routed_experts.copy())
            if output.finish_reason is not None:
                del self._sequences[output.request_id]
                sequence.finish(finish_reason(str(output.finish_reason)), self._returned)

    def abort(self, answers: Collection[Future[list[Turn]]] | None = None) -> None:
        """Finish all sequences, or those of the requests with these answers, with the tokens that they have."""
        chosen = [name for name, each in self._sequences.items() if answers is None or each.request.future in answers]
        self._core.abort(chosen)
        for name in chosen:
            self._sequences.pop(name).finish("abort", self._returned)

    def fail(self, error: BaseException) -> None:
        """Fail all requests with `error`."""
        for request in {sequence.request for sequence in self._sequences.values()}:
            request.future.set_exception(error)
        self._sequences = {}

    def _named(self, sequence: _SequenceInFlight, version: int) -> SampleRequest:
        """The core's request, under a unique ID, with a salt that keeps it from cached prefixes of other versions."""
        asked = sequence.asked = copy.copy(sequence.asked)
        asked.request_id = asked.external_req_id = str(next(self._ids))
        asked.cache_salt = f"{version} {sequence.request.cache_salt}"
        self._sequences[asked.request_id] = sequence
        return asked

    def _core_requests(self, request: Request) -> list[SampleRequest]:
        """Make a core request per sample. Raises UserError for a request that cannot be served."""
        check_request(request, self._max_tokens, self._vocabulary, "max_model_len")
        shared = None if request.begun else self._core_request(request, 0)
        samples = []
        for sample in request.samples:
            asked = copy.copy(shared) if shared is not None else self._core_request(request, sample)
            asked.sampling_params = _of_sample(asked.sampling_params, request, sample)
            samples.append(asked)
        return samples

    def _core_request(self, request: Request, sample: int) -> SampleRequest:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input

        from megarl.rollout.vllm.adapter_slot import lora_request

        prompt, sampling = request.prompt_token_ids, request.sampling
        try:
            return self._core.processor.process_inputs(
                "",
                tokens_input(request.prompt_of(sample)),
                _sampling_params(sampling),
                supported_tasks=self._tasks,
                lora_request=lora_request() if self._adapted else None,
                priority=request.priority,
            )
        except (ValueError, VLLMValidationError) as error:
            raise UserError(f"vLLM refuses a prompt of {len(prompt)} tokens with {sampling}: {error}") from error


_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    # Cut off by vLLM's repetition detector, if engine_args enable it; not an end that the policy chose.
    "repetition": "length",
}


def finish_reason(of_vllm: str) -> FinishReason:
    """Translate vLLM's finish reason. Raises RuntimeError if vLLM failed."""
    if of_vllm not in _FINISH_REASONS:
        raise RuntimeError(f"vLLM ended a response with {of_vllm}: the end of the engine's log says why")
    return _FINISH_REASONS[of_vllm]


def _sampling_params(sampling: SamplingParameters) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _of_sample(params: Any, request: Request, sample: int) -> Any:
    params, sampling, begun = copy.copy(params), request.sampling, len(request.begun_of(sample))
    if sampling.seed is not None and sampling.temperature > 0:
        params.seed = derive_seed(sampling.seed, sample)
    if begun:
        params.max_tokens = sampling.max_tokens - begun
        # On a GPU random numbers derive from a token's position; on a CPU they are a stream (`cpu`).
        params.extra_args = {DRAWN: begun}
    return params
