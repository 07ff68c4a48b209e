"""A step of vLLM that is under way when the engine is held, and fails: the engine dies of it as of any other step."""

import pytest

from megarl.rollout.protocol import EngineDiedError
from megarl.rollout.vllm.core import InProcessCore
from megarl.rollout.vllm.engine import VllmEngine
from megarl.rollout.vllm.sequences import SequencesInFlight


class _CoreOfDeadWorker(InProcessCore):
    """Fails as vLLM does when a worker ends."""

    def __init__(self):
        pass

    def supported_tasks(self):
        return ("generate",)

    def hold(self):
        raise RuntimeError("cancelled")

    def close(self):
        pass


def test_an_engine_that_cannot_end_its_last_step_is_dead(folders):
    engine = VllmEngine(folders[0], {})
    engine._core = core = _CoreOfDeadWorker()
    engine._sequences = SequencesInFlight(core, 512, 64)
    with pytest.raises(EngineDiedError, match="cancelled"):
        engine.begin_update(1, ["lm_head.weight"])
    with pytest.raises(EngineDiedError, match="the vLLM engine has died: cancelled"):
        engine.version()
    engine.close()
