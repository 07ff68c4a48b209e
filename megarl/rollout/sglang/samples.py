"""Converts requests to calls of SGLang's server, and its answers to turns."""

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import isfinite
from typing import Any, cast

import numpy as np

from megarl.data import FinishReason, Turn
from megarl.data.stretches import Values
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import SampleInFlight
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sampling import derive_seed
from megarl.rollout.sglang.client import CallRefusedError

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NEUTRAL: Mapping[str, Any] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "custom_params": None,
    "watermark": {"enabled": False},
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag")),
    "n": 1,
    "beam_width": None,
    "min_new_tokens": 0,
    "ignore_eos": False,
    **dict.fromkeys(("stop", "stop_regex")),
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
"""Sampling parameters of SGLang 0.5.23 that megarl does not use, with their neutral values.

They are sent explicitly, because the server fills omitted ones from its own defaults.
"""
ADAPTER = "trained"
"""The name of the adapter in the slot of a server that has one."""


@dataclass(frozen=True)
class Limits:
    """Sizes of the served model, of its routing if the server returns experts, and whether it has an adapter."""

    tokens: int
    """Most tokens of a prompt and its response together."""
    vocabulary: int
    returned: ReturnedExperts | None = None
    adapted: bool = False


def question(request: Request, limits: Limits, *, interval: int) -> dict[str, Any]:
    """The body of a /generate call for a request, which reports on each sample every `interval` tokens."""
    sampling = request.sampling
    # An answer's normal log-probs are from before top-p and top-k; those after them come with the mask of kept tokens.
    is_cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
    shared = {
        **NEUTRAL,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k, limits.vocabulary) if sampling.top_k > 0 or not is_cut else limits.vocabulary,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stream_interval": interval,
    }
    # A continued sample's random numbers continue, too: they derive from the seed and the token's position.
    each = [
        {**shared, "max_new_tokens": _most(request, sample), "sampling_seed": _seed(sampling, sample)}
        for sample in request.samples
    ]
    return {
        "input_ids": [request.prompt_of(sample) for sample in request.samples],
        "sampling_params": each,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
        "return_sampling_mask": is_cut,
        "return_routed_experts": limits.returned is not None,
        "priority": request.priority,
        "cache_salt": request.cache_salt or None,
        "lora_path": ADAPTER if limits.adapted else None,
    }


def hear(sample: SampleInFlight, answer: Mapping[str, Any]) -> list[int]:
    """Add the new tokens of an answer to its sample, and return them.

    Raises FloatingPointError if a log-prob is NaN, CallRefusedError if the server refuses the sample, and RuntimeError
    if an answer violates the protocol.
    """
    _check_taken(answer["meta_info"]["finish_reason"])
    about, heard = answer["meta_info"], len(sample.token_ids)
    # A sample aborted while waiting repeats its last token, and all log-probs, after the new ones.
    total = about["completion_tokens"]
    token_ids: list[int] = answer["output_ids"][: total - heard]
    log_probs = _log_probs(about)[: total - heard]
    if not heard + len(token_ids) == heard + len(log_probs) == total:
        raise RuntimeError(
            f"SGLang told of {total} tokens, after {heard} of {len(token_ids)} with {len(log_probs)} log-probabilities"
        )
    if not all(each is not None and isfinite(each) for each in log_probs):
        raise FloatingPointError("SGLang gave log-probabilities that are no numbers; the weights hold NaN or inf")
    sample.token_ids += token_ids
    sample.log_probs += cast(Sequence[float], log_probs)
    sample.versions += _versions(about, total)[heard:]
    return token_ids


def ended(request: Request, sample: SampleInFlight, about: Mapping[str, Any], limits: Limits) -> Turn | None:
    """The turn of a sample, if its last answer's metadata `about` says that it has ended. Raises as `hear`."""
    if about["finish_reason"] is None:
        return None
    reason = about["finish_reason"]["type"]
    if reason not in _FINISH_REASONS:
        raise RuntimeError(f"SGLang ended a sample for the reason {about['finish_reason']}")
    tokens = len(sample.token_ids)
    if reason == "length" and tokens != _most(request, sample.sample):
        raise RuntimeError(f"SGLang cut a sample after {tokens} tokens of {_most(request, sample.sample)}")
    before = sample.request.prompt_of(sample.sample)
    experts: Values = ()
    # An engine that continues an aborted response feeds all its tokens again, which gives their experts.
    if limits.returned is not None and reason != "abort":
        experts = _experts(about, len(before) + tokens, limits.returned)
    return _turn(sample, _FINISH_REASONS[reason], experts, about.get("cached_tokens"))


def aborted(sample: SampleInFlight) -> Turn:
    """The turn of an aborted sample, with the tokens reported so far."""
    return _turn(sample, "abort", (), None)


def _check_taken(end: Mapping[str, Any] | None) -> None:
    """Raise if the server itself ended the sample: it calls that an abort, too, but a requested abort has no status."""
    if end is None or (status := end.get("status_code")) is None:
        return
    if status == HTTPStatus.BAD_REQUEST:
        raise CallRefusedError(end["message"])
    raise RuntimeError(f"SGLang gave a sample up: {end['message']} ({status})")


def _turn(sample: SampleInFlight, end: FinishReason, experts: Values, cached: int | None) -> Turn:
    values = np.array(sample.log_probs, dtype=np.float32)
    before = sample.request.prompt_of(sample.sample)
    return Turn.of(before, sample.token_ids, values, sample.versions, end, experts, cached)


def _most(request: Request, sample: int) -> int:
    return request.sampling.max_tokens - len(request.begun_of(sample))


def _experts(about: Mapping[str, Any], tokens: int, returned: ReturnedExperts) -> Values:
    """The expert records of a prompt and its response, from the rows of all fed tokens."""
    if "routed_experts" not in about:
        raise RuntimeError("SGLang was asked for the experts of its tokens and gave none")
    rows = np.frombuffer(base64.b64decode(about["routed_experts"]), dtype=np.int32)
    return returned.records([rows.reshape(-1, returned.all_layers, returned.routing.topk)], tokens)


def _log_probs(about: Mapping[str, Any]) -> Sequence[float | None]:
    """Log-probs under the sampled distribution; None stands for NaN and infinity, which JSON lacks."""
    if "output_token_sampling_logprobs" in about:
        return about["output_token_sampling_logprobs"]
    return [entry[0] for entry in about.get("output_token_logprobs", ())]


def _versions(about: Mapping[str, Any], tokens: int) -> list[int]:
    versions: list[int] = []
    for span in about.get("weight_versions", ()):
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != tokens:
        raise RuntimeError(f"SGLang gave {tokens} tokens and the versions of {len(versions)}")
    return versions


def _seed(sampling: SamplingParameters, sample: int) -> int:
    """A seed in [0, 2^63) for one sample; random if the request has none."""
    if sampling.seed is None:
        return secrets.randbits(63)
    return derive_seed(sampling.seed, sample)
