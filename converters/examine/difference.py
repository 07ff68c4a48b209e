"""Whether two checkpoints, of either kind, are the same model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.architectures import Architecture, read_architecture
from converters.boxes import Box
from converters.dtypes import dtype_name
from converters.errors import UserError
from converters.examine.counting import Count
from converters.examine.opening import Checkpoint, config_of, open_checkpoint
from converters.examine.values import ValueDifference, compare_values
from converters.examine.weights import Weights, weights_of
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layout import Shape
from converters.stream.run import Progress


@dataclass(frozen=True)
class Difference:
    """Differences of two checkpoints A and B, by HuggingFace names."""

    compared: int
    """Number of tensors that are in both with the same shape."""
    nbytes: int
    """Size of these tensors, in their types in A."""
    only_in_a: Sequence[str]
    only_in_b: Sequence[str]
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Name -> shapes in A and B, where they differ."""
    values: Sequence[ValueDifference]
    dtypes: Mapping[tuple[str, str], int]
    """Types in A and B -> number of tensors, where the types differ."""
    config: Mapping[str, tuple[Any, Any]]
    """Megatron's name of a field of config.json -> values in A and B, where they differ."""
    has_compared_config: bool
    """Whether both have a config.json, of a known model."""

    @property
    def is_same(self) -> bool:
        """Whether no difference was found. Different dtypes of equal values do not matter."""
        return not (self._is_another_model or self.values)

    @property
    def is_rounding(self) -> bool:
        """Whether one differs from the other only by rounding to a narrower dtype."""
        return bool(self.values) and not self._is_another_model and all(each.is_rounding for each in self.values)

    @property
    def _is_another_model(self) -> bool:
        return bool(self.only_in_a or self.only_in_b or self.shapes or self.config)


def compare(
    folder_a: Path, folder_b: Path, *, hf_config_folder: Path | None, workers: int, progress: Progress
) -> Difference:
    """Compare all tensors; block FP8 counts as the bf16 that it is decoded to.

    The HuggingFace names of a torch_dist checkpoint follow from the config.json in `hf_config_folder`, else from its
    own, else from the other checkpoint's. A copy of a weight may be missing if the other checkpoint's equals the
    weight; so may tensors that nothing reads. Raises UserError for a folder without a checkpoint, for a damaged or
    incomplete one, and for a torch_dist checkpoint without a config.json.
    """
    checkpoints = open_checkpoint(folder_a), open_checkpoint(folder_b)
    own = [config_of(checkpoint) for checkpoint in checkpoints]
    given = read_json(hf_config_folder / CONFIG) if hf_config_folder else None
    arch_a = _architecture(checkpoints[0], given or own[0] or own[1])
    arch_b = _architecture(checkpoints[1], given or own[1] or own[0])
    a, b = weights_of(checkpoints[0], arch_a), weights_of(checkpoints[1], arch_b)
    known = [architecture for architecture in (arch_a, arch_b) if architecture]
    matched = _match(a, b, known)
    pairs = {name: (in_a, in_b) for name, (in_a, in_b) in matched.pairs.items() if a.shapes[in_a] == b.shapes[in_b]}
    nbytes = sum(Box.whole(a.shapes[name]).size * a.dtypes[name].itemsize for name, _ in pairs.values())
    has_compared_config = all(own) and len(known) == 2
    count = Count(nbytes, progress)
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda name: compare_values(name, (a, pairs[name][0]), (b, pairs[name][1]), count.add), pairs)
        values = [each for each in found if each]
    types = Counter((dtype_name(a.dtypes[in_a]), dtype_name(b.dtypes[in_b])) for in_a, in_b in pairs.values())
    return Difference(
        compared=len(pairs),
        nbytes=nbytes,
        only_in_a=matched.only_in_a,
        only_in_b=matched.only_in_b,
        shapes={
            name: (a.shapes[in_a], b.shapes[in_b]) for name, (in_a, in_b) in matched.pairs.items() if name not in pairs
        },
        values=values,
        dtypes={both: number for both, number in types.items() if both[0] != both[1]},
        config=_config_differences(*known) if has_compared_config else {},
        has_compared_config=has_compared_config,
    )


@dataclass(frozen=True)
class _Match:
    pairs: Mapping[str, tuple[str, str]]
    """Name -> its names in A and in B."""
    only_in_a: Sequence[str]
    only_in_b: Sequence[str]


def _match(a: Weights, b: Weights, known: Sequence[Architecture]) -> _Match:
    copies = {name: original for architecture in known for name, original in architecture.hf_copies.items()}
    unused = {name for architecture in known for name in architecture.hf_unused}
    pairs: dict[str, tuple[str, str]] = {}
    only: dict[int, list[str]] = {0: [], 1: []}
    held_names = a.shapes.keys() | b.shapes.keys()
    model_order = [name for architecture in known for name in architecture.hf_shapes if name in held_names]
    for name in dict.fromkeys([*model_order, *a.shapes, *b.shapes]):
        held = [name if name in weights.shapes else copies.get(name, name) for weights in (a, b)]
        if held[0] in a.shapes and held[1] in b.shapes:
            pairs[name] = held[0], held[1]
        elif name not in unused:
            only[0 if name in a.shapes else 1].append(name)
    return _Match(pairs, only[0], only[1])


def _architecture(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Architecture | None:
    if config is None:
        return None
    try:
        return read_architecture(config)
    except UserError:
        if isinstance(checkpoint, HuggingFaceCheckpoint):
            # The names of its tensors do not depend on the model.
            return None
        raise


def _config_differences(a: Architecture, b: Architecture) -> dict[str, tuple[Any, Any]]:
    fields_a, fields_b = ({**each.transformer_config, **each.gpt_model} for each in (a, b))
    names = dict.fromkeys([*fields_a, *fields_b])
    both = {name: (fields_a.get(name), fields_b.get(name)) for name in names}
    return {name: values for name, values in both.items() if values[0] != values[1]}
