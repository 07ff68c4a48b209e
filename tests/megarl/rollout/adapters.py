"""Adapters of a model for tests of engines: folders as PEFT writes them; the reference is PEFT or merged weights."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang_adapters import last_token_adapted
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.architectures import Lora, adapter_architecture, read_architecture
from converters.architectures.lora import base_name
from converters.formats.peft import create_adapter, finish_adapter
from converters.formats.safetensors import CONFIG, open_for_writing, partial_folder, read_json
from converters.formats.safetensors.reader import SINGLE_FILE


def write_adapter(model: Path, folder: Path, lora: Lora, seed: int) -> dict[str, Tensor]:
    """Write an adapter of which A and B are both random, so that it changes what is sampled."""
    adapter, partial = adapter_architecture(read_architecture(read_json(model / CONFIG)), lora), partial_folder(folder)
    create_adapter(partial, adapter.hf_shapes, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    views = open_for_writing(partial)
    for view in views.values():
        view.copy_(0.1 * torch.randn(view.shape, generator=generator))
    tensors = {name: view.clone() for name, view in views.items()}
    finish_adapter(partial, folder, adapter, lora)
    return tensors


class Adapted:
    """A model and two adapters of it: their tensors, and the model with each in PEFT."""

    def __init__(self, model: Path, folder: Path, lora: Lora) -> None:
        self.model, self.lora = model, lora
        self._folders = [folder / str(seed) for seed in range(2)]
        self.tensors: list[Mapping[str, Tensor]] = [
            write_adapter(model, each, lora, seed) for seed, each in enumerate(self._folders)
        ]
        self._load()

    def _load(self) -> None:
        # Not when other tests are collected: it takes seconds.
        from peft import PeftModel

        self._adapted = [
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32), each)
            for each in self._folders
        ]

    @torch.no_grad()
    def log_probs(self, adapter: int, token_ids: list[int]) -> Tensor:
        """log_softmax of the logits of all tokens of a sequence: [tokens, vocabulary]."""
        return self._adapted[adapter].eval()(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    def greedy(self, adapter: int, prompt: list[int], tokens: int) -> list[int]:
        """The greedy answer, end tokens or not."""
        found = list(prompt)
        for _ in range(tokens):
            found.append(int(self.log_probs(adapter, found)[-1].argmax()))
        return found[len(prompt) :]


class AdaptedByMerging(Adapted):
    """A model and two adapters of it, of which PEFT drops some: B A is added to the weights, in float32."""

    def _load(self) -> None:
        self._adapted = []
        for tensors, folder in zip(self.tensors, self._folders, strict=True):
            merged = folder.with_name(f"{folder.name}_merged")
            shutil.copytree(self.model, merged)
            weights = load_file(merged / SINGLE_FILE)
            for name, a in tensors.items():
                if ".lora_A." in name:
                    weights[base_name(name)] += self.lora.scale * tensors[name.replace(".lora_A.", ".lora_B.")] @ a
            save_file(weights, merged / SINGLE_FILE, metadata={"format": "pt"})
            self._adapted.append(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))


class AdaptedStandIn(Adapted):
    """A model and two adapters of it, for the model of SGLang's stand-in, which sees the last token alone."""

    def _load(self) -> None:
        tensors = load_file(self.model / "model.safetensors")
        self._embeddings, self._output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    def log_probs(self, adapter: int, token_ids: list[int]) -> Tensor:
        """See `Adapted.log_probs`."""
        scale = self.lora.alpha / self.lora.rank
        hidden = last_token_adapted(self._embeddings[token_ids], self.tensors[adapter], scale)
        return (hidden @ self._output.T).log_softmax(-1)
