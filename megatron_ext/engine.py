"""One model on this rank: weights, forward, train step, optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from converters.architectures import Architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from megatron_ext import device
from megatron_ext.distributed_weights import load_distributed
from megatron_ext.forward import forward_backward, forward_log_probs
from megatron_ext.log_probs import LogProbs
from megatron_ext.model import build_model, local_tensors
from megatron_ext.objective import Objective
from megatron_ext.optimizer import build_optimizer, build_scheduler, wrap_distributed
from megatron_ext.options import MegatronOptions
from megatron_ext.packing import MicroBatch, RaggedBatch, pack, unpack
from megatron_ext.step_result import StepResult
from megatron_ext.weights import export_huggingface, load_huggingface


class MegatronEngine:
    """A model cut over the ranks of this job, and everything that is done with it.

    Every method is collective: all ranks of the model call it with the same arguments, except for the batch, of which
    each data-parallel rank gets its own part.
    """

    def __init__(self, architecture: Architecture, options: MegatronOptions, rank: int) -> None:
        self.architecture = architecture
        self.options = options
        self.rank = rank
        self._bare_chunks: list[torch.nn.Module] = build_model(
            architecture, options.parallel, params_dtype=options.params_dtype, overrides=options.transformer
        )
        self._reference: dict[str, Tensor] | None = None

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's weights by the names of its Megatron layout."""
        return local_tensors(self._bare_chunks)

    def load_huggingface(self, checkpoint: HuggingFaceCheckpoint) -> None:
        """Read this rank's boxes of a HuggingFace checkpoint; call before `prepare_training`."""
        load_huggingface(self._bare_chunks, self.architecture, self.options.parallel, self.rank, checkpoint)

    def load_distributed(self, folder: Path) -> None:
        """Read this rank's part of a torch_dist checkpoint of any layout; call before `prepare_training`."""
        load_distributed(self._bare_chunks, self.architecture, folder)

    def export_huggingface(self, folder: Path, copy_from: Path) -> None:
        """Write the weights as a HuggingFace checkpoint, with config and tokenizer taken from `copy_from`."""
        export_huggingface(
            self._bare_chunks,
            self.architecture,
            self.options.parallel,
            self.rank,
            folder,
            copy_from,
            barrier=torch.distributed.barrier,
        )

    def prepare_training(self, total_steps: int) -> None:
        """Wrap the model for data parallelism and make its optimizer and schedule of `total_steps` optimizer steps."""
        options = self.options
        self.chunks: list[DistributedDataParallel] = wrap_distributed(self._bare_chunks, options.distributed)
        self.optimizer: MegatronOptimizer = build_optimizer(self.chunks, options.optimizer, options.params_dtype)
        self.scheduler: OptimizerParamScheduler = build_scheduler(
            self.optimizer, options.optimizer, options.scheduler, total_steps
        )
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss

    def log_probs(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> LogProbs | None:
        """Log-probability, entropy and greediness of every token of `batch`, in its own order; 0 for first tokens.

        `micro_batches` lists the sequences of each micro-batch. None on all but the last pipeline stage.
        """
        packed = self._pack(batch, micro_batches)
        predictions = forward_log_probs(self._bare_chunks, packed, vocab_size=self._vocab_size, temperature=temperature)
        if not predictions:
            return None
        columns = zip(*((p.log_probs, p.entropy, p.greedy) for p in predictions), strict=True)
        order = torch.tensor([index for sequences in micro_batches for index in sequences], dtype=torch.long)
        return LogProbs(*(_unpack_all(values, packed, batch.lengths, order) for values in columns))

    def train_step(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], objective: Objective, *, temperature: float
    ) -> StepResult:
        """One optimizer step on `batch`. Raises RuntimeError, with no weight changed, if a gradient is not finite."""
        learning_rate = self._learning_rate()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = forward_backward(
            self.chunks,
            self._pack(batch, micro_batches),
            objective,
            vocab_size=self._vocab_size,
            temperature=temperature,
        )
        updated, gradient_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped its step: the gradients overflowed")
        self.scheduler.step(increment=1)
        return StepResult(metrics, float(gradient_norm), learning_rate)

    def _learning_rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def keep_reference(self) -> None:
        """Remember the present weights as those of the reference model."""
        self._reference = {name: tensor.detach().clone() for name, tensor in self.local_tensors().items()}

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Inside, the model computes with the reference weights."""
        if self._reference is None:
            raise RuntimeError("keep_reference was never called")
        current = self.local_tensors()
        for name, reference in self._reference.items():
            _exchange(current[name], reference)
        try:
            yield
        finally:
            for name, reference in self._reference.items():
                _exchange(current[name], reference)

    @property
    def _vocab_size(self) -> int:
        return self.architecture.gpt_model["vocab_size"]

    def _pack(self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]]) -> list[MicroBatch]:
        align = self.options.parallel.tensor_model_parallel_size
        return [pack(batch, sequences, align).to(device.device()) for sequences in micro_batches]


def _exchange(left: Tensor, right: Tensor) -> None:
    with torch.no_grad():
        kept = left.clone()
        left.copy_(right)
        right.copy_(kept)


def _unpack_all(values: Sequence[Tensor], packed: Sequence[MicroBatch], lengths: Tensor, order: Tensor) -> Tensor:
    """Values of packed micro-batches, put back into the order of the batch they were packed from."""
    in_packed_order = torch.cat([unpack(value, batch) for value, batch in zip(values, packed, strict=True)]).cpu()
    pieces = in_packed_order.split(lengths[order].tolist())
    return torch.cat([pieces[position] for position in order.argsort().tolist()])
