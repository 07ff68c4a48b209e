"""Scoring during the rollout: samples are scored as they arrive, so that few are left to score at its end."""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count, groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megarl.rewards.event_loop import EventLoop
from megarl.rewards.registry import calling_of
from megarl.rewards.runners import InLoop, InProcess, Runner, TimeLeft
from megarl.rewards.scoring import (
    RewardFailed,
    RewardLost,
    RewardTimedOut,
    Score,
    WeightedSumFailed,
    as_score,
)
from megarl.rewards.terms import Question, Term, check_data_source, check_ground_truths, combine, terms_of
from megarl.rewards.worker import Answered, WorkerPool

if TYPE_CHECKING:
    from megarl.schema import RewardConfig

Outcome = Score | RewardFailed
"""Result of scoring a sample."""
Samples = Mapping[Hashable, Mapping[str, Any]]
"""Key of a sample -> its `reward_arguments`."""

_CLOSE_WAIT_S = 10.0


class Scorer:
    """Scores samples while others are still being generated; one per run, a context manager.

    Plain functions run in `config.workers` separate processes, which are killed at the timeout and restarted, so that
    no response can hang or end the run. Async functions run in an event loop, for `config.async_samples` samples at a
    time. If any function is a user's, the first process starts at once and loads it, so that a file that fails, hangs
    or exits does so in there; the others start when samples need them.

    Raises `UserError` as `terms_of` and `load_reward`.
    """

    def __init__(self, config: "RewardConfig") -> None:
        self.config = config
        self._terms = terms_of(config)
        self._pool = WorkerPool([term.source for term in self._terms])
        self._loop = EventLoop("scorer")
        self._functions_loop = EventLoop("async rewards")
        try:
            self._runners = self._make_runners()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; samples that are not scored yet are abandoned."""
        self._loop.begin(self._pool.close()).result(_CLOSE_WAIT_S)
        self._loop.close(_CLOSE_WAIT_S)
        self._functions_loop.close(_CLOSE_WAIT_S)

    def start_noting(self) -> None:
        """Start recording when which process answers."""
        self._pool.answered = []

    def stop_noting(self) -> list[Answered]:
        """Stop recording, and return the answers since `start_noting`."""
        answered, self._pool.answered = self._pool.answered, None
        return answered or []

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Raise `UserError` for the first data_source that no term covers."""
        for data_source in data_sources:
            check_data_source(self._terms, data_source)

    def check_questions(self, questions: Iterable[Question]) -> None:
        """Raise `UserError` for the first question that no term covers, or whose ground truth a term would not accept.

        Ground truths are those of built-in rewards, and are checked only with `reward.on_error=stop`.
        """
        questions = list(questions)
        self.check_data_sources({question.data_source for question in questions})
        if self.config.on_error == "stop":
            check_ground_truths(self._terms, questions)

    def begin(self) -> "PendingScores":
        """Return a new set of pending scores, to add samples to."""
        return PendingScores(self)

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Score samples, `reward_arguments` each, and wait for them. Raises as `PendingScores.finish`."""
        pending = self.begin()
        pending.add(dict(enumerate(samples)))
        return list(pending.finish().values())

    def submit(self, samples: Samples, pending: "PendingScores") -> "Future[dict[Hashable, Outcome | None]]":
        """Begin scoring samples. Raises `UserError` if no term covers the data_source of one."""
        self.check_data_sources(arguments["data_source"] for arguments in samples.values())
        return self._loop.begin(self._score_all(samples, pending))

    async def _score_all(self, samples: Samples, pending: "PendingScores") -> dict[Hashable, Outcome | None]:
        """Score samples concurrently, under one future for all, since they are awaited together."""
        scoring = [asyncio.ensure_future(self._score(arguments, pending)) for arguments in samples.values()]
        try:
            outcomes = await asyncio.gather(*scoring)
        finally:
            for each in scoring:
                each.cancel()
        return dict(zip(samples, outcomes, strict=True))

    async def _score(self, arguments: Mapping[str, Any], pending: "PendingScores") -> Outcome | None:
        """Score a sample; None if `pending` was stopped while the sample waited."""
        time_left = TimeLeft(self.config.timeout_s)
        terms = zip(self._terms, self._runners, strict=True)
        asked = [pair for pair in terms if pair[0].applies_to(arguments["data_source"])]
        scored: list[tuple[Term, Score]] = []
        try:
            for places, pairs in groupby(asked, lambda pair: pair[1].places):
                async with places:
                    if pending.is_stopped:
                        return None
                    scored += [(term, await _score_by(term, runner, arguments, time_left)) for term, runner in pairs]
            return _combined(scored, arguments)
        except RewardFailed as error:
            pending.is_stopped |= _stops(error, self.config)
            return error
        except BaseException:
            pending.is_stopped = True
            raise

    def _make_runners(self) -> list[Runner]:
        sources = [term.source for term in self._terms]
        if all(source.builtin for source in sources):
            callings = [calling_of(source.load()) for source in sources]
        else:
            callings = self._loop.begin(self._pool.load_first()).result()
            if all(calling.is_async for calling in callings):
                self._loop.begin(self._pool.close()).result(_CLOSE_WAIT_S)
        processes, waiting = asyncio.Semaphore(self.config.workers), asyncio.Semaphore(self.config.async_samples)
        return [
            InLoop(source.load(), calling, self._functions_loop, self._loop, waiting)
            if calling.is_async
            else InProcess(index, calling, source.builtin, self._pool, processes)
            for index, (source, calling) in enumerate(zip(sources, callings, strict=True))
        ]


class PendingScores:
    """Scores of added samples; scoring of a sample begins when it is added."""

    def __init__(self, scorer: Scorer) -> None:
        self.is_stopped = False
        """Whether no further sample is begun: one has failed in a way that ends the run, or all were cancelled."""
        self._scorer = scorer
        self._added: list[Future[dict[Hashable, Outcome | None]]] = []

    def add(self, samples: Samples) -> None:
        """Begin scoring samples, whose keys must be new.

        Raises `UserError` if no term covers the data_source of one.
        """
        self._added.append(self._scorer.submit(samples, self))

    def when_finished(self, on_scored: Callable[[], None]) -> None:
        """Call `on_scored` once all samples added so far are scored or have failed: `finish` then does not wait."""
        left, added = count(1), len(self._added)

        def note(_: object) -> None:
            # No lock: one thread completes all of them.
            if next(left) == added:
                on_scored()

        for each in self._added.copy():
            each.add_done_callback(note)

    def finish(self) -> dict[Hashable, Outcome]:
        """Wait for all scores and return them by key, in the order in which the samples were added.

        Raises the first failure, in that order, for which `reward.on_error` or `reward.on_timeout` is to stop; samples
        that have not begun by then are not scored.
        """
        outcomes: dict[Hashable, Outcome | None] = {}
        try:
            for each in self._added:
                outcomes |= each.result()
        except BaseException:
            self.cancel()
            raise
        # The futures keep their callbacks alive, and these the samples.
        self._added.clear()
        for outcome in outcomes.values():
            if isinstance(outcome, RewardFailed) and _stops(outcome, self._scorer.config):
                raise outcome
        return {key: outcome for key, outcome in outcomes.items() if outcome is not None}

    def cancel(self) -> None:
        """Stop scoring the samples."""
        self.is_stopped = True
        for each in self._added:
            each.cancel()


async def _score_by(term: Term, runner: Runner, arguments: Mapping[str, Any], time_left: TimeLeft) -> Score:
    """Score one term; 0 if the response has no answer that the term could read."""
    read = term.arguments(arguments)
    if read is None:
        assert term.source.builtin is not None
        return as_score(term.source.builtin.nothing)
    return await runner(read, time_left)


def _combined(scored: Sequence[tuple[Term, Score]], arguments: Mapping[str, Any]) -> Score:
    try:
        return combine(scored)
    except ValueError as error:
        raise WeightedSumFailed(arguments, str(error)) from error


def _stops(result: RewardFailed, config: "RewardConfig") -> bool:
    if isinstance(result, RewardLost):
        return False
    if isinstance(result, RewardTimedOut):
        return config.on_timeout == "stop"
    return config.on_error == "stop"
