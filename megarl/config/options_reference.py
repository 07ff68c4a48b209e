"""Writes docs/options.md from the tables of options: `python -m megarl.config.options_reference docs/options.md`."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.config.renamed_keys import OWNED
from megarl.rollout import ENGINES
from megarl.rollout.kind import REPLAY, EngineKind
from megatron_ext.options import model_fields, supported_options
from megatron_ext.options.arguments import fields_of_groups
from megatron_ext.options.refusal import Refusal
from megatron_ext.options.supported_options import DEEPEP, DETERMINISTIC, FULLY_SHARDED, NEEDS, ON_HOST

_HEADER = """# Options of Megatron and of the engine

Made from `megatron_ext/options/supported_options.py`, `megatron_ext/options/model_fields.py` and the tables of each
engine (`megarl/rollout/ENGINE/kind.py`) by `make docs`; change them.

Every option of megatron-core and of an engine can be given by its own name (`megatron.NAME`, or Megatron's flag
`--name`; `rollout.engine_args.NAME`). It is in one of these groups:

- **works and tested**: a test of this repository runs it;
- **refused**: training would fail or be wrong with it, and the reason is said before anything starts;
- **follows from the model**: `config.json` says it. Flags copied from a Megatron script may repeat it; another value is
  refused, as the trainer would be another model than the engines have;
- **passes through**: all others reach megatron-core or the engine as they are. No test here vouches
  for them.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    return (
        "\n".join([_HEADER, *_megatron(), *(line for kind in ENGINES.values() for line in ("", *_engine(kind)))]) + "\n"
    )


def _megatron() -> list[str]:
    lines = ["## Megatron: works and tested", "", "| option | test below `tests/` |", "|---|---|"]
    lines += [f"| `{name}` | `{test}` |" for name, test in supported_options.TESTED.items()]
    lines += ["", "## Megatron: refused", "", *_refusals(supported_options.REFUSED)]
    lines += [
        f"| `{name}` | only with {' and '.join(f'`{each}=true`' for each in needed)} | |"
        for name, needed in NEEDS.items()
    ]
    lines += [
        f"| `{name}` | Not with `{FULLY_SHARDED}`: {each.reason} | {each.others} |"
        for name, each in supported_options.BESIDE_FSDP2.items()
    ]
    lines += [
        f"| `{name}` | Not with `{DETERMINISTIC}`: {each.reason} | {each.others} |"
        for name, each in supported_options.BESIDE_DETERMINISTIC.items()
    ]
    lines += [
        f"| `{name}` | Not with `{ON_HOST}`: {each.reason} | {each.others} |"
        for name, each in supported_options.BESIDE_CPU_OFFLOAD.items()
    ]
    lines += [
        f"| `{name}` | Not with `optimizer_offload_fraction` below 1, `use_precision_aware_optimizer` and"
        f" `grad_reduce_in_fp32=false`: {each.reason} | {each.others} |"
        for name, each in supported_options.BESIDE_PART_ON_HOST.items()
    ]
    lines += [
        f"| `{name}` | Not with an `fp8_recipe` but `delayed`, unless `main_params_dtype` is fp16: {each.reason} |"
        f" {each.others} |"
        for name, each in supported_options.BESIDE_RECIPE.items()
    ]
    lines += [
        f"| `{name}` | Not where the Python of a rank cannot import `{DEEPEP}`: {each.reason} | {each.others} |"
        for name, each in supported_options.WITHOUT_DEEPEP.items()
    ]
    model = sorted({*model_fields.MODEL_FIELDS, *model_fields.LATENT_ATTENTION_FIELDS})
    lines += ["", "## Megatron: follows from the model", "", f"{_names(model)}; and whatever else", ""]
    lines[-2] += " the architecture sets (`transformer_config` in `converters/architectures/`), such as `num_layers`,"
    lines[-2] += f" `layernorm_epsilon` and dropout; but not {_names(model_fields.MODEL_CHOICES)}."
    known = {*supported_options.TESTED, *supported_options.REFUSED, *model, *OWNED, *NEEDS}
    lines += ["## Megatron: passes through"]
    for group, fields in fields_of_groups().items():
        if untested := [name for name in fields if name not in known and not name.startswith("_")]:
            lines += ["", f"{_CLASSES[group]}: {_names(untested)}."]
    return lines


_CLASSES = {
    "parallel": "Parallel sizes",
    "transformer": "TransformerConfig (some of them follow from the device, the parallel sizes and the packing)",
    "optimizer": "OptimizerConfig",
    "distributed": "DistributedDataParallelConfig",
    "scheduler": "The scheduler",
}


def _engine(kind: EngineKind) -> list[str]:
    lines = [f"## {kind.title}: works and tested", "", "| argument | test below `tests/` |", "|---|---|"]
    lines += [f"| `{name}` | `{test}` |" for name, test in kind.tested.items()]
    refused = [
        *_refusals(kind.refused),
        *(
            f"| `{name}` | Not with `{REPLAY}`: {each.reason} | {each.others} |"
            for name, each in kind.beside_returned_experts.items()
        ),
    ]
    return [*lines, "", f"## {kind.title}: refused", "", *refused] if kind.refused else lines


def _refusals(refused: Mapping[str, Refusal]) -> list[str]:
    rows = (f"| `{name}` | {_sentence(each.reason)} | {each.others} |" for name, each in refused.items())
    return ["| option | why | allowed |", "|---|---|---|", *rows]


def _sentence(reason: str) -> str:
    return reason[0].upper() + reason[1:]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
