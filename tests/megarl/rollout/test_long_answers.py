"""Long answers of an engine bring their text: their tokens stay where they are."""

from concurrent.futures import Future
from itertools import chain
from pathlib import Path

import pytest

from megarl.data import Turn
from megarl.process.loading import load
from megarl.quickstart.tiny_models import END, make_tokenizer
from megarl.rollout import ENGINES
from megarl.rollout.kind import EngineKind
from megarl.rollout.protocol import Request, SamplingParameters

SHORT, LONG = 5, 3000


def _answered(requests, listener=None):
    """As many tokens as the prompt says, the last of which is special."""
    end = make_tokenizer().convert_tokens_to_ids(END)
    answers = [Future() for _ in requests]
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
    engine.submit(dict(enumerate(requests)))
    events = chain.from_iterable(engine.events())
    answers = {event.number: event.answer for event in (next(events), next(events))}
    expected = engine.generate(requests)
    assert [[answers[place]] == [turns] for place, turns in enumerate(expected)] == [True, True]
    ((short,), (long,)) = answers[0], answers[1]
    assert short.text is None
    assert long.text == tokenizer.decode(expected[1][0].token_ids.tolist(), skip_special_tokens=True)
    assert long.text
    assert END not in long.text
