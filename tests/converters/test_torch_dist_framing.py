"""Chunks as torch.save frames them: what we write loads, what torch wrote is found, what is damaged is refused."""

import io
import mmap
import zipfile
from itertools import product

import pytest
import torch
from conversions import random_bits, raw
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from converters.errors import UserError
from converters.formats.torch_dist import frame
from converters.formats.torch_dist.chunk_data import ChunkData, locate
from converters.formats.torch_dist.framing import STORAGES

DTYPES = sorted(STORAGES.values(), key=str)
GIB = 2**30
GENERATOR = torch.Generator().manual_seed(1)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def mapped(content: bytes, before: int = 0, after: int = 0) -> mmap.mmap:
    file = mmap.mmap(-1, before + len(content) + after)
    file[before : before + len(content)] = content
    return file


def elements(file: mmap.mmap, data: ChunkData) -> bytes:
    return file[data.offset : data.offset + data.nbytes]


def framed(tensor: torch.Tensor) -> bytes:
    around = frame(tensor.dtype, tuple(tensor.shape))
    head, tail = around.around(crc32(raw(tensor)))
    assert (len(head), len(raw(tensor))) == (around.head_bytes, around.data_bytes)
    assert len(head) + len(raw(tensor)) + len(tail) == around.length
    return head + raw(tensor) + tail


@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(0, 200), st.integers(0, 99)
)
def test_a_framed_tensor_is_one_for_torch_and_for_zip(dtype, shape, before, after):
    values = torch.randint(0, 2, shape).to(dtype) if dtype is torch.bool else random_bits(shape, dtype, GENERATOR)
    blob = framed(values)
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert (loaded.dtype, loaded.shape, raw(loaded)) == (values.dtype, values.shape, raw(values))
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        assert archive.testzip() is None
    file = mapped(blob, before, after)
    data = locate(file, before, len(blob), "here")
    assert (data.dtype, data.shape, elements(file, data)) == (dtype, shape, raw(values))
    assert data.crc32 == crc32(raw(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "nbytes", [4 * GIB - 400, 4 * GIB - 4, 4 * GIB, 4 * GIB + 4, 9 * GIB], ids=lambda n: f"{n - 4 * GIB:+}"
)
def test_tensors_beyond_4_gib(nbytes, dtype, tmp_path):
    rows = nbytes // dtype.itemsize
    around = frame(dtype, (rows, 1))
    head, tail = around.around(0x1234_5678)
    first, last = torch.tensor([1.5], dtype=dtype), torch.tensor([-2.5], dtype=dtype)
    path = tmp_path / "chunk"
    with path.open("wb") as file:  # sparse: it takes a few blocks of the disk
        file.write(head + raw(first))
        file.seek(len(head) + nbytes - dtype.itemsize)
        file.write(raw(last) + tail)
    assert path.stat().st_size == around.length
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert (loaded.shape, loaded[0].item(), loaded[-1].item()) == ((rows, 1), 1.5, -2.5)
    assert loaded[rows // 2].item() == 0
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert (info.file_size, info.CRC) == (nbytes, 0x1234_5678)
        assert archive.read("archive/version") == b"3\n"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        data = locate(whole, 0, around.length, path)
        assert (data.offset, data.nbytes, data.shape) == (len(head), nbytes, (rows, 1))


@pytest.fixture(params=[True, False], ids=["with checksums", "without checksums"])
def _checksums(request):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(request.param)
    yield
    torch.serialization.set_crc32_options(before)


BASE = torch.arange(24.0).view(4, 6)
SAVED = {
    **{str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES},
    "rows of a larger one": BASE[1:3],
    "a row": BASE[2],
    "an element": BASE[3, 5],
    "a column, of which one row": BASE[1:2, 3:5],
    "a parameter": torch.nn.Parameter(BASE[:2]).data,
    "one that needs a gradient": BASE[1:].clone().requires_grad_(),
    "empty": torch.empty(0, 3),
    "of strides that do not matter": torch.empty(2, 1, 3).as_strided((2, 1, 3), (3, 17, 1)).fill_(2.0),
}


@pytest.mark.usefixtures("_checksums")
@pytest.mark.parametrize("name", SAVED)
def test_what_torch_saved_is_found(name):
    blob = saved(SAVED[name])
    file = mapped(b"before" + blob + b"after")
    data = locate(file, 6, len(blob), "here")
    expected = SAVED[name].detach()
    assert (data.dtype, data.shape, elements(file, data)) == (expected.dtype, tuple(expected.shape), raw(expected))


def test_a_file_saved_by_its_name_is_found(tmp_path):
    torch.save(BASE, tmp_path / "some.name.pt")  # the archive's folder is then called some.name
    file = mapped((tmp_path / "some.name.pt").read_bytes())
    assert elements(file, locate(file, 0, len(file), "here")) == raw(BASE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (BASE.T, "no contiguous tensor"),
        (BASE[:, :2], "no contiguous tensor"),
        (BASE[0, 0].expand(3), "no contiguous tensor"),
        ([BASE], "no tensor as torch.save writes it"),
        ({"weight": BASE}, "no tensor as torch.save writes it"),
        (torch.nn.Parameter(BASE), "no tensor as torch.save writes it"),
        (torch.ones(2, dtype=torch.complex64), "it has the storage"),
        (torch.ones(2).to(torch.float8_e4m3fn), "damaged, or not what its name says"),
        (
            torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (3,)),
            "damaged, or not what its name says",
        ),
        ("words", "it has no data/0"),
    ],
)
def test_other_things_are_refused(value, message):
    blob = saved(value)
    with pytest.raises(UserError, match=f"^here .*({message})"):
        locate(mapped(blob), 0, len(blob), "here")


def test_a_compressed_archive_is_refused():
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(BASE))) as archive,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as written,
    ):
        for name in archive.namelist():
            written.writestr(name, archive.read(name))
    assert torch.equal(torch.load(io.BytesIO(saved(BASE))), BASE)
    with pytest.raises(UserError, match="is compressed"):
        locate(mapped(buffer.getvalue()), 0, len(buffer.getvalue()), "here")


@pytest.mark.parametrize("write", [saved, framed], ids=["by torch", "by us"])
def test_any_flipped_bit_beside_the_elements_is_refused_or_changes_nothing(write):
    """Read by their checksum elements are safe; what says where they are has to be safe without reading them."""
    tensor = torch.arange(7, dtype=torch.int16)
    blob = write(tensor)
    whole = locate(mapped(blob), 0, len(blob), "here")
    positions = [p for p in range(len(blob)) if not whole.offset <= p < whole.offset + whole.nbytes]
    refused = 0
    for position, bit in product(positions, range(8)):
        damaged = mapped(blob)
        damaged[position] ^= 1 << bit
        try:
            data = locate(damaged, 0, len(blob), "here")
        except UserError:
            refused += 1
            continue
        assert (data.dtype, data.shape, elements(damaged, data)) == (whole.dtype, whole.shape, raw(tensor)), position
    assert refused > 2000


@pytest.mark.parametrize("write", [saved, framed], ids=["by torch", "by us"])
@pytest.mark.parametrize("field", [0, 26, 28, 30], ids=["signature", "length of the name", "of the rest", "name"])
def test_a_damaged_header_of_the_elements_is_refused(write, field):
    blob = write(BASE)
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        start = archive.getinfo("archive/data/0").header_offset
    damaged = mapped(blob)
    damaged[start + field] ^= 1
    with pytest.raises(UserError, match=r"here is damaged .*the header of data/0 is none"):
        locate(damaged, 0, len(blob), "here")


@pytest.mark.parametrize("write", [saved, framed], ids=["by torch", "by us"])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_truncated_chunk_is_refused(write, step):
    blob = write(torch.arange(7, dtype=torch.int16))
    for length in range(0, len(blob), max(step, len(blob) // 40)):
        with pytest.raises(UserError, match="here is damaged"):
            locate(mapped(blob), 0, length, "here")
        with pytest.raises(UserError, match="here is damaged"):
            locate(mapped(blob[: length + 1]), 0, len(blob), "here")
