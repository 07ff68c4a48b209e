"""A client of SGLang's HTTP server, with blocking calls from any thread."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

import aiohttp

R = TypeVar("R")


class ServerGoneError(RuntimeError):
    """The server does not answer any more."""


class CallRefusedError(RuntimeError):
    """The server refused a call; the message is its own."""


class Client:
    """Calls the server at `url` with API key `key`, from an event loop in a thread of its own."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="SGLang client", daemon=True)
        self._thread.start()
        self._session = self.begin(_session(key)).result()

    def begin(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Schedule `work` in the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, action: Any, *arguments: Any) -> None:
        """Call `action` in the event loop, before any work that is scheduled later."""
        self._loop.call_soon_threadsafe(action, *arguments)

    def get(self, path: str) -> Any:
        """Send a GET request and return the answer. Raises as `post`."""
        return self.begin(self._ask("GET", path, None)).result()

    def post(self, path: str, **body: Any) -> Any:
        """Send a POST request and return the answer.

        Raises CallRefusedError if the server refuses it, ServerGoneError if it is gone.
        """
        return self.begin(self.ask(path, body)).result()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """`post`, in the event loop."""
        return await self._ask("POST", path, body)

    async def answers(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield the answers to a streaming call, in the event loop. Raises as `post`."""
        try:
            async with self._session.post(self._url + path, json=body) as response:
                await _check(path, response)
                async for line in _lines(response.content):
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        answer = json.loads(line[len(b"data: ") :])
                        if "error" in answer:
                            raise CallRefusedError(f"{path}: {_message(answer)}")
                        yield answer
        except (aiohttp.ClientError, OSError) as error:
            raise _gone(error) from error

    def close(self) -> None:
        """Cancel pending work, and end the thread."""
        self.begin(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self._session.close()
        # Cancel pending tasks: a loop that stops with tasks left warns when they are garbage-collected.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for work in left:
            work.cancel()
        if left:
            await asyncio.wait(left)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                await _check(path, response)
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise _gone(error) from error
        return json.loads(text) if text.startswith(("{", "[")) else text


async def _session(key: str) -> aiohttp.ClientSession:
    # No connection limit: the server queues requests, and a limit would be a second queue.
    return aiohttp.ClientSession(
        # No keep-alive: a request on an idle connection that the server has just closed would be lost.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Authorization": f"Bearer {key}"},
        trust_env=False,
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, of any length: one with the experts of a whole response exceeds aiohttp's limit."""
    begun: list[bytes] = []
    async for piece in content.iter_any():
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun = []
        begun.append(rest)
    yield b"".join(begun)


def _gone(error: Exception) -> ServerGoneError:
    return ServerGoneError(f"the server of the SGLang engine does not answer: {type(error).__name__} {error}")


async def _check(path: str, response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = await response.text()
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = text.strip()
        raise CallRefusedError(f"{path}: {message or response.reason} ({response.status})")


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
