"""All that drops keys and values of a vLLM engine, when that has a batch on its way, as those on GPUs have.

There the connector that returns experts asserts at the next step that none was: the engine would die of it.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from asked_engine import AskedEngine
from engine_host import GREEDY, Served, queueing_engine, vllm_pool

from megarl.rollout.protocol import Request


def batches_at_resets(folders, prompt):
    """How many batches were on their way at each reset, by what made it; the answers; and whether ever one was."""
    engine = queueing_engine(folders[0])
    served = Served(engine, folders)
    core = engine._core._client.engine_core
    queued, seen, reset, step = [], [], core.scheduler.reset_prefix_cache, core.step_fn

    def note_and_reset(*arguments, **options):
        queued.append(len(core.batch_queue))
        return reset(*arguments, **options)

    def step_and_note():
        found = step()
        seen.append(len(core.batch_queue))
        return found

    core.scheduler.reset_prefix_cache, core.step_fn = note_and_reset, step_and_note
    found = {}

    def note(what):
        found[what], queued[:] = list(queued), []

    with ThreadPoolExecutor() as pool:
        asked = AskedEngine(engine, pool)
        # Begun one after the other, each is in batches of its own, and one of the two is always on its way.
        generating = [asked.begin(Request(prompt, replace(GREEDY, max_tokens=400))) for _ in range(2)]
        served.update(served.first, 1)
        note("update")
        turns = [each.result(60)[0][0] for each in generating]
        generating = [asked.begin(Request(prompt, replace(GREEDY, max_tokens=400))) for _ in range(2)]
        engine.sleep()
        note("sleep")
        assert {each.result(60)[0][0].finish_reason for each in generating} == {"abort"}
    engine.close()
    return found, max(seen), turns


def test_none_is_on_its_way_when_keys_and_values_are_dropped(folders, endless_prompt, assert_greedy):
    with vllm_pool() as process:
        found, most, turns = process.apply(batches_at_resets, (folders, endless_prompt))
    assert most == 1
    assert found == {"update": [0], "sleep": [0]}
    for turn in turns:
        assert len(turn.token_ids) == 400
        assert_greedy(folders[0], endless_prompt, turn)
