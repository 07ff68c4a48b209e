"""Tokens that vLLM computes again, since it took the room for keys and values of their samples for others."""

import functools
from collections.abc import Iterator
from typing import Any


class Preemptions:
    """Counts them where vLLM's `scheduler` lets a sample go on that it had put back.

    Without what the prefix cache still had of the sample, and of samples that have tokens alone. vLLM tells of no such
    number: its own counts are of requests, and are made where it writes logs.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._tokens = 0
        self._forgotten: set[str] = set()
        schedule = scheduler.schedule

        @functools.wraps(schedule)
        def schedule_and_count(*arguments: Any, **options: Any) -> Any:
            scheduled = schedule(*arguments, **options)
            for name, found in self._resumed(scheduled):
                self._count(name, found)
            return scheduled

        scheduler.schedule = schedule_and_count

    def forget(self) -> None:
        """Count nothing of what is computed again because all keys and values are dropped now."""
        self._forgotten = {name for name, each in self._scheduler.requests.items() if each.num_output_tokens}

    def take(self) -> int:
        """The tokens since they were taken last."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    def _resumed(self, scheduled: Any) -> Iterator[tuple[str, int]]:
        """The samples that go on, among some that begin, and how many tokens of each the prefix cache has."""
        # vLLM's second model runner, that of GPUs, is told of the former as of the latter.
        for new in scheduled.scheduled_new_reqs:
            yield new.req_id, new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for name, found in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    yield name, found

    def _count(self, name: str, found: int) -> None:
        request = self._scheduler.requests[name]
        if name in self._forgotten:
            self._forgotten.discard(name)
        elif request.num_output_tokens:
            # It goes on; nobody has fed the last one yet.
            self._tokens += request.num_tokens - 1 - found
