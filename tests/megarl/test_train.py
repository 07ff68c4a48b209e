"""When a run evaluates."""

import pytest

from megarl.schema import LoopConfig
from megarl.stages.evaluate import evaluates_after


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_it_evaluates_after_every_so_many_steps_and_the_last_or_never(every: int, steps: list[int]) -> None:
    loop = LoopConfig(steps=5, eval_every=every)
    assert [step for step in range(1, 6) if evaluates_after(step, loop)] == steps
