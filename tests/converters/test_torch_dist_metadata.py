"""Tables of contents that contradict themselves or are damaged."""

import pickle
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from conversions import MODELS, content_of, contents, everything_in, export
from distributed import huggingface_tensors, read_table, saved, write_table
from file_sizes import files_up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import assert_refused
from torch.distributed.checkpoint import metadata as dcp

from converters.errors import UserError
from converters.formats.torch_dist import TorchDistCheckpoint, read_metadata, write_metadata
from converters.formats.torch_dist.common_state import write_common_state

FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


def test_files_may_be_links(megatron, tmp_path):
    export(megatron, tmp_path / "hf")
    assert content_of(tmp_path / "hf") == contents(huggingface_tensors(MODELS["qwen3_moe"]))


def test_a_disk_without_room_for_common_state_is_an_error_of_the_disk(tmp_path):
    with files_up_to(200), pytest.raises(OSError, match="File too large"):
        write_common_state(tmp_path, {"num_layers": 2})


def place(table: dcp.Metadata, key: str = FC2) -> dcp.MetadataIndex:
    return next(index for index in table.storage_data if index.fqn == key)


def change_place(**fields: Any):
    def change(table: dcp.Metadata) -> None:
        index = place(table)
        table.storage_data[index] = replace(table.storage_data[index], **fields)

    return change


def swap_box(**fields: Any):
    """Change the only chunk of a tensor, and where it is said to be stored."""

    def change(table: dcp.Metadata) -> None:
        (chunk,) = table.state_dict_metadata[FC2].chunks
        index = place(table)
        info = table.storage_data.pop(index)
        for name, value in fields.items():
            setattr(chunk, name, value)
        table.storage_data[replace(index, offset=chunk.offsets)] = info

    return change


def chunk_twice(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2].chunks *= 2


def no_chunk(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2].chunks.clear()


def no_place(table: dcp.Metadata) -> None:
    del table.storage_data[place(table)]


def same_bytes(table: dcp.Metadata) -> None:
    """As two keys with one size may be mixed up."""
    other = FC2.replace("fc2", "fc1")
    table.storage_data[place(table)] = table.storage_data[place(table, other)]


def share_some_bytes(table: dcp.Metadata) -> None:
    places = table.storage_data
    first, second, *_ = (index for index in places if places[index].relative_path == "__1_0.distcp")
    assert places[second].offset == places[first].offset + places[first].length
    places[first] = replace(places[first], length=places[first].length + 1)


def exchange(table: dcp.Metadata) -> None:
    norm, router = place(table, NORM), place(table, "decoder.layers.mlp.router.weight")
    places = table.storage_data
    places[norm], places[router] = places[router], places[norm]


def other_type(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2].properties.dtype = torch.bfloat16


def no_type(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2].properties.dtype = "float32"


def other_shape(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2].size = torch.Size((4, 4, 8, 7))


def words_for_numbers(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2].size = ("4", "4", "8", "6")


def surplus(table: dcp.Metadata) -> None:
    table.state_dict_metadata["decoder.extra.weight"] = table.state_dict_metadata.pop(NORM)
    table.storage_data[dcp.MetadataIndex("decoder.extra.weight", torch.Size((0,)))] = table.storage_data[
        place(table, NORM)
    ]


def extra(table: dcp.Metadata) -> None:
    entry = table.state_dict_metadata["decoder.extra.weight"] = dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=torch.float32), torch.Size((0,)), []
    )
    assert not entry.chunks


def no_key(table: dcp.Metadata) -> None:
    table.state_dict_metadata[7] = table.state_dict_metadata.pop(FC2)


def no_table(table: dcp.Metadata) -> None:
    table.state_dict_metadata = list(table.state_dict_metadata)


def no_places(table: dcp.Metadata) -> None:
    table.storage_data = None


def no_metadata_of_a_tensor(table: dcp.Metadata) -> None:
    table.state_dict_metadata[FC2] = {"size": 7}


CHANGES = {
    "chunk twice": (chunk_twice, "share bytes"),
    "no chunk": (no_chunk, f"lacks chunks with parts of .*{'down_proj'}"),
    "no place": (no_place, "does not say where the chunk of .*linear_fc2"),
    "same bytes": (same_bytes, "share bytes of __"),
    "some of the same bytes": (share_some_bytes, "share bytes of __"),
    "exchanged": (exchange, "__.*chunk of .*router.* holds torch.float32 of shape|__.*chunk of .*norm.* holds"),
    "other type": (other_type, r"linear_fc2.* holds torch.float32 of shape"),
    "no type": (no_type, ".metadata is damaged"),
    "other shape": (other_shape, r"linear_fc2.weight with shape \[4, 4, 8, 7\], where config.json gives"),
    "words for numbers": (words_for_numbers, ".metadata is damaged"),
    "renamed key": (surplus, "lacks decoder.final_layernorm.weight"),
    "surplus key": (extra, "holds decoder.extra.weight, which a qwen3_moe model"),
    "a number as key": (no_key, ".metadata does not say where the chunk of 7 "),
    "no table": (no_table, ".metadata is damaged"),
    "no places": (no_places, "is not the table of contents"),
    "no tensor": (no_metadata_of_a_tensor, ".metadata is damaged"),
    "chunk behind the end": (swap_box(offsets=torch.Size((0, 0, 0, 6))), ".metadata is damaged.*has a chunk at"),
    "chunk before the beginning": (swap_box(offsets=torch.Size((-1, 0, 0, 0))), ".metadata is damaged.*a chunk at"),
    "chunk of few dimensions": (swap_box(offsets=torch.Size((0, 0))), ".metadata is damaged"),
    "chunk of a negative size": (swap_box(sizes=torch.Size((-4, -4, 8, 6))), ".metadata is damaged.*has a chunk at"),
    "smaller chunk": (swap_box(sizes=torch.Size((4, 4, 8, 5))), r"holds torch.float32 of shape \[4, 4, 8, 6\]|lacks"),
    "negative offset": (change_place(offset=-1), ".metadata is damaged.*begins at -1"),
    "offset in words": (change_place(offset="0"), ".metadata is damaged"),
    "offset with a fraction": (change_place(offset=0.5), ".metadata is damaged"),
    "no offset": (change_place(offset=None), ".metadata is damaged"),
    "negative length": (change_place(length=-1), ".metadata is damaged"),
    "no length": (change_place(length=0), ".metadata is damaged.*has 0 bytes"),
    "behind the end of the file": (change_place(offset=2**40), "is truncated: it has"),
    "absolute path": (change_place(relative_path="/etc/passwd"), "names /etc/passwd, which leads out of the folder"),
    "path out": (change_place(relative_path="../huggingface/config.json"), "which leads out of the folder"),
    "path in and out": (change_place(relative_path="a/../../x"), "which leads out of the folder"),
    "missing file": (change_place(relative_path="gone"), "names gone, which is missing; copy it again"),
    "a folder": (change_place(relative_path="."), "which is missing"),
    "a name that is too long": (change_place(relative_path="x" * 5000), "which is missing"),
    "a name with a zero": (change_place(relative_path="x\0y"), "which is missing"),
    "no file": (change_place(relative_path=None), ".metadata is damaged"),
    "a file in bytes": (change_place(relative_path=b"__0_0.distcp"), ".metadata is damaged"),
    "compressed": (change_place(transform_descriptors=["zstd"]), "is stored as .*zstd.*save it plainly"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_table_that_contradicts_itself_or_the_files_is_refused(name, megatron, tmp_path):
    change, message = CHANGES[name]
    table = read_table(megatron / "release")
    change(table)
    write_table(megatron / "release", table)
    assert_refused(export, megatron, tmp_path / "hf", message)


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_another_file_is_refused(content, megatron, tmp_path):
    (megatron / "release/.metadata").write_bytes(content)
    assert_refused(export, megatron, tmp_path / "hf", ".metadata is (damaged|not the table of contents)")


def test_a_truncated_table_is_refused(megatron, tmp_path):
    content = (megatron / "release/.metadata").read_bytes()
    for length in range(0, len(content) - 1, len(content) // 50):
        (megatron / "release/.metadata").write_bytes(content[:length])
        assert_refused(export, megatron, tmp_path / "hf", ".metadata is damaged")


@st.composite
def damages(draw):
    """Some bytes of a file overwritten, left out or doubled."""
    where, length = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["bit", "bit", "bytes", "left out", "doubled"]))
    bit, new = draw(st.integers(0, 7)), draw(st.binary(min_size=length, max_size=length))

    def damage(content: bytes) -> bytes:
        start = int(where * len(content))
        old = content[start : start + length]
        replaced = {"bit": bytes([old[0] ^ 1 << bit]) + old[1:], "bytes": new, "left out": b"", "doubled": old * 2}[
            kind
        ]
        return content[:start] + replaced + content[start + length :]

    return damage


@pytest.fixture(scope="module")
def damaged(original, tmp_path_factory):
    """A checkpoint whose files are links, except for what an example overwrites."""
    folder = tmp_path_factory.mktemp("damaged")
    for path in original.rglob("*"):
        if path.is_file() and path.name not in (".metadata", "common.pt"):
            (folder / path.relative_to(original)).parent.mkdir(exist_ok=True)
            (folder / path.relative_to(original)).symlink_to(path)
    return folder


@given(damage=damages())
@settings(max_examples=100)
def test_any_damage_is_refused_or_changes_nothing(original, damaged, damage):
    target = damaged / "hf"
    shutil.rmtree(target, ignore_errors=True)
    (damaged / "release/.metadata").write_bytes(damage((original / "release/.metadata").read_bytes()))
    (damaged / "release/common.pt").write_bytes((original / "release/common.pt").read_bytes())
    modules, before = set(sys.modules), everything_in(damaged)
    try:
        export(damaged, target)
    except UserError:
        assert everything_in(damaged) == before
    else:
        assert content_of(target) == contents(huggingface_tensors(MODELS["qwen3_moe"]))
    assert set(sys.modules) == modules


@given(damage=damages())
@settings(max_examples=200)
def test_a_damaged_common_state_is_refused_or_a_table(original, damaged, damage):
    (damaged / "release/.metadata").write_bytes((original / "release/.metadata").read_bytes())
    (damaged / "release/common.pt").write_bytes(damage((original / "release/common.pt").read_bytes()))
    with suppress(UserError):
        assert isinstance(TorchDistCheckpoint(damaged / "release").common, dict)


def test_a_common_state_that_is_not_there_or_empty_is_refused(megatron):
    path = megatron / "release/common.pt"
    path.unlink()
    with pytest.raises(UserError, match=r"has no common.pt"):
        _ = TorchDistCheckpoint(megatron).common
    for content in (b"", b"words", saved([1])):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"common.pt (is empty|is damaged|holds no table)"):
            _ = TorchDistCheckpoint(megatron).common


def test_what_is_written_is_read_by_torch_and_by_us(original, tmp_path):
    found = read_metadata(original / "release")
    (tmp_path / "copy").mkdir()
    for path in (original / "release").glob("*.distcp"):
        (tmp_path / "copy" / path.name).symlink_to(path)
    write_metadata(tmp_path / "copy", found)
    assert read_metadata(tmp_path / "copy") == found
    ours, theirs = read_table(tmp_path / "copy"), read_table(original / "release")
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / "copy")
    assert reader.read_metadata().state_dict_metadata == theirs.state_dict_metadata
