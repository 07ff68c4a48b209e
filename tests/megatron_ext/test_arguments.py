"""Megatron's options: what is read from the sources is what the classes have, and flags end as the same options."""

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from converters.errors import UserError
from megatron_ext import device
from megatron_ext.options.arguments import (
    CLASSES,
    SCHEDULER_FIELDS,
    check_options,
    megatron_fields,
    parse_flags,
    split_options,
)
from megatron_ext.options.dataclass_fields import read_fields

device.install()


@pytest.mark.parametrize("where", CLASSES.values(), ids=CLASSES)
def test_fields_read_from_source_are_those_of_the_class(where: tuple[str, str]) -> None:
    module, name = where
    real = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name)) if field.init}
    assert set(read_fields(module, name)) == real


def test_every_default_of_megatron_is_accepted_by_the_type_read_for_it() -> None:
    for module, name in CLASSES.values():
        types = read_fields(module, name)
        for field in dataclasses.fields(getattr(importlib.import_module(module), name)):
            if isinstance(field.default, bool | int | float | str) and types[field.name].kinds:
                assert types[field.name].convert(field.default) == field.default, field.name


def test_scheduler_fields_reach_the_scheduler() -> None:
    values = {"lr_warmup_init": 0.5, "lr_warmup_steps": 2, "lr_decay_steps": 4, "lr_decay_style": "linear"}
    assert set(values) <= set(SCHEDULER_FIELDS)
    assert rates(values, total_steps=10) == [0.5, 0.75, 1.0, 0.5, 0.0]


def test_a_run_that_is_shorter_than_its_warm_up_ends_within_it() -> None:
    assert rates({"lr_warmup_steps": 8}, total_steps=2) == [0.0, 0.125, 0.25, 0.375, 0.5]


def rates(values: dict[str, Any], total_steps: int) -> list[float]:
    """The learning rates of five steps, of which the highest is 1."""
    from megatron_ext.optimizer.optimizer import build_scheduler

    weight = torch.nn.Parameter(torch.zeros(1))
    # Megatron's scheduler asks its optimizer for nothing but the parameter groups.
    optimizer = torch.optim.SGD([{"params": [weight], "default_config": True}], lr=1.0)
    scheduler = build_scheduler(optimizer, {"lr": 1.0}, values, total_steps)  # type: ignore[arg-type]
    found = []
    for _ in range(5):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return found


@pytest.mark.parametrize(
    ("name", "given", "converted"),
    [
        ("tensor_model_parallel_size", 8, 8),
        ("tensor_model_parallel_size", 8.0, 8),
        ("lr", 1, 1.0),
        ("lr", None, None),
        ("sequence_parallel", True, True),
        ("recompute_granularity", "full", "full"),
        ("recompute_modules", ["core_attn"], ["core_attn"]),
        ("moe_layer_freq", [0, 1, 1], [0, 1, 1]),
        ("lr_decay_style", "cosine", "cosine"),
    ],
)
def test_values_take_the_type_of_their_field(name: str, given: object, converted: object) -> None:
    checked = check_options({name: given})[name]
    assert checked == converted
    assert type(checked) is type(converted)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tensor_model_paralel_size", 8, "did you mean megatron.tensor_model_parallel_size"),
        ("tensor_model_parallel_size", "eight", "takes int"),
        ("tensor_model_parallel_size", 1.5, "takes int"),
        ("tensor_model_parallel_size", float("inf"), "takes int"),
        ("tensor_model_parallel_size", float("nan"), "takes int"),
        ("sequence_parallel", 1, "takes bool"),
        ("recompute_granularity", "some", "takes full or selective or null"),
        ("recompute_modules", [1], "takes str"),
        ("attention_backend", "flsh", "takes flash or fused"),
        ("lr", "high", "takes null or float"),
        ("activation_func", "gelu", "cannot be given"),
        ("exp_avg_dtype", "half", "fp32 or bf16"),
        ("lr_decay_style", "cubic", "constant or linear"),
    ],
)
def test_wrong_options_are_named(name: str, value: object, says: str) -> None:
    with pytest.raises(UserError, match=f"megatron.{name}.*{says}"):
        check_options({name: value})


def test_options_go_to_every_class_that_has_them() -> None:
    options = check_options(
        {
            "expert_model_parallel_size": 2,
            "moe_router_topk": 4,
            "lr": 1e-5,
            "use_distributed_optimizer": True,
            "grad_reduce_in_fp32": False,
            "lr_warmup_steps": 10,
        }
    )
    assert split_options(options) == {
        "parallel": {"expert_model_parallel_size": 2},
        "transformer": {"moe_router_topk": 4},
        "optimizer": {"lr": 1e-5, "use_distributed_optimizer": True},
        "distributed": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": False},
        "scheduler": {"lr_warmup_steps": 10},
    }


def test_names_of_types_and_members_become_the_objects_megatron_compares_with() -> None:
    from megatron.core.transformer.enums import AttnBackend

    options = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "attention_backend": "unfused"}
    groups = split_options(check_options(options))
    assert groups["optimizer"] == {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
    assert groups["transformer"] == {"attention_backend": AttnBackend.unfused}


def test_flags_in_every_form() -> None:
    words = (
        "--tensor-model-parallel-size 8 loop.steps=3 --sequence-parallel --no-bias-dropout-fusion --lr=1e-5 "
        "--recompute-modules core_attn mlp data.shuffle=false --moe-layer-freq [0,1] --overlap-grad-reduce false"
    )
    options, others = parse_flags(words.split(), {})
    assert others == ["loop.steps=3", "data.shuffle=false"]
    assert options == {
        "tensor_model_parallel_size": "8",
        "sequence_parallel": "true",
        "bias_dropout_fusion": "false",
        "lr": "1e-5",
        "recompute_modules": "[core_attn,mlp]",
        "moe_layer_freq": "[0,1]",
        "overlap_grad_reduce": "false",
    }


def test_every_field_has_its_flag() -> None:
    for name, kind in megatron_fields().items():
        value = [] if "bool" in kind.kinds else ["1"]
        assert name in parse_flags([f"--{name.replace('_', '-')}", *value], {})[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tensor-model-paralel-size", "8"], "did you mean --tensor-model-parallel-size"),
        (["--no-sequence-paralel"], "did you mean --sequence-parallel"),
        (["--no-lr"], "neither megarl nor the installed megatron-core"),
        (["--lr"], "--lr needs a value"),
        (["--lr", "--sequence-parallel"], "--lr needs a value"),
        (["--lr", "loop.steps=1"], "--lr needs a value"),
        (["--train-iters", "5"], "--train-iters is not an option of megatron-core; here it is loop.steps"),
    ],
)
def test_wrong_flags_are_named(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_flags(words, {"train_iters": "here it is loop.steps"})
