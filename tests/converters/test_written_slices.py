"""Slices of tensors that a stream writes: where they lie in files, in which order and type."""

import torch
from conversions import MODELS, write_model
from isal.isal_zlib import crc32

from converters.boxes import Box
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.stream.journal import Journal
from converters.stream.run import write_targets
from converters.stream.sources import HuggingFaceSource
from converters.stream.targets import Part, Place, Target


def test_slices_of_every_kind_are_written_in_order(tmp_path):
    """Larger than the buffer: as they lie, gathered by columns, converted, and padded before, between and behind."""
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(1500, 700, generator=generator) for name in ("a", "b", "c")}
    write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    hf = HuggingFaceSource(HuggingFaceCheckpoint(tmp_path / "hf"))
    rows = Target(
        "rows",
        Place("sub/file", 100),
        torch.float32,
        (4000, 700),
        [
            Part("b", Box((200, 0), (1500, 700)), Box((1900, 0), (3200, 700))),
            Part("a", Box((0, 0), (1500, 700)), Box((300, 0), (1800, 700))),
        ],
    )
    columns = Target(
        "columns",
        Place("file", 0),
        torch.float32,
        (1500, 1000),
        [
            Part("a", Box((0, 100), (1500, 600)), Box((0, 500), (1500, 1000))),
            Part("b", Box((1, 0), (1500, 400)), Box((0, 0), (1499, 400))),
        ],
    )
    rounded = Target(
        "rounded", Place("file", columns.nbytes), torch.bfloat16, (1500, 700), [whole_part("c", (1500, 700))]
    )
    with Journal(tmp_path / "journal", {}) as journal:
        written = write_targets(
            [rows, columns, rounded], hf, tmp_path, journal, workers=2, progress=lambda _done, _total: None
        )
    expected_rows, expected_columns = torch.zeros(4000, 700), torch.zeros(1500, 1000)
    expected_rows[300:1800], expected_rows[1900:3200] = tensors["a"], tensors["b"][200:]
    expected_columns[:, 500:], expected_columns[:1499, :400] = tensors["a"][:, 100:600], tensors["b"][1:, :400]
    expected = {"rows": expected_rows, "columns": expected_columns, "rounded": tensors["c"].bfloat16()}
    for name, tensor in expected.items():
        (place,) = written[name]
        content = (tmp_path / place.file).read_bytes()[place.offset : place.offset + place.nbytes]
        assert torch.equal(torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(tensor.shape), tensor)
        assert place.crc32 == crc32(content)
    assert (tmp_path / "sub/file").stat().st_size == 100 + rows.nbytes


def whole_part(name: str, shape: tuple[int, int]) -> Part:
    return Part(name, Box.whole(shape), Box.whole(shape))
