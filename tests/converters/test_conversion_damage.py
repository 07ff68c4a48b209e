"""Any damage of the bytes around tensors is refused, or changes no tensor."""

from contextlib import suppress
from pathlib import Path

import pytest
from changed_folders import INDEX
from conversions import MODELS, content_of, contents, convert, export, random_tensors, write_model
from hypothesis import given, settings
from test_torch_dist_metadata import damages

from converters.errors import UserError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = {**MODELS["qwen3"], "num_hidden_layers": 2}
    tensors = random_tensors(config)
    return write_model(tmp_path_factory.mktemp("small") / "hf", config, tensors, files=2), contents(tensors)


def linked(source: Path, target: Path, damaged: str, content: bytes) -> None:
    """A copy of which one file has another content."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    (target / damaged).unlink()
    (target / damaged).write_bytes(content)


@pytest.mark.parametrize("file", ["config.json", INDEX, "model-1.safetensors"])
@settings(max_examples=120)
@given(damage=damages())
def test_any_damage_beside_the_elements_is_refused_or_changes_no_tensor(file, small, tmp_path_factory, damage):
    source, expected = small
    folder = tmp_path_factory.mktemp("damaged")
    content = (source / file).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little") if file.endswith(".safetensors") else len(content)
    linked(source, folder / "hf", file, damage(content[:end]) + content[end:])
    with suppress(UserError):
        convert(folder / "hf", folder / "there/megatron")
        export(folder / "there/megatron", folder / "there/back")
        assert content_of(folder / "there/back") == expected
        return
    assert [path.name for path in folder.iterdir()] == ["hf"]


@settings(max_examples=60)
@given(damage=damages())
def test_any_damage_of_a_manifest_is_refused_or_changes_no_tensor(megatron_original, tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("damaged")
    content = (megatron_original / "megarl_manifest.json").read_bytes()
    linked(megatron_original, folder / "megatron", "megarl_manifest.json", damage(content))
    with suppress(UserError):
        export(folder / "megatron", folder / "there/hf")
        assert content_of(folder / "there/hf").keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
        return
    assert [path.name for path in folder.iterdir()] == ["megatron"]
