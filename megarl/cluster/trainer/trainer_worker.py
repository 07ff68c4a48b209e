"""The program of one Megatron rank."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import ray
import torch

from megatron_ext import device

device.install()  # before Megatron is imported

from converters.architectures import Head, adapter_architecture, read_architecture  # noqa: E402
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json  # noqa: E402
from converters.layouts.megatron import ModuleNames  # noqa: E402
from converters.number_formats import NumberFormat  # noqa: E402
from megarl.algorithms import AnyObjective, Metrics  # noqa: E402
from megarl.cluster.trainer.batch import REFERENCE, Batch  # noqa: E402
from megarl.data.packed_stretches import Packed  # noqa: E402
from megarl.data.stretches import Array  # noqa: E402
from megarl.process.gpudirect import gpudirect_obstacle  # noqa: E402
from megarl.process.ports import free_port  # noqa: E402
from megarl.resharding.direct.connections import Address  # noqa: E402
from megarl.resharding.direct.sender import Sender  # noqa: E402
from megarl.resharding.direct.transfer_spec import TransferSpec  # noqa: E402
from megarl.resharding.direct.transports.endpoint import Rendezvous  # noqa: E402
from megarl.resharding.direct.transports.nixl_agent import has_port  # noqa: E402
from megarl.resharding.loader.buckets import Bucket  # noqa: E402
from megarl.resharding.loader.source import WeightSource  # noqa: E402
from megarl.resharding.transfer_stats import TransferStats  # noqa: E402
from megatron_ext import parallel  # noqa: E402
from megatron_ext.checkpoint import checkpoint  # noqa: E402
from megatron_ext.loopback import open_store  # noqa: E402
from megatron_ext.megatron_model import MegatronModel  # noqa: E402
from megatron_ext.memory.device_memory import CountedMemory, StatePart, take_peak  # noqa: E402
from megatron_ext.objective import StepResult  # noqa: E402
from megatron_ext.options.options import MegatronOptions  # noqa: E402

MicroBatches: TypeAlias = list[list[int]]
"""The sequences of each micro-batch, as indices into this rank's share."""


class TrainerWorker:
    """One rank: builds its part of the model and answers the group's calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sender: Sender | None = None
        self.memory: CountedMemory | None = None

    def rendezvous(self, port: int) -> str:
        """Return an address on this rank's machine for the ranks' rendezvous; `port` 0 means any port."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{free_port(host, port)}"

    def join(self, options: MegatronOptions, init_method: str, timeout_s: float) -> None:
        """Create the process groups, with `timeout_s` for collectives."""
        if options.is_deterministic:
            # As in Megatron's training script; operations without a deterministic kernel raise.
            torch.use_deterministic_algorithms(True)
        parallel.initialize(options.parallel, self.rank, init_method, timeout=timedelta(seconds=timeout_s))

    def build(
        self,
        model_path: Path,
        megatron_checkpoint: Path | None,
        options: MegatronOptions,
        total_steps: int,
        reference: bool,
        head: Head,
    ) -> None:
        """Build the model, read its weights and prepare training; replaces an earlier model."""
        self.model = self._new_model(model_path, options, head)
        if megatron_checkpoint:
            self.model.load_distributed(megatron_checkpoint)
        else:
            self.model.load_huggingface(HuggingFaceCheckpoint(model_path))
        self.model.add_adapters()
        self.model.prepare_training(total_steps)
        if reference:
            self.model.keep_reference()
        self.saving = checkpoint.Saving(self.model)
        adapter, sent = options.adapter, self.model.architecture
        if adapter is not None and not adapter.merge:
            sent = adapter_architecture(sent, adapter.lora)
        tensors, names = self.model.local_tensors(), self.model.module_names
        self.weights = WeightSource(sent, options.parallel, self.rank, tensors, names)

    def build_frozen(self, model_path: Path, options: MegatronOptions, head: Head) -> None:
        """Build the model and read its weights for predictions only; replaces an earlier model."""
        self.model = self._new_model(model_path, options, head)
        self.model.load_huggingface(HuggingFaceCheckpoint(model_path))
        self.model.freeze()

    def _new_model(self, model_path: Path, options: MegatronOptions, head: Head) -> MegatronModel:
        return MegatronModel(read_architecture(read_json(model_path / CONFIG)), options, self.rank, head=head)

    def predictions(
        self,
        share: Batch,
        micro_batches: MicroBatches,
        returns_result: bool,
        names: list[str],
        temperature: float,
    ) -> dict[str, Packed] | None:
        """Compute the named fields of `MegatronModel.log_probs`; see `TrainerGroup.predictions`.

        Returns None unless the rank `returns_result`, as all calls do: another rank of the share has the same result.
        """
        batch, found = share.load(), dict[str, Packed]()
        for is_reference in (False, True):
            own = [name for name in names if name.startswith(REFERENCE) == is_reference]
            if not own:
                continue
            with self.model.reference_weights() if is_reference else nullcontext():
                read = replace(batch, routed_experts=None) if is_reference else batch
                predictions = self.model.log_probs(read, micro_batches, temperature=temperature)
            if returns_result:
                assert predictions is not None, "a rank that returns predictions is of the last stage"
                found |= {name: share.kept(getattr(predictions, name.removeprefix(REFERENCE))) for name in own}
        return found if returns_result else None

    def values(self, share: Batch, micro_batches: MicroBatches, returns_result: bool) -> Packed | None:
        """See `MegatronModel.values`."""
        values = self.model.values(share.load(), micro_batches)
        return share.kept(values) if returns_result and values is not None else None

    def scores(self, share: Batch, micro_batches: MicroBatches, returns_result: bool) -> Array | None:
        """See `MegatronModel.scores`."""
        scores = self.model.scores(share.load(), micro_batches)
        return scores.numpy() if returns_result and scores is not None else None

    def refresh_reference(self) -> None:
        """See `MegatronModel.refresh_reference`."""
        self.model.refresh_reference()

    def train_step(
        self,
        share: Batch,
        micro_batches: MicroBatches,
        returns_result: bool,
        objective: AnyObjective,
        temperature: float,
    ) -> StepResult[Metrics] | None:
        """See `MegatronModel.train_step`; results are on the host, with the metrics of all micro-batches concatenated.

        A step of thousands of micro-batches has a hundred thousand numbers, which would be sent as one tensor each.
        """
        result = self.model.train_step(share.load(), micro_batches, objective, temperature=temperature)
        if not returns_result:
            return None
        mtp = None if result.mtp is None else result.mtp.cpu()
        return replace(result, metrics=[Metrics.merge(result.metrics).cpu()], mtp=mtp)

    def device_name(self) -> str:
        """See `device.name`."""
        return device.name()

    def module_names(self) -> ModuleNames:
        """See `MegatronModel.module_names`."""
        return self.model.module_names

    def backend(self) -> str:
        """The collective backend of the device that the model is on."""
        return device.backend()

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every HF tensor of which this rank sends a part."""
        return self.weights.dtypes()

    def cut_blocks(self, number_format: NumberFormat, names: frozenset[str]) -> set[str]:
        """See `WeightSource.cut_blocks`."""
        return self.weights.cut_blocks(number_format, names)

    def map_segments(self, segments: list[str], segment_bytes: int) -> None:
        """Map the shared-memory segments that buckets are written to."""
        self.weights.map_segments(segments, segment_bytes)

    def write(self, bucket: Bucket) -> None:
        """Write this rank's boxes of a bucket into its segment."""
        self.model.complete_weights()
        with self.model.trained_weights(self.weights.sources(bucket)):
            self.weights.write(bucket)

    def open_transfer(self, spec: TransferSpec) -> Address:
        """Prepare to send this rank's part of `spec`; return the address for receivers."""
        self.close_transfer()
        host = ray.util.get_node_ip_address()
        self.sender = Sender(self.rank, spec.outgoing(self.rank), self.model.local_tensors(), host)
        return self.sender.address

    def open_store(self, timeout_s: float) -> Address:
        """Create a store for process groups, which lasts until the next one; return its address."""
        host = ray.util.get_node_ip_address()
        self.store = open_store(host, timedelta(seconds=timeout_s))
        return host, self.store.port

    def has_rdma_port(self) -> bool:
        """Whether this machine has a port of InfiniBand, RoCE or EFA that is up."""
        return has_port()

    def gpudirect_obstacle(self) -> str:
        """Why GPUDirect does not work on this machine, if it does not. See `gpudirect.gpudirect_obstacle`."""
        return gpudirect_obstacle()

    def connect_transfer(self, rendezvous: Rendezvous) -> None:
        """Wait for the receivers. See `Sender.connect`."""
        assert self.sender is not None
        with self._disconnecting_on_error():
            self.sender.connect(rendezvous)
            self.sender.load_kernels()

    def send(self, version: int) -> TransferStats:
        """Send the present weights as `version`; return how much was sent. See `Sender.send`."""
        assert self.sender is not None
        self.model.complete_weights()
        with self._disconnecting_on_error(), self.model.trained_weights():
            return self.sender.send(version)

    def close_transfer(self) -> None:
        """Free the memory of a transfer; receivers must have unmapped it before."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    @contextmanager
    def _disconnecting_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Receivers notice the closed links and unmap the buckets, which the next transfer frees.
            if self.sender is not None:
                self.sender.disconnect()
            raise

    def export(self, folder: Path, copy_from: Path) -> None:
        """Write a HuggingFace checkpoint."""
        self.model.export_huggingface(folder, copy_from)

    def export_adapter(self, folder: Path) -> None:
        """Write a PEFT adapter."""
        self.model.export_adapter(folder)

    def begin_save(self, folder: Path, in_background: bool) -> None:
        """See `checkpoint.Saving.begin`."""
        self.saving.begin(folder, in_background=in_background)

    def save_is_written(self) -> bool:
        """See `checkpoint.Saving.is_written`."""
        return self.saving.is_written()

    def wait_until_save_is_written(self) -> float:
        """See `checkpoint.Saving.wait_until_written`."""
        return self.saving.wait_until_written()

    def finish_save(self) -> None:
        """See `checkpoint.Saving.finish`."""
        self.saving.finish()

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        checkpoint.load(self.model, folder)

    def offload(self, parts: list[StatePart]) -> None:
        """See `MegatronModel.offload`."""
        self.model.offload(parts)

    def reload(self, parts: list[StatePart]) -> None:
        """See `MegatronModel.reload`."""
        self.model.reload(parts)

    def count_memory(self, memory: CountedMemory) -> None:
        """From now on count this rank's memory in `memory`, which stands in for a GPU's limit."""
        self.memory = memory
        self.model.residence.count_in(memory)

    def take_device_peak(self) -> int:
        """See `device_memory.take_peak`."""
        return take_peak(self.memory)

    def peak_memory_bytes(self) -> int:
        """The peak memory of this process."""
        return device.peak_memory_bytes()

    def close(self) -> None:
        """Leave the process groups."""
        parallel.shutdown()
