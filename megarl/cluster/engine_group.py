"""The engines as one object: requests are cut over them, everything else goes to all."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

from ray.exceptions import RayTaskError

from converters.errors import UserError
from megarl.cluster.placement import worker_environment
from megarl.cluster.runtime import last_lines
from megarl.cluster.worker_group import Call, WorkerDied, WorkerGroup
from megarl.config.schema import ClusterConfig
from megarl.resharding.buckets import Bucket
from megarl.rollout.protocol import Generation, Request

# Enough for a generation, an update and a question about health at the same time.
_CALLS_AT_ONCE = 4


class EngineGroup(WorkerGroup):
    """Equal engines, each in a process of its own."""

    def __init__(self, replicas: int, cluster: ClusterConfig, logs: Path) -> None:
        super().__init__(
            "engine",
            replicas,
            cpus=cluster.engine_cpus,
            environment=worker_environment(cluster),
            logs=logs,
            calls_at_once=_CALLS_AT_ONCE,
        )

    def begin_start(self, engine: str, model_path: Path, engine_args: Mapping[str, Any]) -> list[Call]:
        """Begin to start all engines; they are up when `wait_started` returns."""
        self.make("megarl.rollout", "make_engine", [(engine, model_path, dict(engine_args))] * len(self))
        return self.begin("start")

    def wait_started(self, calls: Sequence[Call]) -> None:
        """Wait for what `begin_start` began. Raises UserError with the end of the log if an engine does not start."""
        try:
            self.wait(calls)
        except (RayTaskError, WorkerDied) as error:
            reason = error.cause if isinstance(error, RayTaskError) else "its process died"
            log = self._logs[0]
            raise UserError(
                f"an engine did not start: {reason}; check rollout.engine_args and model.path. "
                f"The end of {log}:\n{last_lines(log)}"
            ) from error

    def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Generations of every request, in order; neighbours go to the same engine."""
        bounds = [len(requests) * index // len(self) for index in range(len(self) + 1)]
        shares = [(requests[start:stop],) for start, stop in pairwise(bounds)]
        return list(chain.from_iterable(self.wait(self.begin_each("generate", shares))))

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop sampling; requests in flight are kept or come back as they are."""
        self.call("pause", mode)

    def resume(self) -> None:
        """Sample on after `pause`."""
        self.call("resume")

    def connect(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Let every engine map the shared-memory segments of a refit."""
        self.call("connect", list(segments), segment_bytes)

    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """Fence all engines until `commit_update`."""
        self.call("begin_update", version, list(names))

    def begin_write(self, bucket: Bucket) -> list[Call]:
        """Begin to load a bucket in all engines; its segment is free again when `wait` returns."""
        return self.begin("write", bucket)

    def commit_update(self, version: int) -> None:
        """Lift the fence: from here on all engines serve `version`."""
        self.call("commit_update", version)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for earlier prompts."""
        self.call("reset_prefix_cache")
