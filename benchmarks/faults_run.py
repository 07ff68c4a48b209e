"""`megarl`, with a note of every trained batch: its draws, and the age of their oldest token."""

import json
import os
import sys
from pathlib import Path

from megarl.cli.main import main
from megarl.data import trajectories_of
from megarl.data.stretches import fetch
from megarl.run.rollouts import RolloutBatch, Rollouts
from megarl.tracking.clock import Clock

NOTES = "FAULTS_NOTES"
"""Environment variable with the path of the notes."""

_take = Rollouts.take


def _noted(self: Rollouts, clock: Clock) -> RolloutBatch:
    batch = _take(self, clock)
    version = self._schedule.version
    trajectories = trajectories_of(batch.groups)
    oldest = min(int(fetch(turn.versions).min()) for each in trajectories for turn in each.turns)
    note = {
        "step": version + 1,
        "ordinals": [group.ordinal for group in batch.sampled],
        "age": version - oldest,
        "tokens": sum(each.sampled_tokens for each in trajectories),
    }
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(f"{json.dumps(note)}\n")
    return batch


if __name__ == "__main__":
    Rollouts.take = _noted  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
