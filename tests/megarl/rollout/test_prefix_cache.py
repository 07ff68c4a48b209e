"""Tokens of a prompt that an engine had computed before, as the turn tells."""

import pytest

from megarl.rollout.protocol import Request, SamplingParameters

SHORT = [5 + place % 50 for place in range(40)]
"""A prompt of more than the 32 tokens that vLLM keeps together on a CPU."""


@pytest.mark.parametrize("kind", ["vllm"])
def test_the_beginning_of_a_short_prompt_is_computed_once_and_so_is_a_turn_before(served, endless_prompt) -> None:
    served.update(served.first, served.engine.version() + 1)
    turns = served.engine.generate([Request(SHORT, SamplingParameters(samples=3, max_tokens=4))])[0]
    assert [turn.cached_tokens for turn in turns] == [0, 32, 32]
    first = Request(endless_prompt, SamplingParameters(temperature=0, max_tokens=40))
    ((turn,),) = served.engine.generate([first])
    assert (turn.cached_tokens, len(turn.token_ids)) == (0, 40)
    further = [*endless_prompt, *turn.token_ids.tolist(), 9, 9]
    ((later,),) = served.engine.generate([Request(further, SamplingParameters(max_tokens=4))])
    assert later.cached_tokens == 32


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_requests_share_what_is_computed_with_those_of_their_salt_alone(served) -> None:
    served.update(served.first, served.engine.version() + 1)

    def cached(salt: str) -> int:
        ((turn,),) = served.engine.generate([Request(SHORT, SamplingParameters(max_tokens=4), cache_salt=salt)])
        return turn.cached_tokens

    assert cached("") == 0
    kept = cached("")
    assert kept >= 32
    assert [cached("evaluation"), cached("evaluation"), cached("another"), cached("")] == [0, kept, 0, kept]


@pytest.mark.parametrize("kind", ["transformers"])
def test_an_engine_without_such_a_cache_says_nothing(served) -> None:
    ((turn,),) = served.engine.generate([Request(SHORT, SamplingParameters(max_tokens=4))])
    assert turn.cached_tokens is None
