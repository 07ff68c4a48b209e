import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.safetensors.header import read_header

INDEX = "model.safetensors.index.json"


def raw_file(path: Path, header: dict | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`a` and `b` in one file, `c` in another."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}, tmp_path / "one.safetensors")
    save_file({"c": torch.tensor(1.5, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shapes_types_config_and_boxes(folder):
    checkpoint = HuggingFaceCheckpoint(folder)
    assert checkpoint.config == {"model_type": "qwen3"}
    assert checkpoint.shapes == {"a": (2, 3), "b": (4,), "c": ()}
    assert checkpoint.dtypes == {"a": torch.float32, "b": torch.int64, "c": torch.bfloat16}
    assert checkpoint.read("a", Box((0, 1), (2, 3))).tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert checkpoint.read("b", Box((3,), (4,))).tolist() == [3]
    assert checkpoint.read("c", Box((), ())).item() == 1.5
    checkpoint.check({"a": (2, 3), "b": (4,), "c": ()})


def test_a_box_is_a_view_of_the_mapped_file(folder):
    checkpoint = HuggingFaceCheckpoint(folder)
    row = checkpoint.read("a", Box((1, 0), (2, 3)))
    whole = checkpoint.read("a", Box.whole((2, 3)))
    assert row.data_ptr() == whole.data_ptr() + 3 * 4


def test_misaligned_tensors_are_read(tmp_path):
    value = torch.tensor([1.25, -3.0])
    header = {"byte": entry("U8", [1], 0, 1), "float": entry("F32", [2], 1, 9)}
    raw_file(tmp_path / "model.safetensors", header, b"\x07" + value.numpy().tobytes())
    checkpoint = HuggingFaceCheckpoint(tmp_path)
    assert torch.equal(checkpoint.read("float", Box((0,), (2,))), value)
    assert checkpoint.read("byte", Box((0,), (1,))).item() == 7


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": (2, 3), "b": (4,), "c": (), "d": (1,)}, "lacks the tensor d, which its model has"),
        ({"a": (2, 3), "c": ()}, "one.safetensors holds the tensor b, which a model of this config.json does not have"),
        ({}, "one.safetensors holds the tensor a and 2 more"),
        (
            {"a": (3, 2), "b": (4,), "c": ()},
            r"one.safetensors holds a with shape \[2, 3\], where config.json gives \[3, 2\]",
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(folder, expected, message):
    with pytest.raises(UserError, match=message):
        HuggingFaceCheckpoint(folder).check(expected)


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_refused(folder, kept_bytes):
    path = folder / "one.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(UserError, match=r"one.safetensors is truncated"):
        HuggingFaceCheckpoint(folder)


def test_a_pointer_of_git_lfs_is_named(folder):
    (folder / "one.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1833776\n"
    )
    with pytest.raises(UserError, match=r"one.safetensors is only Git LFS's pointer to the file; run git lfs pull"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "one.safetensors"])
def test_a_link_to_what_is_missing_is_named(name, folder):
    for path in folder.glob("*.safetensors*"):
        if name != "one.safetensors" or path.name != INDEX:
            path.unlink()
    (folder / name).symlink_to("../blobs/gone")
    with pytest.raises(UserError, match=rf"{name} is a link to .*/blobs/gone, which is missing; download the model"):
        HuggingFaceCheckpoint(folder)


def test_a_file_with_bytes_to_spare_is_refused(folder):
    path = folder / "one.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(UserError, match=r"one.safetensors is too long: it has .* bytes, its header describes"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "a header that is not JSON"),
        (b"\xff\xfe{}", "a header that is not JSON"),
        (b"[]", "a header that is not a JSON object"),
        (b'{"a": {}, "a": {}}', "holds a twice"),
        ({"a": {"dtype": "F32"}}, "broken header: a is described by"),
        ({"a": []}, "broken header: a is described by"),
        ({"a": entry("F31", [1], 0, 4)}, "holds a in F31, which is not read here; give the model in bf16"),
        ({"b": entry("F8_E8M0", [8], 0, 8)}, "holds b in F8_E8M0, which is not read here"),
        ({"b": entry("F4", [16], 0, 8)}, "holds b in F4, which is not read here"),
        ({"a": {**entry("F32", [2], 0, 8), "dtype": 32}}, "broken header: a is described by"),
        ({"a": entry("F32", [2], 0, 4)}, "broken header: a is described by"),
        ({"a": entry("F32", [-1, -1], 0, 4)}, "broken header: a is described by"),
        ({"a": entry("F32", [1], -4, 0)}, "broken header: a is described by"),
        ({"a": entry("F32", [1], 4, 8)}, "the bytes of a do not follow"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, "the bytes of b do not follow"),
    ],
)
def test_a_broken_header_is_refused(tmp_path, header, message):
    raw_file(tmp_path / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(UserError, match=message):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, "names gone.safetensors, which is missing"),
        ({"a": "../outside.safetensors"}, "names ../outside.safetensors, which leads out of the folder"),
        ({"a": "/etc/passwd"}, "names /etc/passwd, which leads out of the folder"),
        ({"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"}, "says that c is in one.safetensors"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "holds b, which model.safetensors.index.json does not name"),
        (["a"], "has no weight_map"),
        ({"a": 1}, "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(folder, weight_map, message):
    write_index(folder, weight_map)
    with pytest.raises(UserError, match=message):
        HuggingFaceCheckpoint(folder)


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({"c": torch.zeros(1), "a": torch.zeros(1)}, folder / "two.safetensors")
    with pytest.raises(UserError, match=r"a is in both .*one.safetensors and .*two.safetensors"):
        HuggingFaceCheckpoint(folder)


def test_an_index_beside_a_single_file_is_refused(folder):
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"holds both model.safetensors and model.safetensors.index.json"):
        HuggingFaceCheckpoint(folder)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere is not a folder"):
        HuggingFaceCheckpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds neither model.safetensors nor"):
        HuggingFaceCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        ("{", "config.json is not JSON"),
        ("[1]", "config.json is not a JSON object"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(folder, content, message):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        _ = HuggingFaceCheckpoint(folder).config
