"""Checks of requests and sampling parameters that hold for every engine, and the seed of each sample."""

import hashlib

from converters.errors import UserError
from megarl.rollout.protocol import Request, SamplingParameters

COLDEST = 0.01
"""The lowest temperature that all engines sample with: they treat lower ones as this or as 0, which trainers do not."""


def check_sampling(sampling: SamplingParameters) -> None:
    """Raise UserError for values that define no distribution, and for zero samples."""
    if sampling.samples < 1:
        raise UserError(f"a request for {sampling.samples} samples: ask for one or more")
    for name, is_possible, wanted in (
        (
            "temperature",
            sampling.temperature == 0 or COLDEST <= sampling.temperature < float("inf"),
            f"0 to sample greedily, or {COLDEST} or more",
        ),
        ("top_p", 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", sampling.top_k == -1 or sampling.top_k > 0, "-1 for all tokens, or 1 or more"),
        ("max_tokens", sampling.max_tokens > 0, "1 or more"),
    ):
        if not is_possible:
            raise UserError(f"a request with {name}={getattr(sampling, name)}: give {wanted}")


def check_begun(request: Request) -> None:
    """Raise UserError for a request that continues samples which have ended, or which are not among those asked for."""
    unknown = [sample for sample in request.begun if not 0 <= sample < request.sampling.samples]
    if unknown:
        raise UserError(f"a request to continue sample {unknown[0]} of {request.sampling.samples}: they count from 0")
    longest = max(map(len, request.begun.values()), default=0)
    if longest >= request.sampling.max_tokens:
        raise UserError(
            f"a request to continue a sample of {longest} tokens, of {request.sampling.max_tokens} in all: it has ended"
        )


def check_request(request: Request, max_tokens: int, vocabulary: int, argument: str) -> None:
    """Raise UserError for a request that cannot be served.

    `max_tokens` limits a prompt and its response together; `argument` is the engine argument that sets it.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    check_sampling(sampling)
    check_begun(request)
    if not prompt:
        raise UserError("a prompt of 0 tokens: give it one or more")
    if len(prompt) + sampling.max_tokens > max_tokens:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones do not fit the engine's {max_tokens}:"
            f" raise rollout.engine_args.{argument} or lower rollout.max_response_tokens"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise UserError(f"a prompt with a token outside of the model's vocabulary of {vocabulary}")


def derive_seed(seed: int, sample: int) -> int:
    """Derive a seed in [0, 2^63) for one sample.

    It is hashed, as engines such as vLLM may let neighbouring seeds share random streams.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
