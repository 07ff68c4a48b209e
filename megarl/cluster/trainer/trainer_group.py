"""The Megatron ranks as one object: a call splits its batch over data parallelism and joins the results."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
import torch
from torch import Tensor

from converters.architectures import Head, Lora
from converters.cost.compute import PassFlops
from converters.errors import UserError
from converters.layouts.megatron import ModuleNames, ParallelSizes
from megarl.algorithms import AnyObjective, Metrics
from megarl.cluster.placement.reservation import Seats
from megarl.cluster.placement.roles import POLICY
from megarl.cluster.trainer.batch import REFERENCE, ROUTED_EXPERTS, Batch, Placed
from megarl.cluster.trainer.cuts import Cutter, in_order, prefixes_in, sequences_in, share_of
from megarl.cluster.trainer.model_work import ModelWork
from megarl.cluster.trainer.prefixes import prefixes_of
from megarl.cluster.trainer.rank_methods import TrainerWorker
from megarl.cluster.trainer.weight_sender import WeightSender
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker_group import WorkerGroup
from megarl.data.stretches import Values, fetch_concatenated, is_remote, put, put_sequences
from megarl.process.file_system import lost_in_export
from megarl.schema import ClusterConfig
from megatron_ext.memory.device_memory import CountedMemory, StatePart
from megatron_ext.objective import StepResult
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.balance import Cut, computed
from megatron_ext.packing.packing import asked_field

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class TrainerGroup(WorkerGroup):
    """All ranks of one Megatron job: one model, trained or frozen.

    There may be several groups, each with its own processes; the role's name appears in their logs' names and in
    errors.
    """

    def __init__(
        self, options: MegatronOptions, cluster: ClusterConfig, seats: Seats, logs: Path, max_tokens: int
    ) -> None:
        super().__init__(seats, logs)
        self._parallel = options.parallel
        self._options = options
        self._cluster = cluster
        self._cutter = Cutter(options, max_tokens)
        self._work = ModelWork()
        self._flops = 0.0

    def start(self) -> None:
        """Make the ranks rendezvous at an address of rank 0."""
        self.make("megarl.cluster.trainer.trainer_worker", "TrainerWorker", [(rank,) for rank in range(len(self))])
        # Two groups cannot share a port: the configured one is for the policy.
        port = self._cluster.rendezvous_port if self.name == POLICY else 0
        address = self.call(TrainerWorker.rendezvous, port)[0]
        self.call(TrainerWorker.join, self._options, address, self._cluster.collective_timeout_s)

    def build(
        self,
        model_path: Path,
        megatron_checkpoint: Path | None,
        total_steps: int,
        *,
        reference: bool,
        head: Head = "language_model",
    ) -> None:
        """Build the model of a HuggingFace folder, ready for `total_steps` optimizer steps.

        The weights come from `megatron_checkpoint`, or else from the folder. With the head "value" the model returns a
        value per token; if the weights have no such head, it is initialised to 0. With `reference` a copy of the
        weights is kept as the reference model.
        """
        self._work = ModelWork.of(model_path, head, self._options)
        self.call(TrainerWorker.build, model_path, megatron_checkpoint, self._options, total_steps, reference, head)

    def build_frozen(self, model_path: Path, *, head: Head = "language_model") -> None:
        """Build the model of a HuggingFace folder for predictions only, without gradients and optimizer."""
        self._work = ModelWork.of(model_path, head, self._options)
        self.call(TrainerWorker.build_frozen, model_path, self._options, head)

    def place(self, batch: Batch) -> Batch:
        """Store the tokens of each data-parallel share in one array of the object store; return the batch with these.

        All calls of a step refer to these arrays, including those of other models with the same split. Also finds
        shared prefixes.
        """
        if self._options.shared_prefixes:
            batch = replace(batch, prefixes=prefixes_of(batch.tokens))
        tokens, share_of_sequence = list(batch.tokens), np.zeros(len(batch), dtype=np.int64)
        for number, share in enumerate(self._cut(batch)):
            sequences = list(chain.from_iterable(share))
            share_of_sequence[sequences] = number
            here = [each for each in sequences if not is_remote(batch.tokens[each])]
            if here:
                placed = put_sequences(fetch_concatenated([batch.tokens[each] for each in here]), batch.lengths[here])
                for sequence, values in zip(here, placed, strict=True):
                    tokens[sequence] = values
        return replace(batch, tokens=tokens, placed=Placed(batch.tokens, share_of_sequence))

    def predictions(
        self, batch: Batch, names: Sequence[str], *, temperature: float, replay: bool = False
    ) -> dict[str, list[Values]]:
        """Predictions for each token of `batch`, in its order: the fields of `LogProbs` that are named.

        Names with the prefix "reference_" are the reference model's. The results stay in the object stores of the
        ranks' machines, as do those of `log_probs` and `values`. With `replay`, tokens go to the experts recorded in
        the batch, if any, except in the reference model.
        """
        cut = self._cut(batch)
        read = [name for name in (asked_field(batch.fields), ROUTED_EXPERTS if replay else None) if name is not None]
        of_models = {name.startswith(REFERENCE) for name in names}
        work = [self._work.reference if is_reference else self._work.forward for is_reference in of_models]
        results = self._call_shares(
            TrainerWorker.predictions, batch.only(read), cut, list(names), temperature, work=work
        )
        return {name: in_order(cut, [result[name] for result in results]) for name in names}

    def log_probs(
        self, batch: Batch, *, temperature: float, reference: bool = False, replay: bool = False
    ) -> list[Values]:
        """The log-probs of all tokens of `batch` (float32), in its order. See `predictions`."""
        name = f"{REFERENCE}log_probs" if reference else "log_probs"
        return self.predictions(batch, [name], temperature=temperature, replay=replay)[name]

    def values(self, batch: Batch) -> list[Values]:
        """For each token of `batch` the value (float32) of the state in which it was chosen; 0 for first tokens."""
        cut = self._cut(batch)
        return in_order(cut, self._call_shares(TrainerWorker.values, batch.only(()), cut, work=[self._work.forward]))

    def scores(self, batch: Batch) -> Tensor:
        """The value at the last token of each sequence of `batch`, float32[N]."""
        cut = self._cut(batch)
        scores = np.concatenate(self._call_shares(TrainerWorker.scores, batch.only(()), cut, work=[self._work.forward]))
        return torch.from_numpy(scores)[torch.tensor(sequences_in(cut), dtype=torch.long).argsort()]

    def refresh_reference(self) -> None:
        """Copy the present weights to the reference model; checkpoints then include them."""
        self.call(TrainerWorker.refresh_reference)

    def train_step(self, batch: Batch, objective: AnyObjective, *, temperature: float = 1.0) -> StepResult[Metrics]:
        """Run one optimizer step on `batch`; return the metrics of all micro-batches.

        Logits are divided by `temperature`. The batch must have the fields that the objective reads.
        """
        results = self._call_shares(
            TrainerWorker.train_step, batch, self._cut(batch), objective, temperature, work=[self._work.update]
        )
        mtp = [result.mtp for result in results if result.mtp is not None]
        return replace(
            results[0],
            metrics=[part for result in results for part in result.metrics],
            mtp=torch.stack(mtp).sum(0) if mtp else None,
        )

    @property
    def weights(self) -> WeightSender:
        """The sender of the model's weights to engines."""
        return WeightSender(self)

    @property
    def parallel(self) -> ParallelSizes:
        """The parallel sizes of the model."""
        return self._parallel

    @property
    def has_gpus(self) -> bool:
        """Whether the ranks have GPUs; known before they start."""
        return self._seats.role.gpus > 0

    @property
    def adapter_alone(self) -> Lora | None:
        """The trained adapter, if refits send only the adapter."""
        adapter = self._options.adapter
        return adapter.lora if adapter is not None and not adapter.merge else None

    @property
    def module_names(self) -> ModuleNames:
        """The names of the model's modules."""
        return self.call_first(TrainerWorker.module_names)

    @property
    def backend(self) -> str:
        """The collective backend of the model's device."""
        return self.call_first(TrainerWorker.backend)

    def export(self, folder: Path, copy_from: Path) -> None:
        """Write the model as a HuggingFace checkpoint. Raises UserError if a file system would lose parts of it."""
        _check_mapped_by(self._seats, folder)
        self.call(TrainerWorker.export, folder, copy_from)

    def export_adapter(self, folder: Path) -> None:
        """Write the trained adapter as a PEFT folder. Raises as `export`."""
        _check_mapped_by(self._seats, folder)
        self.call(TrainerWorker.export_adapter, folder)

    def begin_save(self, folder: Path, *, in_background: bool) -> None:
        """Begin to write model, optimizer, schedule and RNG to `folder`.

        With `in_background` the state is copied first and the ranks may go on; otherwise nothing may change until
        `finish_save`.
        """
        self.call(TrainerWorker.begin_save, folder, in_background)

    def save_is_written(self) -> bool:
        """Whether all ranks have written their part. Raises the error if writing failed."""
        return all(self.call(TrainerWorker.save_is_written))

    def finish_save(self) -> float:
        """Wait until everything is written, even if some ranks' disks are much slower.

        Returns the seconds from the end of `begin_save` to the end of the slowest rank.
        """
        # Not waited for in a collective, whose timeout is meant for hung ranks.
        seconds = self.call(TrainerWorker.wait_until_save_is_written)
        self.call(TrainerWorker.finish_save)
        return max(seconds)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self.call(TrainerWorker.load, folder)

    def offload(self, parts: Collection[StatePart]) -> None:
        """Offload parts of all ranks' state to the host."""
        self.call(TrainerWorker.offload, list(parts))

    def reload(self, parts: Collection[StatePart]) -> None:
        """Reload parts of all ranks' state to their devices."""
        self.call(TrainerWorker.reload, list(parts))

    def count_memory(self, memory: CountedMemory) -> None:
        """From now on count the ranks' memory in `memory`, which stands in for a GPU's limit."""
        self.call(TrainerWorker.count_memory, memory)

    def take_flops(self) -> float:
        """Return the FLOPs of the model on all ranks since the last call, without recomputed activations."""
        flops, self._flops = self._flops, 0.0
        return flops

    def device_name(self) -> str:
        """The name of rank 0's device."""
        return self.call_first(TrainerWorker.device_name)

    def take_device_peak(self) -> int:
        """The peak memory, over ranks, of all processes on a rank's device since the last turn began."""
        return max(self.call(TrainerWorker.take_device_peak))

    def peak_memory_bytes(self) -> list[int]:
        """The peak memory of each rank, in bytes."""
        return self.call(TrainerWorker.peak_memory_bytes)

    def _cut(self, batch: Batch) -> Cut:
        return self._cutter.cut(batch, self._work.forward.attention_length)

    def _call_shares(
        self,
        method: Callable[[TrainerWorker, Batch, list[list[int]], bool, *Ts], R | None],
        batch: Batch,
        cut: Cut,
        *arguments: *Ts,
        work: Sequence[PassFlops],
    ) -> list[R]:
        """Call every rank with its data-parallel share; returns one result per share.

        The batch must have only the fields that the call reads, as they are sent to every rank. `work` is counted as
        the call's FLOPs.
        """
        tokens, squares = computed(cut, batch.lengths.tolist(), prefixes_in(batch, self._options))
        self._flops += sum(each.of(tokens, squares) for each in work)
        batch = batch.for_shares([list(chain.from_iterable(share)) for share in cut])
        shares = [(put(share), micro_batches) for share, micro_batches in (share_of(batch, each) for each in cut)]
        returns_result = [self._parallel.holds_predictions(rank) for rank in range(len(self))]
        of_ranks = [
            (*shares[self._parallel.data_parallel_rank(rank)], returns_result[rank], *arguments)
            for rank in range(len(self))
        ]
        results = []
        for result, is_returned in zip(wait(self.begin_each(method, of_ranks)), returns_result, strict=True):
            if is_returned:
                assert result is not None, "a rank that holds predictions returns them"
                results.append(result)
        return results


def _check_mapped_by(seats: Seats, folder: Path) -> None:
    if sentence := lost_in_export(folder, len({node.id for node in seats.nodes})):
        raise UserError(sentence)
