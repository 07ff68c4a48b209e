"""News of unfinished requests: every token once, of those that were submitted, and none too long to travel."""

import pytest

from megarl.cluster.engines.progress_log import ProgressLog
from megarl.data import Turn
from megarl.data.stretches import is_long
from megarl.process.loading import load
from megarl.rollout import ENGINES, progress_reporter
from megarl.rollout.progress_reporter import ProgressReporter
from megarl.rollout.protocol import Request, SamplesEnded, SamplingParameters
from megarl.rollout.request_in_flight import Answer, RequestInFlight, SampleInFlight


def sampled(request: RequestInFlight, sample: int, tokens: range) -> SampleInFlight:
    return SampleInFlight(request, sample, [*tokens], [-1.0] * len(tokens), [3] * len(tokens))


def test_new_tokens_are_told_of_once_and_in_pieces() -> None:
    submitted, own = (RequestInFlight(Request([5], SamplingParameters(samples=2))) for _ in range(2))
    teller, partials = ProgressReporter(), ProgressLog()
    teller.begin(7, submitted.future)
    samples = [sampled(submitted, 0, range(30_000)), sampled(submitted, 1, range(5)), sampled(own, 0, range(9))]
    pieces = list(teller.of(samples))
    samples[1].token_ids.append(99)
    samples[1].log_probs.append(-2.0)
    samples[1].versions.append(4)
    pieces += teller.of(samples)
    assert [each.lengths.tolist() for each in pieces] == [[30_000], [5], [1]]
    for each in pieces:
        partials.add(each)
    found = partials.of([7])[7]
    assert [found[sample].token_ids.tolist() for sample in (0, 1)] == [[*range(30_000)], [*range(5), 99]]
    assert found[1].versions.tolist() == [3] * 5 + [4]
    assert list(teller.of(samples)) == []


def test_no_piece_of_samples_that_advance_together_is_long() -> None:
    requests = [RequestInFlight(Request([5], SamplingParameters())) for _ in range(4096)]
    teller = ProgressReporter()
    for number, request in enumerate(requests):
        teller.begin(number, request.future)
    pieces = list(teller.of([sampled(request, 0, range(64)) for request in requests]))
    assert sum(len(each.token_ids) for each in pieces) == 4096 * 64
    assert not any(is_long(each.token_ids) or is_long(each.numbers) for each in pieces)


def test_samples_that_have_ended_are_told_of_together_with_the_next_news() -> None:
    requests = [RequestInFlight(Request([5], SamplingParameters(samples=3))) for _ in range(2)]
    teller = ProgressReporter()
    for number, request in enumerate(requests, start=7):
        teller.begin(number, request.future)
        request.finish(0, Turn.of([5], [9], [-1.0], [3], "stop"))
    requests[0].finish(2, Turn.of([5], [9], [-1.0], [3], "stop"))
    ended, news = teller.of([sampled(requests[0], 1, range(4))])
    assert ended == SamplesEnded([7, 8, 7])
    assert news.lengths.tolist() == [4]
    assert list(teller.of([])) == []


def test_it_is_due_after_so_many_steps_or_seconds_and_only_where_something_was_submitted(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress_reporter.time, "monotonic", lambda: now)
    teller, answer = ProgressReporter(), Answer()
    assert not teller.is_due()
    teller.begin(1, answer)
    assert teller.is_due()
    assert list(teller.of([])) == []
    assert [teller.is_due() for _ in range(64)] == [False] * 63 + [True]
    assert list(teller.of([])) == []
    assert not teller.is_due()
    now += 0.051
    assert teller.is_due()
    # Where one reader hears many engines each tells less often.
    teller.engines = 128
    assert list(teller.of([])) == []
    now += 0.639
    assert not teller.is_due()
    now += 0.002
    assert teller.is_due()
    assert list(teller.of([])) == []
    assert sum(not teller.is_due() for _ in range(64 * 12)) == 64 * 12
    assert teller.answers([1, 2]) == {answer}
    answer.set_result([])
    assert teller.answers([1]) == set()
    assert not teller.is_due()


@pytest.mark.parametrize("kind", ENGINES.values(), ids=list(ENGINES))
def test_an_engine_knows_how_many_its_reader_hears(kind, tmp_path) -> None:
    engine = load(*kind.engine_class)(tmp_path, {})
    engine._outbox.put(SamplesEnded([7]))
    assert next(engine.events(128)) == [SamplesEnded([7])]
    assert engine._reporter.engines == 128
