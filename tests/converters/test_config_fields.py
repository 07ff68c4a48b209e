"""No field of a config.json is passed over by accident: each is read, or known not to change the model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from released_configs import RELEASED as RELEASED_LATENT
from test_released_models import RELEASED

from converters.architectures import read_architecture
from megarl.quickstart.tiny_models import TINY_MODELS, write_tiny_model

WITHOUT_EFFECT = {
    # About the files (the weights are read by what it says of their type), the tokens and the way of running.
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "pretraining_tp"),
    # About training: the initial weights, dropout, and losses beside the model's.
    *("initializer_range", "attention_dropout", "router_aux_loss_coef", "router_jitter_noise"),
    *("aux_loss_alpha", "seq_aux"),
}
# Fields that say nothing where there is a field of this name.
WITHOUT_EFFECT_BESIDE = {
    "use_sliding_window": {"sliding_window", "max_window_layers"},
    "kv_lora_rank": {"num_key_value_heads", "head_dim", "qk_head_dim"},
}


CONFIGS = {name: config for name, (config, *_) in RELEASED.items()} | {
    name: RELEASED_LATENT[name] for name in ("DeepSeek-V2", "DeepSeek-V3", "Moonlight", "Kimi-K2")
}


class Recording(Mapping[str, Any]):
    """The fields of a config.json, and which of them were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields, self.read = fields, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def passed_over(config: Mapping[str, Any]) -> set[str]:
    recording = Recording(config)
    read_architecture(recording)
    without_effect = WITHOUT_EFFECT.union(*(names for field, names in WITHOUT_EFFECT_BESIDE.items() if field in config))
    return config.keys() - recording.read - without_effect


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_a_released_config_is_read(name: str) -> None:
    assert passed_over(CONFIGS[name]) == set()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_field_that_transformers_writes_is_read(name: str, tmp_path: Path) -> None:
    write_tiny_model(name, tmp_path)
    assert passed_over(json.loads((tmp_path / "config.json").read_text())) == set()


def test_a_field_that_nobody_reads_is_noticed() -> None:
    assert passed_over({**CONFIGS["Mixtral-8x7B"], "residual_multiplier": 0.5}) == {"residual_multiplier"}
