"""Requests in flight: each is one streaming call of the server, which reports on its samples until they end."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from threading import RLock
from typing import Any

from converters.errors import UserError
from megarl.data import Turn
from megarl.rollout.progress_reporter import TOKENS
from megarl.rollout.protocol import EngineDiedError, Request
from megarl.rollout.request_in_flight import Answer, Listener, RequestInFlight, SampleInFlight
from megarl.rollout.sampling import check_request
from megarl.rollout.sglang.client import CallRefusedError, Client
from megarl.rollout.sglang.samples import Limits, aborted, ended, hear, question


class _Call(RequestInFlight):
    """One request; `future` gets its samples.

    Samples can be ended by two threads: the one that reads the server's answers, and the engine's owner.
    """

    def __init__(self, request: Request, listener: Listener | None) -> None:
        super().__init__(request, listener)
        self.request = request
        self.samples = [SampleInFlight(self, number) for number in request.samples]
        self.task: Future[None] | None = None
        self._lock = RLock()

    @property
    def left(self) -> list[SampleInFlight]:
        """The unfinished samples."""
        return [each for each in self.samples if each.sample not in self._turns]

    def finish(self, sample: int, turn: Turn) -> None:
        """See `RequestInFlight.finish`; only the first end of a sample counts."""
        with self._lock:
            if sample not in self._turns and not self.future.done():
                super().finish(sample, turn)

    def hear(self, answer: Mapping[str, Any], limits: Limits) -> bool:
        """Take an answer's new tokens, and end its sample if it is the last; return whether there is more to come."""
        with self._lock:
            if self.future.done():
                return False
            sample = self.samples[answer["index"]]
            new = hear(sample, answer)
            if new and self.listener is not None:
                self.listener(new)
            turn = ended(self.request, sample, answer["meta_info"], limits)
            if turn is not None:
                self.finish(sample.sample, turn)
            return turn is None

    def abort(self) -> None:
        """End unfinished samples with the tokens reported so far."""
        with self._lock:
            for sample in self.left:
                self.finish(sample.sample, aborted(sample))

    def fail(self, error: BaseException) -> None:
        """Fail the pending answer with `error`."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)


class InFlight:
    """All unanswered requests. They are sent to the server unless it is held; then they wait here.

    A held server would queue a request where no abort finds it. `fails` is called with errors that are no request's
    fault, and `hears` whenever there are new tokens.
    """

    def __init__(
        self, client: Client, limits: Limits, fails: Callable[[BaseException], None], hears: Callable[[], None]
    ) -> None:
        self._client = client
        self._limits = limits
        self._fails = fails
        self._hears = hears
        self._calls: set[_Call] = set()
        self._waiting: list[_Call] = []
        self._is_held = False

    def add(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        """Add all `requests`, or none: raises UserError if one of them cannot be served."""
        for request in requests:
            # The server would silently truncate a response that does not fit.
            check_request(request, self._limits.tokens, self._limits.vocabulary, "context_length")
        added = [_Call(each, listener) for each in requests]
        self._waiting += added
        if not self._is_held:
            self.release()
        return [call.future for call in added]

    def hold(self) -> None:
        """Send no request until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Send waiting requests, and from now on new ones at once."""
        self._is_held = False
        calls, self._waiting = self._waiting, []
        for call in calls:
            self._calls.add(call)
            call.future.add_done_callback(lambda _, call=call: self._calls.discard(call))  # type: ignore[misc]
            call.task = self._client.begin(self._ask(call))

    def samples(self) -> Iterator[SampleInFlight]:
        """The unfinished samples that were sent to the server; another engine can continue them as last reported."""
        for call in list(self._calls):
            yield from call.left

    def asked(self) -> bool:
        """Whether the server has unanswered requests."""
        return bool(self._calls)

    def wait(self, seconds: float) -> None:
        """Wait until the server has answered all requests, for at most `seconds`."""
        wait([call.future for call in list(self._calls)], seconds)

    def abort_waiting(self, answers: Collection[Future[list[Turn]]] | None = None) -> None:
        """End requests that were not sent, or those of them with these answers, without tokens."""
        calls = [call for call in self._waiting if answers is None or call.future in answers]
        self._waiting = [call for call in self._waiting if call not in calls]
        for call in calls:
            call.abort()

    def abort_asked(self, answers: Collection[Future[list[Turn]]] | None = None) -> None:
        """End unanswered requests, or those of them with these answers, with the tokens reported so far.

        The server aborts calls that nobody waits for.
        """
        for call in list(self._calls):
            if answers is not None and call.future not in answers:
                continue
            if call.task is not None:
                call.task.cancel()
            call.abort()

    def fail(self, error: EngineDiedError) -> None:
        """Fail all requests with `error`."""
        calls, self._waiting = [*self._waiting, *self._calls], []
        for call in calls:
            call.fail(error)
            if call.task is not None:
                call.task.cancel()

    async def _ask(self, call: _Call) -> None:
        body = question(call.request, self._limits, interval=TOKENS if call.listener is None else 1)
        try:
            async for answer in self._client.answers("/generate", body):
                if call.hear(answer, self._limits):
                    self._hears()
            if not call.future.done():
                raise RuntimeError("SGLang's server told of no end of a sample")
        except CallRefusedError as error:
            asked = f"a prompt of {len(call.request.prompt_token_ids)} tokens with {call.request.sampling}"
            call.fail(UserError(f"SGLang refuses {asked}: {error}"))
        except Exception as error:  # noqa: BLE001 - the engine dies of it, and everyone who waits is told
            died = EngineDiedError(f"the SGLang engine died: {error}")
            died.__cause__ = error
            call.fail(died)
            self._fails(error)
