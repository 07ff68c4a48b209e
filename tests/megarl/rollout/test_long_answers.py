"""Long answers of an engine bring their text: their tokens stay where they are."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megarl.cluster.engines.progress_log import PartialSample
from megarl.data import Turn
from megarl.process.loading import load
from megarl.quickstart.tiny_models import END, make_tokenizer
from megarl.rollout import ENGINES
from megarl.rollout.kind import EngineKind
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import Answer

SHORT, LONG = 5, 3000
BEGUN = [token % 100 + 10 for token in range(200)]


def _answered(requests, listener=None):
    """As many tokens as the prompt says, the last of which is special."""
    end = make_tokenizer().convert_tokens_to_ids(END)
    answers = [Answer() for _ in requests]
    for answer, request in zip(answers, requests, strict=True):
        (length,) = request.prompt_token_ids
        token_ids = [*(token % 100 + 10 for token in range(length - 1)), end]
        answer.set_result([Turn.of([length], token_ids, [-1.0] * length, [7] * length, "stop")])
    return answers


@pytest.mark.parametrize("kind", ENGINES.values(), ids=list(ENGINES))
def test_a_long_answer_brings_its_text(kind: EngineKind, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    engine = load(*kind.engine_class)(tmp_path, {})
    engine._add = _answered  # it has sampled already
    requests = [Request([length], SamplingParameters()) for length in (SHORT, LONG)]
    requests.append(Request([SHORT], SamplingParameters(), begun={0: np.array(BEGUN, np.int32)}))
    engine.submit(dict(enumerate(requests)))
    events = chain.from_iterable(engine.events())
    answers = {event.number: event.answer for event in (next(events) for _ in requests)}
    expected = engine.generate(requests)
    assert [[answers[place]] == [turns] for place, turns in enumerate(expected)] == [True] * 3
    (short,), (long,), (went_on,) = (answers[place] for place in range(3))
    assert short.text is None
    assert long.text == tokenizer.decode(expected[1][0].token_ids.tolist(), skip_special_tokens=True)
    assert long.text
    assert END not in long.text
    # Whoever has the beginning does not read it again.
    assert went_on.text == tokenizer.decode(BEGUN + went_on.token_ids.tolist(), skip_special_tokens=True)
    begun = PartialSample(np.array(BEGUN), -np.ones(len(BEGUN)), np.zeros(len(BEGUN)))
    prompt = replace(went_on, prompt_ids=np.array([SHORT, *BEGUN], np.int32))
    assert begun.ended_by(prompt).text == went_on.text
