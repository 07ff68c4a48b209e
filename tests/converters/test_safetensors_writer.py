import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from file_sizes import files_up_to
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from converters.errors import UserError
from converters.formats.safetensors import (
    HuggingFaceCheckpoint,
    create_checkpoint,
    finish,
    open_for_writing,
    partial_folder,
    stated_dtype,
    with_dtype,
)

SHAPES = {"b": (4, 3), "a": (5,), "bias": (7,), "c": (2, 2), "scalar": ()}
DTYPES = {name: torch.float32 if name == "bias" else torch.bfloat16 for name in SHAPES}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder to take the tokenizer and the like from."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "dtype": "float32", "name": "\\u00e9"}')
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    (folder / "model.safetensors").write_text("the old weights")
    (folder / "README.md").write_text("about the old weights")
    return folder


def values() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(DTYPES[name]) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("shard_size_bytes", "files"),
    [
        (10**9, {"model.safetensors": ["b", "a", "bias", "c", "scalar"]}),
        (
            40,
            {
                "model-00001-of-00002.safetensors": ["b", "a"],
                "model-00002-of-00002.safetensors": ["bias", "c", "scalar"],
            },
        ),
        (1, {f"model-0000{i}-of-00005.safetensors": [name] for i, name in enumerate(SHAPES, start=1)}),
    ],
)
def test_what_is_written_is_what_the_reference_library_reads(tmp_path, source, shard_size_bytes, files):
    folder, written = tmp_path / "out" / "export", values()
    partial = partial_folder(folder)
    create_checkpoint(partial, SHAPES, DTYPES, shard_size_bytes)
    for name, view in open_for_writing(partial).items():
        view.copy_(written[name])
    finish(partial, folder, copy_from=source)

    assert {path.name for path in folder.glob("*.safetensors")} == files.keys()
    for file_name, names in files.items():
        with safe_open(folder / file_name, "pt") as file:
            assert sorted(file.keys()) == sorted(names)
            assert file.metadata() == {"format": "pt"}
            assert all(torch.equal(file.get_tensor(name), written[name]) for name in names)
        header_bytes = int.from_bytes((folder / file_name).read_bytes()[:8], "little")
        assert header_bytes % 8 == 0
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"] == {name: file for file, names in files.items() for name in names}
        assert content["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in written.values())
    HuggingFaceCheckpoint(folder).check(SHAPES)


def test_the_rest_of_the_model_folder_comes_along(tmp_path, source):
    folder = tmp_path / "export"
    create_checkpoint(partial_folder(folder), SHAPES, DTYPES, 10**9)
    finish(partial_folder(folder), folder, copy_from=source)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (folder / "chat_template.jinja").read_text() == "chat_template.jinja"
    config = json.loads((folder / "config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": "bfloat16", "name": "é"}
    assert not partial_folder(tmp_path / "other").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]


def test_every_chat_template_comes_along(tmp_path, source):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    tokenizer.save_pretrained(source)
    assert (source / "additional_chat_templates/tool_use.jinja").is_file()
    folder = tmp_path / "export"
    create_checkpoint(partial_folder(folder), SHAPES, DTYPES, 10**9)
    finish(partial_folder(folder), folder, copy_from=source)
    assert PreTrainedTokenizerFast.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_weights_that_were_decoded_are_not_said_to_be_quantised(tmp_path, source):
    released = {"model_type": "qwen3", "torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(released))
    for folder, given in ((tmp_path / "read", None), (tmp_path / "given", released)):
        create_checkpoint(partial_folder(folder), SHAPES, DTYPES, 10**9)
        finish(partial_folder(folder), folder, copy_from=source, config=given)
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "qwen3", "torch_dtype": "bfloat16"}


def fill_rows(partial: Path, part: int, parts: int) -> None:
    for view in open_for_writing(partial).values():
        if view.dim():
            view[part::parts] = part + 1


def test_several_processes_fill_the_same_tensors(tmp_path, source):
    folder = tmp_path / "export"
    partial = partial_folder(folder)
    create_checkpoint(partial, SHAPES, DTYPES, 40)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=fill_rows, args=(partial, part, 2)) for part in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    finish(partial, folder, copy_from=source)
    for name, tensor in open_for_writing(folder).items():
        if name != "scalar":
            expected = torch.arange(SHAPES[name][0]) % 2 + 1
            assert torch.equal(tensor.flatten(1).mean(1) if tensor.dim() > 1 else tensor, expected.to(tensor.dtype))


def test_what_nobody_wrote_is_zero_and_left_overs_are_gone(tmp_path):
    partial = partial_folder(tmp_path / "export")
    create_checkpoint(partial, {"old": (3,)}, {"old": torch.float32}, 10**9)
    open_for_writing(partial)["old"].fill_(7)
    create_checkpoint(partial, SHAPES, DTYPES, 10**9)
    views = open_for_writing(partial)
    assert views.keys() == SHAPES.keys()
    assert not any(view.any() for view in views.values())


def test_an_existing_folder_is_never_overwritten(tmp_path, source):
    folder = tmp_path / "export"
    partial = partial_folder(folder)
    create_checkpoint(partial, SHAPES, DTYPES, 10**9)
    folder.mkdir()
    with pytest.raises(UserError, match=r"export exists; delete it or choose another folder"):
        partial_folder(folder)
    with pytest.raises(UserError, match=r"export exists"):
        finish(partial, folder, copy_from=source)
    assert not partial.exists()
    assert list(folder.iterdir()) == []


def test_only_partial_folders_are_cleared(tmp_path):
    (tmp_path / "precious").mkdir()
    with pytest.raises(ValueError, match=r"precious does not end in .partial"):
        create_checkpoint(tmp_path / "precious", SHAPES, DTYPES, 10**9)


def test_a_source_without_a_config_leaves_nothing_behind(tmp_path, source):
    (source / "config.json").unlink()
    folder = tmp_path / "export"
    create_checkpoint(partial_folder(folder), SHAPES, DTYPES, 10**9)
    with pytest.raises(UserError, match=r"config.json is missing"):
        finish(partial_folder(folder), folder, copy_from=source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_space_is_taken_before_anyone_writes(tmp_path):
    """A disk that fills up under a mapped file ends its writer by a signal, without a word."""
    partial = partial_folder(tmp_path / "export")
    create_checkpoint(partial, {"big": (2**18,)}, {"big": torch.float32}, 10**9)
    assert (partial / "model.safetensors").stat().st_blocks * 512 >= 2**20


def test_no_room_for_the_files_is_said_before_anything_is_written(tmp_path):
    partial = partial_folder(tmp_path / "export")
    with files_up_to(4096), pytest.raises(UserError, match=r"has no room for the checkpoint .*; free some space"):
        create_checkpoint(partial, {"big": (4096,)}, {"big": torch.float32}, 10**9)
    assert not partial.exists()


@pytest.mark.parametrize("keys", [(), ("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_a_config_says_the_type_that_its_weights_are_written_in(keys: tuple[str, ...]) -> None:
    config = dict.fromkeys(keys, "float32")
    assert stated_dtype(config) == ("float32" if keys else None)
    # Readers of either key find the same.
    assert with_dtype(config, torch.bfloat16) == dict.fromkeys(keys or ("dtype",), "bfloat16")
