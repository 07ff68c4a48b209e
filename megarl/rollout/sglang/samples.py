"""From requests to what SGLang's server is asked, and from its answers to turns."""

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converters.errors import UserError
from megarl.data import FinishReason, Turn
from megarl.data.stretches import Values
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sampling import check_begun, check_sampling, derive_seed

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
ADAPTER = "trained"
"""The name of the adapter in the slot of a server that has one."""


@dataclass(frozen=True)
class Limits:
    """Sizes of the served model, of its routing if the server tells of it, and whether it is adapted."""

    tokens: int
    """Tokens that a prompt and its response may have together."""
    vocabulary: int
    returned: ReturnedExperts | None = None
    adapted: bool = False


def check(request: Request, limits: Limits) -> None:
    """Raise UserError for a request that cannot be served."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    check_sampling(sampling)
    check_begun(request)
    if not prompt:
        raise UserError("a prompt of 0 tokens: give it one or more")
    if len(prompt) + sampling.max_tokens > limits.tokens:
        # The server would cut the response short without saying so.
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones do not fit the engine's"
            f" {limits.tokens}: raise rollout.engine_args.context_length or lower rollout.max_response_tokens"
        )
    if not 0 <= min(prompt) <= max(prompt) < limits.vocabulary:
        raise UserError(f"a prompt with a token outside of the model's vocabulary of {limits.vocabulary}")


def question(request: Request, limits: Limits, *, stream: bool) -> dict[str, Any]:
    """The body of a call of /generate that samples a request: one entry for each sample, or one alone in a stream."""
    sampling = request.sampling
    # The log-probs of an answer are those before top-p and top-k; after them they come with the tokens that are kept.
    is_cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
    shared = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k, limits.vocabulary) if sampling.top_k > 0 or not is_cut else limits.vocabulary,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    # Of a sample that was cut the random numbers go on: they follow from the seed and a token's place.
    each = [
        {**shared, "max_new_tokens": _most(request, sample), "sampling_seed": _seed(sampling, sample)}
        for sample in request.samples
    ]
    body: dict[str, Any] = {
        "input_ids": [request.prompt_of(sample) for sample in request.samples],
        "sampling_params": each,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": stream,
        "return_sampling_mask": is_cut,
        "return_routed_experts": limits.returned is not None,
        "priority": request.priority,
        "lora_path": ADAPTER if limits.adapted else None,
    }
    return {**body, "input_ids": body["input_ids"][0], "sampling_params": each[0]} if stream else body


def turns(request: Request, answer: Any, prompt_ids: Any, limits: Limits) -> list[Turn]:
    """The samples that the server answered a request with.

    Raises FloatingPointError where a log-probability is no number, RuntimeError where an answer breaks the rules.
    """
    answers = answer if isinstance(answer, list) else [answer]
    if len(answers) != len(request.samples):
        raise RuntimeError(f"SGLang gave {len(answers)} samples and was asked for {len(request.samples)}")
    return [
        _turn(request, sample, each, _before(request, sample, prompt_ids), limits)
        for sample, each in zip(request.samples, answers, strict=True)
    ]


def aborted(request: Request, prompt_ids: Any, limits: Limits) -> list[Turn]:
    """The samples of a request that the server was never asked for."""
    before = [_before(request, sample, prompt_ids) for sample in request.samples]
    if limits.returned is None:
        return [Turn.of(each, [], [], [], "abort") for each in before]
    records = limits.returned.records
    return [Turn.of(each, [], [], [], "abort", records([], len(each))) for each in before]


def _most(request: Request, sample: int) -> int:
    return request.sampling.max_tokens - len(request.begun_of(sample))


def _before(request: Request, sample: int, prompt_ids: Any) -> Any:
    """All tokens before what is sampled; `prompt_ids`, which samples share, where there is nothing else."""
    begun = request.begun_of(sample)
    return np.concatenate([prompt_ids, np.array(begun, dtype=np.int32)]) if begun else prompt_ids


def _turn(request: Request, sample: int, answer: Mapping[str, Any], prompt_ids: Any, limits: Limits) -> Turn:
    about = answer["meta_info"]
    reason = about["finish_reason"]["type"]
    if reason not in _FINISH_REASONS:
        raise RuntimeError(f"SGLang ended a sample for the reason {about['finish_reason']}")
    token_ids: list[int] = answer["output_ids"]
    log_probs = _log_probs(about)
    if len(log_probs) != len(token_ids):
        raise RuntimeError(f"SGLang gave {len(token_ids)} tokens and {len(log_probs)} log-probabilities")
    values = np.array(log_probs, dtype=np.float32)
    if not np.isfinite(values).all():
        raise FloatingPointError("SGLang gave log-probabilities that are no numbers; the weights hold NaN or inf")
    if reason == "length" and len(token_ids) != _most(request, sample):
        raise RuntimeError(f"SGLang cut a sample after {len(token_ids)} tokens of {_most(request, sample)}")
    experts = () if limits.returned is None else _experts(about, len(prompt_ids) + len(token_ids), limits.returned)
    versions, end = _versions(about, len(token_ids)), _FINISH_REASONS[reason]
    return Turn.of(prompt_ids, token_ids, values, versions, end, experts, about.get("cached_tokens"))


def _experts(about: Mapping[str, Any], tokens: int, returned: ReturnedExperts) -> Values:
    """Records of a prompt and its response. The server tells of all that was fed, not of what ended as it waited."""
    if "routed_experts" not in about:
        if about["finish_reason"]["type"] != "abort":
            raise RuntimeError("SGLang was asked for the experts of its tokens and gave none")
        return returned.records([], tokens)
    rows = np.frombuffer(base64.b64decode(about["routed_experts"]), dtype=np.int32)
    return returned.records([rows.reshape(-1, returned.all_layers, returned.routing.topk)], tokens)


def _log_probs(about: Mapping[str, Any]) -> Sequence[float | None]:
    """Log-probs under the distribution that was sampled from; None stands for what JSON has no word for."""
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
    """A seed in [0, 2^63) for one sample; one at random where the request has none."""
    if sampling.seed is None:
        return secrets.randbits(63)
    return derive_seed(sampling.seed, sample)
