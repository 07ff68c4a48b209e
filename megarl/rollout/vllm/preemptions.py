"""Counts the tokens that vLLM recomputes because it preempted their samples."""

import functools
from collections.abc import Iterator
from typing import Any


class Preemptions:
    """Counts tokens when vLLM's `scheduler` resumes a preempted sample.

    Excludes what the prefix cache still has of the sample, and samples without new tokens. vLLM reports no such number:
    it counts requests, and only where it writes logs.
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
        """Exclude tokens to be recomputed because the whole KV cache is dropped now."""
        self._forgotten = {name for name, each in self._scheduler.requests.items() if each.num_output_tokens}

    def take(self) -> int:
        """Return the tokens counted since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    def _resumed(self, scheduled: Any) -> Iterator[tuple[str, int]]:
        """The resumed samples, possibly among new ones, and the number of their tokens in the prefix cache."""
        # For vLLM's V2 model runner, on GPUs, resumed samples are listed as new ones.
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
            # A resumed sample; its last token has not been fed yet.
            self._tokens += request.num_tokens - 1 - found
