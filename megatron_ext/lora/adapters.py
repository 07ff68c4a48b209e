"""The adapters of a rank's model: attaches, disables, merges, loads and exports them."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from converters.architectures import Architecture, Lora, adapter_architecture
from converters.architectures.lora import MODULE_SUFFIX
from converters.copying import check_tensors, copy_transfers
from converters.durable import sync_all
from converters.errors import UserError
from converters.formats.peft import AdapterFolder, create_adapter, finish_adapter, write_adapter_config
from converters.formats.safetensors import open_for_writing, partial_folder
from converters.layout import Shape, Shard
from converters.layouts.chunk_names import split_chunk
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ModuleNames, ParallelSizes, megatron_layout
from converters.plan import plan
from megatron_ext.lora.lora import Adapter, LinearLayer, Rows
from megatron_ext.memory.host_copies import HostCopies, HostTensor
from megatron_ext.model.backbone import Backbone
from megatron_ext.model.specs import module_names
from megatron_ext.weights import check_finite

_Linear: TypeAlias = tuple[LinearLayer, Adapter]


def check_modules(names: ModuleNames) -> None:
    """Raise UserError for modules that do not support adapters: Transformer Engine's."""
    if names == "te":
        raise UserError(
            "lora: adapters are not there for Transformer Engine's modules: set megatron.transformer_impl=local, or"
            " train the weights (lora.rank=0)"
        )


class Adapters:
    """Low-rank adapters of the linear layers of this rank's `chunks`, whose weights are frozen; see `check_modules`.

    Raises UserError for targets that the model does not have.

    Every method except the context managers is collective, or reads what all ranks read. The chunks must hold the base
    weights, and must not be wrapped for training yet.
    """

    def __init__(
        self,
        chunks: Sequence[Backbone],
        architecture: Architecture,
        lora: Lora,
        parallel: ParallelSizes,
        rank: int,
    ) -> None:
        config = chunks[0].config
        self._module_names, self._dtype = module_names(config), config.params_dtype
        self.lora = lora
        self._base, self._parallel, self._rank = architecture, parallel, rank
        self._architecture = adapter_architecture(architecture, lora)
        self._shard = megatron_layout(self._architecture, parallel, module_names=self._module_names).shard(rank)
        for chunk in chunks:
            chunk.requires_grad_(False)
            if isinstance(embedding := getattr(chunk, "embedding", None), torch.nn.Module):
                embedding.register_forward_hook(_begin_graph)
        self._linears = self._attach(chunks)
        self._frozen: dict[str, HostTensor] = {}
        """Layer name -> host copy of its base weights, made when they are first merged."""
        self._copies = HostCopies()

    @property
    def tensors(self) -> dict[str, torch.nn.Parameter]:
        """This rank's A and B by their names in the adapter's Megatron layout."""
        return {
            f"{name}{MODULE_SUFFIX}.{factor}": parameter
            for name, (_, adapter) in self._linears.items()
            for factor, parameter in adapter.named_parameters()
        }

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialise as PEFT does: B to 0, and A uniformly, with the standard deviation of a new linear layer.

        Values depend only on the seed and the tensor's name, not on the layout.
        """
        tensors = self.tensors
        for placement in self._shard.placements:
            name, view = placement.hf_name, tensors[placement.local_name][placement.local_box.slices()]
            if name.endswith("lora_B.weight"):
                view.zero_()
                continue
            rank, columns = self._architecture.hf_shapes[name]
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole = torch.rand(rank, columns, generator=generator) * 2 - 1
            view.copy_(whole[placement.hf_box.slices()] / columns**0.5)

    def load(self, folder: Path) -> None:
        """Read this rank's part of a PEFT adapter. Raises UserError if it is of another model or another `lora`."""
        source = AdapterFolder(folder)
        source.check(self._base, self.lora)
        tensors = self.tensors
        check_tensors(self._shard.local_shapes, tensors)
        with torch.no_grad():
            for each in self._shard.placements:
                tensors[each.local_name][each.local_box.slices()].copy_(source.read(each.hf_name, each.hf_box))
        check_finite(tensors, folder)

    def export(self, folder: Path, barrier: Callable[[], object]) -> None:
        """Write the adapters of all ranks as a PEFT adapter; every rank calls this. See `weights.export_huggingface`.

        Raises UserError if `folder` exists or the disk is full.
        """
        partial, shapes, tensors = partial_folder(folder), self._architecture.hf_shapes, self.tensors
        if self._rank == 0:
            create_adapter(partial, shapes, self._dtype)
        barrier()
        source = megatron_layout(self._architecture, self._parallel, module_names=self._module_names)
        transfers = [each for each in plan(source, huggingface_layout(shapes)) if each.source_rank == self._rank]
        copy_transfers(transfers, tensors, open_for_writing(partial))
        sync_all(partial)
        barrier()
        if self._rank == 0:
            finish_adapter(partial, folder, self._architecture, self.lora)
        barrier()

    def write_config(self, folder: Path) -> None:
        """Write the adapter's configuration to `folder`."""
        write_adapter_config(folder, self._architecture, self.lora)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model computes without the adapters, as the base model."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    @contextmanager
    def merged(self, names: Collection[str] | None = None) -> Iterator[None]:
        """Context in which the weights are those of the adapted model, for reading only, not for computing.

        `names` are the weights to be read, by their names in the Megatron layout; None means all. The base weights are
        kept on the host, and restored bit for bit.
        """
        chosen = [name for name in self._linears if names is None or f"{name}.weight" in names]
        self._keep(chosen)
        merged = []
        try:
            for name in chosen:
                self._merge(name)
                merged.append(name)
            yield
        finally:
            for name in merged:
                self._frozen[name].copy_to(self._linears[name][0].weight)

    def _keep(self, names: Sequence[str]) -> None:
        """Make sure that there are host copies of these layers' weights."""
        new = [name for name in names if name not in self._frozen]
        if new:
            # Calls share pieces of pinned memory: a refit merges a bucket at a time, and separate allocations would
            # each be rounded up.
            copies = self._copies.more([self._linears[name][0].weight for name in new])
            self._frozen.update(zip(new, copies, strict=True))

    @torch.no_grad()
    def _merge(self, name: str) -> None:
        linear, adapter = self._linears[name]
        # Added in float32 and rounded once, as the update may be below the resolution of the weight's dtype.
        linear.weight.copy_(linear.weight.float() + adapter.update_of_weight())

    def _enable(self, enabled: bool) -> None:
        for _, adapter in self._linears.values():
            adapter.enabled = enabled

    def _attach(self, chunks: Sequence[torch.nn.Module]) -> dict[str, _Linear]:
        base = megatron_layout(self._base, self._parallel, module_names=self._module_names).shard(self._rank)
        shapes: dict[str, dict[str, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
        for local_name, shape in self._shard.local_shapes.items():
            path, matrix, factor = local_name.rsplit(".", 2)
            shapes[path.removesuffix(MODULE_SUFFIX)][matrix][factor] = shape
        rows = _rows(base, {f"{name}.weight" for name in shapes})
        linears = {}
        for name, of_matrices in shapes.items():
            parent, linear_name = _find(chunks, name)
            linear = getattr(parent, linear_name)
            factors = {matrix: (each["lora_A"], each["lora_B"]) for matrix, each in of_matrices.items()}
            adapter = Adapter(linear, factors, rows[f"{name}.weight"], self.lora.scale)
            parent.add_module(linear_name + MODULE_SUFFIX, adapter)
            # Before other hooks: an output norm must see the adapted output.
            linear.register_forward_hook(adapter.add_to_output, prepend=True)
            linears[name] = linear, adapter
        return linears


def _rows(shard: Shard, names: Collection[str]) -> dict[str, Rows]:
    """Layer name -> how HuggingFace matrices make up its rows."""
    pieces: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for each in sorted(shard.placements, key=lambda placement: placement.local_box.start[0]):
        if each.local_name in names:
            matrix = each.hf_name.removesuffix(".weight").rsplit(".", 1)[-1]
            pieces[each.local_name].append((matrix, each.local_box.stop[0] - each.local_box.start[0]))
    found = {}
    for name, of_layer in pieces.items():
        rows: dict[str, int] = defaultdict(int)
        for matrix, count in of_layer:
            rows[matrix] += count
        found[name] = Rows(dict(rows), groups=len(of_layer) // len(rows))
    return found


def _find(chunks: Sequence[torch.nn.Module], name: str) -> tuple[torch.nn.Module, str]:
    """The parent of a linear layer, and its name there."""
    index, name = split_chunk(name, len(chunks))
    path, _, linear = name.rpartition(".")
    return chunks[index].get_submodule(path), linear


def _begin_graph(_embedding: torch.nn.Module, _inputs: Any, embedded: Tensor) -> None:
    # Recomputed layers only compute gradients if their input requires one, which a frozen embedding's output does not.
    if torch.is_grad_enabled():
        embedded.requires_grad_()
