"""All that drops keys and values of a vLLM engine, when that has a batch on its way, as those on GPUs have.

There the connector that returns experts asserts at the next step that none was: the engine would die of it.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import get_args
from unittest import mock

from asked_engine import AskedEngine
from engine_host import GREEDY, queueing

from megarl.rollout.protocol import EngineMemory, Request


def batches_at_resets(folders, prompt):
    """How many batches were on their way at each reset, by what made it; the answers; and whether ever one was."""
    served = queueing(folders)
    engine = served.engine
    core = engine._core._client.engine_core
    queued, seen, reset, step = [], [], core.scheduler.reset_prefix_cache, core.step_fn

    def note_and_reset(*arguments, **options):
        queued.append(len(core.batch_queue))
        return reset(*arguments, **options)

    def step_and_note():
        found = step()
        seen.append(len(core.batch_queue))
        return found

    found = {}

    def note(what):
        found[what], queued[:] = list(queued), []

    served.update(served.first, engine.version() + 1)
    with (
        ThreadPoolExecutor() as pool,
        mock.patch.object(core.scheduler, "reset_prefix_cache", note_and_reset),
        mock.patch.object(core, "step_fn", step_and_note),
    ):
        asked = AskedEngine(engine, pool)
        # Begun one after the other, each is in batches of its own, and one of the two is always on its way.
        generating = [asked.begin(Request(prompt, replace(GREEDY, max_tokens=400))) for _ in range(2)]
        served.update(served.first, engine.version() + 1)
        note("update")
        turns = [each.result(60)[0][0] for each in generating]
        generating = [asked.begin(Request(prompt, replace(GREEDY, max_tokens=400))) for _ in range(2)]
        engine.sleep()
        note("sleep")
        assert {each.result(60)[0][0].finish_reason for each in generating} == {"abort"}
    engine.wake_up(get_args(EngineMemory))
    return found, max(seen), turns


def test_none_is_on_its_way_when_keys_and_values_are_dropped(with_queueing, folders, endless_prompt, assert_greedy):
    found, most, turns = with_queueing(batches_at_resets)
    assert most == 1
    assert found == {"update": [0], "sleep": [0]}
    for turn in turns:
        assert len(turn.token_ids) == 400
        assert_greedy(folders[0], endless_prompt, turn)
