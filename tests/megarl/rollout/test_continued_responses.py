"""Responses that one engine began and another ends: told of while they are sampled, and as if they were never cut."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from engine_host import PROMPTS
from told_events import progress_behind_ends

from converters.errors import UserError
from megarl.cluster.engines.progress_log import ProgressLog
from megarl.rollout.protocol import Progress, Request, RequestEnded, SamplingParameters

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
pytestmark = pytest.mark.parametrize("kind", ["vllm", SGLANG, "stand-in", "transformers"])

SAMPLING = SamplingParameters(samples=3, max_tokens=24, seed=11, top_p=0.95)


def test_a_continued_response_is_the_one_that_was_cut(served):
    requests = [Request(prompt, SAMPLING) for prompt in PROMPTS]
    whole = served.engine.generate(requests)
    assert max(len(turn.token_ids) for turns in whole for turn in turns) == 24
    for cut in (1, 7, 23):
        # The samples of a request are cut at different places, and some not at all.
        cuts = [[min(cut * sample, len(turn.token_ids) - 1) for sample, turn in enumerate(turns)] for turns in whole]
        begun = [
            replace(request, begun={place: turn.token_ids[: ends[place]].tolist() for place, turn in enumerate(turns)})
            for request, turns, ends in zip(requests, whole, cuts, strict=True)
        ]
        for turns, ends, rest in zip(whole, cuts, served.engine.generate(begun), strict=True):
            for turn, end, continued in zip(turns, ends, rest, strict=True):
                assert continued.prompt_ids.tolist() == turn.prompt_ids.tolist() + turn.token_ids[:end].tolist()
                assert continued.token_ids.tolist() == turn.token_ids[end:].tolist()
                assert np.allclose(continued.log_probs, turn.log_probs[end:], atol=1e-5)
                assert continued.finish_reason == turn.finish_reason


def test_what_has_ended_is_not_continued(served):
    request = Request(PROMPTS[0], SAMPLING, begun={0: [5], 2: [5] * 24})
    with pytest.raises(UserError, match="continue a sample of 24 tokens, of 24 in all: it has ended"):
        served.engine.generate([request])
    with pytest.raises(UserError, match="continue sample 3 of 3: they count from 0"):
        served.engine.generate([replace(request, begun={3: [5]})])


def test_tokens_are_told_of_while_a_response_is_sampled(served, endless_prompt):
    sampling = SamplingParameters(samples=2, temperature=0, max_tokens=150)
    served.engine.submit({3: Request(endless_prompt, sampling)})
    partials, pieces = ProgressLog(), 0
    for event in chain.from_iterable(served.engine.events()):
        if isinstance(event, RequestEnded):
            break
        if isinstance(event, Progress):
            partials.add(event)
            pieces += 1
    assert pieces > 1
    told = partials.of([3])[3]
    assert sorted(told) == [0, 1]
    for sample, turn in enumerate(event.answer):
        length = len(told[sample].token_ids)
        # All but those of the last moment.
        assert 0 < length < 150
        assert told[sample].token_ids.tolist() == turn.token_ids[:length].tolist()
        assert told[sample].log_probs.tolist() == turn.log_probs[:length].tolist()
        assert set(told[sample].versions.tolist()) == {served.engine.version()}


def test_each_sample_that_ends_is_told_of_while_others_of_its_request_go_on(served, endless_prompt):
    sampling = SamplingParameters(samples=3, temperature=0, max_tokens=150)
    ((whole, *_),) = served.engine.generate([Request(endless_prompt, sampling)])
    begun = {0: whole.token_ids[:149].tolist(), 1: whole.token_ids[:140].tolist(), 2: []}
    served.engine.submit({4: Request(endless_prompt, sampling, begun=begun)})
    # The last one is told of afterwards, too.
    news = progress_behind_ends(served.engine, 4, 2)
    assert news
    assert all(each.samples.tolist() == [2] for each in news)


def test_requests_are_aborted_by_number_and_others_go_on(served, endless_prompt):
    sampling = SamplingParameters(temperature=0, max_tokens=120)
    served.engine.submit({number: Request(endless_prompt, sampling) for number in (5, 6, 7)})
    events = chain.from_iterable(served.engine.events())
    # Until something is told of.
    while isinstance(next(events), RequestEnded):
        pass
    served.engine.abort([6, 7, 99])
    answers = {}
    while len(answers) < 3:
        if isinstance(event := next(events), RequestEnded):
            answers[event.number] = event.answer[0]
    assert [answers[number].finish_reason for number in (5, 6, 7)] == ["length", "abort", "abort"]
    whole = answers[5].token_ids.tolist()
    assert len(whole) == 120
    for number in (6, 7):
        cut = answers[number].token_ids.tolist()
        assert cut == whole[: len(cut)]
        assert len(cut) < 120
