"""Requests in flight: each is one call of the server, which answers it when all its samples are finished."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from converters.errors import UserError
from megarl.data import Turn
from megarl.rollout.protocol import EngineDiedError, Request
from megarl.rollout.request_in_flight import Listener
from megarl.rollout.sglang.client import CallRefusedError, Client
from megarl.rollout.sglang.samples import Limits, aborted, check, question, turns


@dataclass(eq=False)
class _Call:
    """One request; `future` gets its samples."""

    request: Request
    listener: Listener | None
    prompt_ids: Any
    future: Future[list[Turn]] = field(default_factory=Future)
    is_asked: bool = False
    task: "Future[None] | None" = None

    def finish(self, samples: list[Turn]) -> None:
        if not self.future.done():
            self.future.set_result(samples)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class InFlight:
    """All requests that were not answered. They reach the server while it is not held, and wait here otherwise.

    A server that is held would let a request wait where no abort finds it. `fails` is told of an error that no request
    is to blame for.
    """

    def __init__(self, client: Client, limits: Limits, fails: Callable[[BaseException], None]) -> None:
        self._client = client
        self._limits = limits
        self._fails = fails
        self._calls: set[_Call] = set()
        self._waiting: list[_Call] = []
        self._is_held = False

    def add(self, requests: Sequence[Request], listener: Listener | None) -> list[Future[list[Turn]]]:
        """Take up all `requests`, or none: UserError if one of them cannot be served."""
        for request in requests:
            check(request, self._limits)
        added = [_Call(each, listener, np.array(each.prompt_token_ids, dtype=np.int32)) for each in requests]
        self._waiting += added
        if not self._is_held:
            self.release()
        return [call.future for call in added]

    def hold(self) -> None:
        """Send no request until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Send what waits, and from now on what comes."""
        self._is_held = False
        calls, self._waiting = self._waiting, []
        for call in calls:
            self._calls.add(call)
            call.future.add_done_callback(lambda _, call=call: self._calls.discard(call))  # type: ignore[misc]
            call.task = self._client.begin(self._ask(call))

    def asked(self) -> bool:
        """Whether the server has requests that it did not answer."""
        return bool(self._calls)

    def wait(self, seconds: float) -> None:
        """Wait until the server has answered all, but no longer than this."""
        wait([call.future for call in list(self._calls)], seconds)

    def abort_waiting(self, answers: Collection[Future[list[Turn]]] | None = None) -> None:
        """Finish what was not sent, or what of it has these answers, with no token."""
        calls = [call for call in self._waiting if answers is None or call.future in answers]
        self._waiting = [call for call in self._waiting if call not in calls]
        for call in calls:
            call.finish(aborted(call.request, call.prompt_ids, self._limits))

    def abort_asked(self, answers: Collection[Future[list[Turn]]] | None = None) -> None:
        """Finish what the server did not answer, or what of it has these answers, with no token.

        The server ends what nobody waits for.
        """
        for call in list(self._calls):
            if answers is not None and call.future not in answers:
                continue
            call.finish(aborted(call.request, call.prompt_ids, self._limits))
            if call.task is not None:
                call.task.cancel()

    def fail(self, error: EngineDiedError) -> None:
        """Let all requests raise `error`."""
        calls, self._waiting = [*self._waiting, *self._calls], []
        for call in calls:
            call.fail(error)
            if call.task is not None:
                call.task.cancel()

    async def _ask(self, call: _Call) -> None:
        body = question(call.request, self._limits, stream=call.listener is not None)
        try:
            answer = await (
                self._client.ask("/generate", body) if call.listener is None else self._streamed(call, body)
            )
            call.finish(turns(call.request, answer, call.prompt_ids, self._limits))
        except CallRefusedError as error:
            asked = f"a prompt of {len(call.prompt_ids)} tokens with {call.request.sampling}"
            call.fail(UserError(f"SGLang refuses {asked}: {error}"))
        except Exception as error:  # noqa: BLE001 - the engine dies of it, and everyone who waits is told
            died = EngineDiedError(f"the SGLang engine died: {error}")
            died.__cause__ = error
            call.fail(died)
            self._fails(error)

    async def _streamed(self, call: _Call, body: dict[str, Any]) -> Any:
        """The last answer of a stream, which has all tokens; the listener hears of those that are new in each."""
        assert call.listener is not None
        answer: Any = None
        heard = 0
        async for answer in self._client.answers("/generate", body):
            token_ids = answer["output_ids"]
            if token_ids[heard:]:
                call.listener(token_ids[heard:])
                heard = len(token_ids)
        return answer
