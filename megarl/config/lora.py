"""The `lora` group of a configuration: conversion to options of the Megatron ranks, and incompatible choices."""

from pathlib import Path

from converters.architectures import Lora
from converters.errors import UserError
from converters.formats.peft import read_adapter_config, read_dropout
from megarl.config.direct_refit import asked_of_direct
from megarl.schema import LoraConfig, MegarlConfig
from megatron_ext.options.options import AdapterOptions


def adapter_options(config: LoraConfig, seed: int) -> AdapterOptions | None:
    """The adapter that a configuration trains; None if it trains the weights.

    Raises UserError for a folder without an adapter, or with one that contradicts the rest of the group.
    """
    if config.path is None:
        if not config.rank:
            return None
        lora = Lora(config.rank, config.alpha, tuple(config.target_modules))
        return AdapterOptions(lora, seed, merge=config.merge)
    lora = read_adapter_config(Path(config.path))
    plain = LoraConfig()
    said = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": list(lora.target_modules)}
    for name, value in said.items():
        if (asked := getattr(config, name)) not in (value, getattr(plain, name)):
            raise UserError(
                f"lora.{name}={asked}, and the adapter in lora.path={config.path} has {value}: leave it out"
            )
    return AdapterOptions(lora, seed, Path(config.path), config.merge)


def without_dropout(config: LoraConfig) -> str | None:
    """A warning if an adapter trained with dropout continues without: its log-probs stay the same, its training not."""
    if config.path is None or not (dropout := read_dropout(Path(config.path))):
        return None
    return f"the adapter in lora.path={config.path} has lora_dropout={dropout:g}, and goes on without dropout"


def without_adapter(config: LoraConfig) -> str | None:
    """A warning if training continues an adapter, so that the policy does not start equal to its reference."""
    if config.path is None:
        return None
    return (
        f"the reference is the model without the adapter in lora.path={config.path}, from which the policy begins: for"
        " a reference with it, name the model that its run wrote beside it in model.path, and lora.rank in its place"
    )


def check_lora(config: MegarlConfig) -> None:
    """Raise UserError for choices that are incompatible with an adapter, and for adapter options without an adapter."""
    adapter = adapter_options(config.lora, config.loop.seed)
    if adapter is None:
        plain = LoraConfig()
        for name in ("alpha", "target_modules", "merge"):
            if getattr(config.lora, name) != getattr(plain, name):
                raise UserError(
                    f"lora.{name} is set, and with lora.rank=0 no adapter is trained: set lora.rank, or leave it out"
                )
        return
    if config.algorithm.refresh_reference_every:
        raise UserError(
            "algorithm.refresh_reference_every makes the policy the reference, and with lora.rank above 0 the reference"
            " is the model without its adapter: leave out one of the two"
        )
    if config.megatron.get("moe_router_bias_update_rate"):
        raise UserError(
            "megarl would train an adapter alone, and megatron.moe_router_bias_update_rate changes the routers of the"
            " model beside it: leave it out"
        )
    if not config.lora.merge:
        _check_alone(config)


def _check_alone(config: MegarlConfig) -> None:
    """Raise UserError for choices that are incompatible with sending only an adapter to the engines."""
    alone = "lora.merge=false sends the adapter alone"
    for key in asked_of_direct(config.refit):
        raise UserError(f"{alone}, whole and by the engines' loader, and {key} is for weights: leave it out")
    if config.model.megatron_checkpoint is not None:
        raise UserError(
            f"{alone}, beside weights of model.path, and with model.megatron_checkpoint it is trained beside others:"
            " export that to HuggingFace as model.path, or set lora.merge=true"
        )


def refuse_lora(config: MegarlConfig) -> None:
    """Raise UserError for an adapter in a command that trains the whole model: a new head has no use for one."""
    if adapter_options(config.lora, config.loop.seed) is not None:
        raise UserError(
            "lora.rank above 0 is for language models, and a reward model has a head to train: leave it out"
        )
