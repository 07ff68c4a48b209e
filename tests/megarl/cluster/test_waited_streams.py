"""Results of streams come to whoever waits for them; a long array behind a result stays where it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.workers import streams
from megarl.cluster.workers.streams import Stream, next_of


@pytest.mark.parametrize(("begun", "fetches"), [([], True), ([("the rest of a result", 1)], False)])
def test_only_where_an_array_may_come_next_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch, begun: list[Any], fetches: bool
) -> None:
    asked: list[bool] = []

    def wait(references: list[Any], *, num_returns: int, timeout: float, fetch_local: bool) -> tuple[list, list]:
        asked.append(fetch_local)
        return [], references

    monkeypatch.setattr(streams.ray, "wait", wait)
    worker = SimpleNamespace()
    waiting = [Stream(worker, "its results"), Stream(worker, "those of another", begun)]  # type: ignore[arg-type]
    assert next_of(waiting, [], 0.0) == []
    assert asked == [fetches] * 2
