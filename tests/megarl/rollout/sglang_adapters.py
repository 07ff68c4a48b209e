"""Adapters of the server that stands in for SGLang: the part of its LoRAManager that a worker calls, and its rules."""

from types import SimpleNamespace
from uuid import uuid4

import torch

SEEN = "base_model.model.model.layers.0.mlp.gate_proj"
"""The one matrix of which the stand-in sees the adapter."""
JOINED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
JOINED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
MODULES = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


class Adapters:
    def __init__(self, config, arguments):
        self.lora_refs, self.configs = {}, {}
        self._loaded, self._filled = {}, {}
        self._rank = arguments["max_lora_rank"]
        self._slots = arguments["max_loras_per_batch"]
        self._is_strict = arguments["lora_strict_loading"]
        self._targets = {JOINED.get(name, name) for name in arguments["lora_target_modules"]}
        heads = SimpleNamespace(
            head_size=config["head_dim"],
            total_num_heads=config["num_attention_heads"],
            total_num_kv_heads=config["num_key_value_heads"],
        )
        self.lora_modules = [
            {
                f"model.layers.{layer}.{module}": SimpleNamespace(base_layer=heads)
                for module in MODULES
                if module.split(".")[-1] in self._targets
            }
            for layer in range(config["num_hidden_layers"])
        ]
        self._rows = {
            "qkv_proj": (heads.total_num_heads + 2 * heads.total_num_kv_heads) * heads.head_size,
            "gate_up_proj": 2 * config["intermediate_size"],
        }

    def load_lora_adapter_from_tensors(self, reference, tensors, config):
        try:
            self._load(reference, tensors, config)
        except (ValueError, KeyError) as error:
            return SimpleNamespace(success=False, error_message=str(error))
        return SimpleNamespace(success=True, error_message="")

    def unload_lora_adapter(self, reference):
        for of_all in (self.lora_refs, self.configs, self._loaded, self._filled):
            of_all.pop(reference.lora_id, None)
        return SimpleNamespace(success=True, error_message="")

    def fetch_new_loras(self, wanted):
        """Fill slots, which then hold what was loaded at that moment."""
        assert len(wanted) <= self._slots
        self._filled = {each: self._filled.get(each) for each in wanted}
        for each in wanted:
            if self._filled[each] is None:
                self._filled[each] = self._placed(each)

    def adapted(self, name, hidden):
        """The embedding of a token, moved by an adapter that a request names."""
        number = self.number_of(name)
        self.fetch_new_loras({number})
        config = self.configs[number].hf_config
        return last_token_adapted(hidden, self._filled[number], config["lora_alpha"] / config["r"])

    def number_of(self, name):
        """The number of the adapter of this name, None where there is none."""
        return next((each.lora_id for each in self.lora_refs.values() if each.lora_name == name), None)

    def _load(self, reference, tensors, config):
        if self.number_of(reference.lora_name) is not None:
            raise ValueError(f"Failed to load LoRA adapter {reference.lora_name} because it is already loaded")
        if (
            config["r"] > self._rank
            or not {JOINED.get(name, name) for name in config["target_modules"]} <= self._targets
        ):
            raise ValueError(f"LoRA adapter {reference.lora_name} is incompatible with the current LoRA memory pool")
        self._loaded[reference.lora_id] = (dict(tensors), joined(tensors))
        self.configs[reference.lora_id] = SimpleNamespace(hf_config=config)
        self.lora_refs[reference.lora_id] = reference

    def _placed(self, number):
        tensors, as_loaded = self._loaded[number]
        skipped = {name for name in as_loaded if not any(target in name for target in self._targets)}
        if skipped and self._is_strict:
            raise ValueError(f"LoRA adapter '{number}': {len(skipped)} weight(s) skipped because they did not match")
        for name, tensor in as_loaded.items():
            module = name.split(".")[-3]
            if ".lora_B." in name and module in self._rows:
                assert len(tensor) == self._rows[module]
        return {name: tensor for name, tensor in tensors.items() if name not in skipped}


def joined(tensors):
    """The adapter under SGLang's names: `LoRAAdapter.normalize_qkv_proj` and `normalize_gate_up_proj`."""
    found = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            others = [name.replace(".q_proj.", f".{other}.") for other in ("k_proj", "v_proj")]
            # As there: without an adapter of v_proj this is a KeyError.
            of_keys = found.get(others[0], torch.zeros_like(found[others[1]]))
            found[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat([found[name], of_keys, found[others[1]]])
            for each in (name, *others):
                found.pop(each, None)
        elif ".gate_proj." in name:
            up = name.replace(".gate_proj.", ".up_proj.")
            of_up = found.pop(up, torch.zeros_like(found[name]))
            found[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([found.pop(name), of_up])
    return found


def last_token_adapted(hidden, tensors, scale):
    """The embeddings of tokens, moved by what the stand-in sees of an adapter; by nothing where there is none."""
    if f"{SEEN}.lora_A.weight" not in tensors:
        return hidden
    a, b = (tensors[f"{SEEN}.lora_{factor}.weight"] for factor in "AB")
    return hidden + scale * (hidden @ a.T @ b.T)[..., : hidden.shape[-1]]


def reference_to(name):
    """A name that a worker is told, with a number that no other has."""
    return SimpleNamespace(lora_id=uuid4().hex, lora_name=name)
