"""Workers of the benchmark of the data plane: an engine that makes up responses, and ranks that compute nothing."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from megarl.algorithms import Metrics
from megarl.cluster.trainer_worker import TrainerWorker
from megarl.data import Turn
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing import RaggedBatch
from megatron_ext.step_result import StepResult


class Engine:
    """Answers prompts at once, with random tokens."""

    def generate(self, prompts: Sequence[Sequence[int]], mean_tokens: int) -> Iterator[Turn]:
        """One turn for each prompt, half as long as `mean_tokens` to half as long again."""
        generator = np.random.default_rng(0)
        for prompt in prompts:
            length = int(generator.integers(mean_tokens // 2, mean_tokens + mean_tokens // 2, endpoint=True))
            yield Turn.of(
                prompt,
                generator.integers(4, 150_000, length, dtype=np.int32),
                -generator.random(length, dtype=np.float32),
                np.full(length, 3, dtype=np.int32),
                "stop",
            )


class Ranks(TrainerWorker):
    """All Megatron ranks of a group in one process, without a model: they take batches and return results.

    It counts the bytes of the arguments and the results of all calls, pickled as they travel.
    """

    def __init__(self) -> None:
        super().__init__(rank=0)
        self.model = _NoModel()  # type: ignore[assignment]
        self._bytes: dict[str, list[int]] = {}

    def predictions(self, *arguments: Any) -> Any:
        """See `TrainerWorker.predictions`."""
        return self._counted("predictions", arguments, super().predictions(*arguments))

    def train_step(self, *arguments: Any) -> Any:
        """See `TrainerWorker.train_step`."""
        return self._counted("train_step", arguments, super().train_step(*arguments))

    def counted(self) -> dict[str, list[int]]:
        """The bytes that were received and returned since the last time, by the name of the call."""
        counted, self._bytes = self._bytes, {}
        return counted

    def _counted(self, name: str, arguments: tuple[Any, ...], result: Any) -> Any:
        counts = self._bytes.setdefault(name, [0, 0])
        for place, sent in enumerate((arguments, result)):
            counts[place] += len(pickle.dumps(sent, protocol=5))
        return result


class _NoModel:
    """`MegatronModel`, as far as a batch goes through it."""

    def log_probs(self, batch: RaggedBatch, _micro_batches: Sequence[Sequence[int]], *, temperature: float) -> LogProbs:
        values = -temperature * torch.rand(len(batch.tokens))
        return LogProbs(values, values.clone(), values > -0.5, values.square())

    def reference_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def train_step(self, *_arguments: Any, temperature: float) -> StepResult:  # noqa: ARG002
        return StepResult([Metrics()], 1.0, 1e-6)
