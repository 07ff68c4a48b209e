"""Converts HuggingFace checkpoints to Megatron torch_dist as a stream, without a model, a GPU or a process group."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from converters.architectures import Architecture, read_architecture
from converters.copying import check_checkpoint
from converters.dtypes import SHORT_NAMES
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint, copy_side_files, unquantised, with_dtype, write_config
from converters.formats.torch_dist import (
    LATEST,
    METADATA,
    RELEASE,
    Chunk,
    Contents,
    StoredObject,
    StoredTensor,
    frame,
    write_metadata,
)
from converters.formats.torch_dist.common_state import empty_extra_state, extra_state_keys, write_common_state
from converters.formats.torch_dist.megatron_lm import (
    Vocabulary,
    beyond_megatron_lm,
    megatron_lm_arguments,
    megatron_lm_flags,
)
from converters.layouts.megatron import check_divisible
from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.torch_dist import PlannedChunk, plan_chunks, stored_pieces
from converters.manifest import write_manifest
from converters.output_folder import OutputFolder, refuse_inside
from converters.stream.run import Progress, write_targets
from converters.stream.sources import HuggingFaceSource
from converters.stream.targets import Part, Place, Target, Written

FLAGS = "megatron_lm_flags.txt"
"""File with the model's flags for Megatron-LM's command line."""
HUGGINGFACE = "huggingface"
"""Folder in a converted checkpoint with the original config.json and tokenizer."""
COPIES = "copies"
DTypeChoice = Literal["bf16", "fp32", "keep"]
_FILES_PER_RANK = 2
"""As megatron-core saves by default; two threads can then read or write without waiting for each other."""


@dataclass(frozen=True)
class ConversionPlan:
    """Every tensor, chunk and byte offset of a checkpoint to write."""

    contents: Contents
    targets: list[Target]
    nbytes: int
    """Total size of the files with chunks."""
    padded_vocabulary: int
    beyond_megatron_lm: str | None
    """A feature of the model that no Megatron-LM flag expresses; None if FLAGS describes the whole model."""

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype that counts as the model's: the embedding's."""
        return self.contents.tensors["embedding.word_embeddings.weight"].dtype


def plan_conversion(
    architecture: Architecture,
    parallel: ParallelSizes,
    hf_dtypes: Mapping[str, torch.dtype],
    *,
    vocabulary_multiple: int,
    padded_vocabulary: int | None = None,
) -> ConversionPlan:
    """Lay out the checkpoint for the ranks of `parallel`, in two files per rank.

    A rank's files have the chunks that no earlier rank reads. `hf_dtypes` are the dtypes to write; tensors that share a
    key get the widest of theirs. The vocabulary is padded to `padded_vocabulary`, or else to a multiple of
    `vocabulary_multiple` times the tensor-parallel size, as by Megatron-LM's `--padded-vocab-size` and
    `--make-vocab-size-divisible-by`.

    Raises UserError if the sizes do not divide the model or the padded vocabulary.
    """
    check_divisible(architecture, parallel)
    vocabulary, tensor_parallel = architecture.gpt_model["vocab_size"], parallel.tensor_model_parallel_size
    padded = _padded(vocabulary, tensor_parallel, vocabulary_multiple, padded_vocabulary)
    shapes, planned = plan_chunks(architecture, parallel, padded)
    dtypes: dict[str, torch.dtype] = {}
    for chunk in planned:
        for name in chunk.hf_names:
            known = dtypes.setdefault(chunk.key, hf_dtypes[name])
            dtypes[chunk.key] = torch.promote_types(known, hf_dtypes[name])
    chunks, ends = _deal(planned, dtypes)
    tensors = {key: StoredTensor(shape, dtypes[key], chunks[key]) for key, shape in shapes.items()}
    blob = empty_extra_state()
    shared = StoredObject("__0_0.distcp", ends["__0_0.distcp"], len(blob))
    contents = Contents(tensors, dict.fromkeys(extra_state_keys(architecture), shared))
    return ConversionPlan(
        contents,
        _targets(architecture, contents),
        sum(ends.values()) + len(blob),
        padded_vocabulary=padded,
        beyond_megatron_lm=beyond_megatron_lm(architecture),
    )


def _padded(vocabulary: int, tensor_parallel: int, multiple: int, size: int | None) -> int:
    if multiple < 1:
        raise UserError(f"--make-vocab-size-divisible-by {multiple} is no number to divide by; give at least 1")
    if size is None:
        step = multiple * tensor_parallel
        return -(-vocabulary // step) * step
    if size < vocabulary or size % tensor_parallel:
        raise UserError(
            f"--padded-vocab-size {size} does not hold the {vocabulary} tokens of config.json, or cannot be divided by"
            f" the tensor-parallel size {tensor_parallel}; give a multiple of {tensor_parallel}, at least {vocabulary}"
        )
    return size


def _deal(
    planned: Sequence[PlannedChunk], dtypes: Mapping[str, torch.dtype]
) -> tuple[Mapping[str, list[Chunk]], Counter[str]]:
    """Return chunks by key, each with its place, and file -> size; each of a rank's files gets half of its bytes."""
    lengths = [frame(dtypes[chunk.key], chunk.box.shape).length for chunk in planned]
    of_rank: Counter[int] = Counter()
    for chunk, length in zip(planned, lengths, strict=True):
        of_rank[chunk.rank] += length
    ends: Counter[str] = Counter()
    begun: Counter[int] = Counter()
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for chunk, length in zip(planned, lengths, strict=True):
        part = begun[chunk.rank] * _FILES_PER_RANK // of_rank[chunk.rank]
        file = f"__{chunk.rank}_{part}.distcp"
        chunks[chunk.key].append(Chunk(chunk.box, file, ends[file], length))
        ends[file] += length
        begun[chunk.rank] += length
    return chunks, ends


def _targets(architecture: Architecture, contents: Contents) -> list[Target]:
    """One target per chunk, in model order."""
    shapes = {key: each.shape for key, each in contents.tensors.items()}
    boxes = {key: [chunk.box for chunk in each.chunks] for key, each in contents.tensors.items()}
    targets = []
    for piece in stored_pieces(architecture, shapes, boxes):
        tensor = contents.tensors[piece.key]
        chunk = tensor.chunks[piece.chunk]
        parts = [Part(each.hf_name, each.hf_box, each.local_box) for each in piece.placements]
        place = Place(f"{RELEASE}/{chunk.file}", chunk.offset)
        targets.append(Target(piece.name, place, tensor.dtype, piece.shape, parts, framed_shape=chunk.box.shape))
    return targets


def convert_checkpoint(
    hf_folder: Path,
    folder: Path,
    parallel: ParallelSizes,
    *,
    dtype: DTypeChoice,
    vocabulary_multiple: int,
    padded_vocabulary: int | None = None,
    workers: int,
    progress: Progress,
) -> ConversionPlan:
    """Write the model of `hf_folder` to `folder`, laid out as Megatron-LM's loader expects, with a manifest.

    After an interruption, the same call resumes. Raises UserError for anything wrong with the checkpoint, the sizes or
    the output folder, either before writing or after deleting the output.
    """
    if any((hf_folder / name).is_file() for name in (METADATA, LATEST)):
        raise UserError(
            f"{hf_folder} is a torch_dist checkpoint of Megatron already: megarl convert makes one of a HuggingFace"
            " folder, and megarl export a HuggingFace folder of this"
        )
    checkpoint = HuggingFaceCheckpoint(hf_folder)
    architecture = read_architecture(checkpoint.config)
    check_checkpoint(checkpoint, architecture)
    source = HuggingFaceSource(checkpoint)
    dtypes = _output_dtypes(architecture, source, dtype)
    plan = plan_conversion(
        architecture, parallel, dtypes, vocabulary_multiple=vocabulary_multiple, padded_vocabulary=padded_vocabulary
    )
    purpose = {
        "from": checkpoint.fingerprint(),
        "parallel": vars(parallel),
        "dtype": dtype,
        "vocabulary_multiple": vocabulary_multiple,
        "padded_vocabulary": padded_vocabulary,
    }
    refuse_inside(folder, hf_folder)
    with OutputFolder(folder, purpose, nbytes=plan.nbytes) as output:
        written = write_targets(
            plan.targets, source, output.partial, output.journal, workers=workers, progress=progress
        )
        vocabulary = Vocabulary(plan.padded_vocabulary, vocabulary_multiple, folder.absolute() / HUGGINGFACE)
        arguments = megatron_lm_arguments(architecture, parallel, vocabulary, plan.main_dtype)
        _finish(output, checkpoint, architecture, plan, arguments, written)
    return plan


def _finish(
    output: OutputFolder,
    checkpoint: HuggingFaceCheckpoint,
    architecture: Architecture,
    plan: ConversionPlan,
    arguments: Mapping[str, Any],
    written: Mapping[str, Sequence[Written]],
) -> None:
    """Write everything but the tensors, including Megatron-LM's `arguments`, and complete the folder."""
    release = output.partial / RELEASE
    _append(release, next(iter(plan.contents.objects.values()), None))
    write_metadata(release, plan.contents)
    write_common_state(release, arguments)
    (output.partial / LATEST).write_text(RELEASE)
    if plan.beyond_megatron_lm is None:
        (output.partial / FLAGS).write_text(megatron_lm_flags(arguments))
    (output.partial / HUGGINGFACE).mkdir(exist_ok=True)
    write_config(output.partial / HUGGINGFACE, with_dtype(unquantised(checkpoint.config), plan.main_dtype))
    copy_side_files(checkpoint.folder, output.partial / HUGGINGFACE)
    copies = sorted(architecture.hf_copies.keys() & checkpoint.shapes.keys())
    write_manifest(output.partial, written, {COPIES: copies})
    output.complete()


def _output_dtypes(
    architecture: Architecture, source: HuggingFaceSource, choice: DTypeChoice
) -> dict[str, torch.dtype]:
    if choice == "keep":
        return {name: source.dtype(name) for name in architecture.hf_shapes}
    return architecture.hf_dtypes(SHORT_NAMES[choice])


def _append(folder: Path, shared: StoredObject | None) -> None:
    if shared:
        with (folder / shared.file).open("r+b") as file:
            file.seek(shared.offset)
            file.write(empty_extra_state())
