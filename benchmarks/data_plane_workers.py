"""Workers of the data-plane benchmark: an engine with made-up responses, and ranks that compute nothing."""

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from megarl.algorithms import Metrics
from megarl.cluster.trainer.trainer_worker import TrainerWorker
from megarl.data import Turn
from megarl.data.packed_stretches import Packed
from megatron_ext.log_probs import LogProbs
from megatron_ext.objective import StepResult
from megatron_ext.packing.packing import RaggedBatch


class Engine:
    """Answers prompts at once with random tokens; the text has the length of English text."""

    def generate_each(
        self, prompts: Sequence[Sequence[int]], samples: int, mean_tokens: int
    ) -> Iterator[tuple[int, list[Turn]]]:
        """Yield turns for each prompt, of 0.5 to 1.5 times `mean_tokens`."""
        generator = np.random.default_rng(0)
        for place, prompt in enumerate(prompts):
            lengths = generator.integers(mean_tokens // 2, mean_tokens + mean_tokens // 2, samples, endpoint=True)
            turns = [self._turn(prompt, length, generator) for length in lengths.tolist()]
            yield place, [replace(turn, text=len(turn.token_ids) * "text") for turn in turns]

    def _turn(self, prompt: Sequence[int], length: int, generator: np.random.Generator) -> Turn:
        return Turn.of(
            prompt,
            generator.integers(4, 150_000, length, dtype=np.int32),
            -generator.random(length, dtype=np.float32),
            np.full(length, 3, dtype=np.int32),
            "stop",
        )


class Ranks(TrainerWorker):
    """All Megatron ranks of a group in one process, without a model: they take batches and return results.

    Counts the pickled bytes of the arguments and results of all calls.
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
        """Bytes received and returned since the last call of this method, by the name of the call."""
        counted, self._bytes = self._bytes, {}
        return counted

    def _counted(self, name: str, arguments: tuple[Any, ...], result: Any) -> Any:
        counts = self._bytes.setdefault(name, [0, 0])
        received, returned = _Travelling(arguments), _Travelling(result)
        counts[0] += received.sent + received.fetched
        counts[1] += returned.sent
        return result


class _Travelling(pickle.Pickler):
    """Counts the bytes of a value that is `sent`, and of data `fetched` by a receiver that resolves its references."""

    def __init__(self, value: Any) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer, protocol=5)
        self.fetched = 0
        self.dump(value)
        self.sent = buffer.tell()

    def reducer_override(self, value: Any) -> Any:
        """See `pickle.Pickler`: a reference counts its data."""
        if isinstance(value, Packed):
            sizes = np.array([np.dtype(dtype).itemsize for dtype in value.dtypes], dtype=np.int64)
            self.fetched += int(sizes[value.places[:, 0]] @ value.places[:, 1])
        return (bytes, (value.binary(),)) if isinstance(value, ray.ObjectRef) else NotImplemented


class _NoModel:
    """The part of `MegatronModel` that handles a batch."""

    def log_probs(self, batch: RaggedBatch, _micro_batches: Sequence[Sequence[int]], *, temperature: float) -> LogProbs:
        # As in a model, 0 where nothing is asked for.
        values = -temperature * torch.rand(len(batch.tokens)) * batch.fields["trained"]
        return LogProbs(values, values.clone(), values > -0.5, values.square())

    def reference_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def train_step(self, *_arguments: Any, temperature: float) -> StepResult:  # noqa: ARG002
        return StepResult([Metrics()], 1.0, 1e-6)
