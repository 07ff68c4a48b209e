"""`--megatron-args FILE`: translates a Megatron-LM script's arguments into options, and statements about the model."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import UserError, did_you_mean
from megarl.config.assignment import Assignment, override
from megarl.config.foreign.arguments import Argument, number_or_text, read_arguments
from megarl.config.foreign.megatron_flags import (
    KEYS,
    LEFT_OUT,
    MODEL,
    NEGATIVE,
    REFUSED,
    RENAMED,
    SAMPLES,
    SWITCHES,
    left_out,
)
from megatron_ext.options.arguments import megatron_fields, parse_flags
from megatron_ext.options.model_fields import LATENT_ATTENTION_FIELDS, MODEL_FIELDS

if TYPE_CHECKING:
    from converters.architectures import Architecture

_LAYERS_PER_STAGE = "num_layers_per_virtual_pipeline_stage"
_PIPELINE = "pipeline_model_parallel_size"


@dataclass
class MegatronScript:
    """Settings of a script, and its statements about the model."""

    assignments: list[Assignment] = field(default_factory=list)
    model: list[Argument] = field(default_factory=list)
    """Arguments that describe the model; `check_model` compares them with config.json."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> arguments that have no effect here."""
    uncertain: Mapping[str, list[str]] = field(default_factory=dict)
    """Reason -> places of arguments that the script may or may not add, and variables that it may set."""

    def notes(self) -> Iterator[str]:
        """One sentence per reason for which arguments were left out."""
        for reason, flags in self.left_out.items():
            yield f"left out, since {reason}: {' '.join(flags)}"
        for reason, found in self.uncertain.items():
            yield f"not sure, since {reason}: {' '.join(found)}"


def read_megatron_script(file: Path, environment: Mapping[str, str]) -> MegatronScript:
    """Translate a file. Raises UserError for an argument that neither Megatron-LM nor megatron-core has."""
    found = read_arguments(file, environment)
    script = MegatronScript(uncertain=found.uncertain)
    for argument in found.arguments:
        translate(argument, found.arguments, script)
    return script


def check_model(arguments: Iterable[Argument], model_path: str) -> None:
    """Raise UserError for the first argument that contradicts the config.json in `model_path`."""
    # Imported here, because it imports torch, which takes seconds that a script with errors need not wait.
    from converters.architectures import read_architecture
    from converters.formats.safetensors import CONFIG, read_json

    folder = Path(model_path)
    architecture = read_architecture(read_json(folder / CONFIG))
    for argument in arguments:
        difference = _difference(argument, architecture)
        if difference:
            given, said = difference
            raise UserError(
                f"{argument.where}: {argument.flag} says {given}, and config.json in {folder} says {said}: the trainer"
                " and the engines follow config.json; name the folder of the script's model in model.path, or leave the"
                " argument out"
            )


def translate(
    argument: Argument, others: Iterable[Argument], script: MegatronScript, of_slime: Iterable[str] = ()
) -> None:
    """Add one argument to `script`; `others` are those beside it. Raises UserError as `read_megatron_script` does.

    In a slime script, `of_slime` are the names of slime's arguments, one of which may have been meant.
    """
    name, fields = argument.name, megatron_fields()
    positive = name.removeprefix("no_")
    if positive in MODEL:
        script.model.append(argument)
    elif name in REFUSED:
        raise UserError(f"{argument.where}: {argument.flag} cannot be taken over: {REFUSED[name]}")
    elif name in SWITCHES:
        script.assignments += [_assignment(argument, f"megatron.{key}", v) for key, v in SWITCHES[name].items()]
    elif name in KEYS:
        script.assignments.append(_assignment(argument, *KEYS[name]))
    elif name in SAMPLES:
        script.assignments.append(_in_steps(argument, others))
    elif name == _LAYERS_PER_STAGE:
        script.assignments.append(_virtual_stages(argument, others))
    elif reason := left_out(name):
        script.left_out.setdefault(reason, []).append(argument.flag)
    elif (field_name := RENAMED.get(positive, positive)) in fields:
        no = "no_" if name != positive else ""
        options, _ = parse_flags([f"--{no}{field_name}", *argument.words], {})
        script.assignments += [_assignment(argument, f"megatron.{key}", value) for key, value in options.items()]
    else:
        of_slime, names = tuple(of_slime), (*fields, *RENAMED, *SWITCHES, *KEYS, *SAMPLES, *MODEL, *LEFT_OUT, *REFUSED)
        known = [each.replace("_", "-") for each in (*of_slime, *names)]
        advice = did_you_mean(name.replace("_", "-"), known, "--{}")
        raise UserError(
            f"{argument.where}: {argument.flag} is known neither to {'slime nor to ' if of_slime else ''}Megatron-LM's"
            f" training script nor to the installed megatron-core{advice or '; leave it out'}"
        )


def _assignment(argument: Argument, key: str, value: Any) -> Assignment:
    text = str(value).lower() if isinstance(value, bool) else value
    return Assignment(override(key, text), f"{argument.where} {argument.flag}")


def _in_steps(argument: Argument, others: Iterable[Argument]) -> Assignment:
    """Convert a number of samples to optimizer steps of --global-batch-size samples."""
    samples = _number(argument)
    (size,) = [_number(each) for each in others if each.name == "global_batch_size"][-1:] or [0]
    if samples and (not size or any(each.name == "rampup_batch_size" for each in others)):
        raise UserError(
            f"{argument.where}: {argument.flag} {samples} needs a --global-batch-size for the whole run beside it, as"
            f" optimizer steps are counted here: give {argument.flag.replace('samples', 'iters')} in its place"
        )
    return _assignment(argument, f"megatron.{SAMPLES[argument.name]}", -(-samples // size) if samples else 0)


def _number(argument: Argument) -> int:
    """The single value of an argument that is a count. Raises UserError for any other value, and for none."""
    words = argument.words
    if len(words) != 1 or not words[0].isdecimal():
        raise UserError(
            f"{argument.where}: {argument.flag} needs one whole number, and has {' '.join(words) or 'none'}"
        )
    return int(words[0])


def _virtual_stages(argument: Argument, others: Iterable[Argument]) -> Assignment:
    """Convert Megatron-LM's layers per virtual stage to megatron-core's virtual stages per rank."""
    sizes = {each.name: int(each.words[0]) for each in others if each.name in ("num_layers", _PIPELINE)}
    if len(sizes) < 2:
        raise UserError(
            f"{argument.where}: {argument.flag} needs --num-layers and --pipeline-model-parallel-size beside it; give"
            " --num-virtual-stages-per-pipeline-rank in its place"
        )
    (each,) = argument.words
    stages, rest = divmod(sizes["num_layers"], sizes[_PIPELINE] * int(each))
    if rest:
        raise UserError(
            f"{argument.where}: {argument.flag} {each} does not cut {sizes['num_layers']} layers over"
            f" {sizes[_PIPELINE]} pipeline stages evenly; give a number that does"
        )
    return _assignment(argument, "megatron.virtual_pipeline_model_parallel_size", stages)


def _difference(argument: Argument, architecture: "Architecture") -> tuple[str, str] | None:
    """The values of the argument and of config.json, if they differ."""
    if argument.unknown:
        return None
    name = MODEL.get(argument.name) or MODEL[argument.name.removeprefix("no_")]
    said = {**MODEL_FIELDS, **dict.fromkeys(LATENT_ATTENTION_FIELDS), **architecture.gpt_model}
    said |= architecture.transformer_config
    if name not in said or _is_not_read(name, said):
        return None
    given = _value(argument, said)
    known = _pattern(said[name], said["num_layers"]) if name == "moe_layer_freq" else said[name]
    # One group of experts is the same as none.
    nothing = (1, 0, None) if name in ("moe_router_group_topk", "moe_router_num_groups") else (0, None)
    same = given == known or (given in nothing and known in nothing)
    return None if same else (_in_words(given), _in_words(known))


def _is_not_read(name: str, said: Mapping[str, Any]) -> bool:
    """Whether Megatron ignores the field in such a model, so that scripts may set it to anything."""
    if name == "moe_router_pre_softmax":
        return said["moe_router_score_function"] != "softmax"
    if name in ("kv_channels", "num_query_groups", "rotary_percent"):
        return bool(said["multi_latent_attention"])
    if name in LATENT_ATTENTION_FIELDS and name not in ("rotary_base", "rotary_percent"):
        return not said["multi_latent_attention"]
    if name == "moe_layer_freq" or name.startswith("moe_"):
        return not said["num_moe_experts"]
    return False


def _value(argument: Argument, said: Mapping[str, Any]) -> Any:
    name = MODEL.get(argument.name)
    if name is None:
        return argument.name.removeprefix("no_") in NEGATIVE
    words = argument.words
    if not words:
        return argument.name not in NEGATIVE
    if name == "moe_layer_freq":
        return _pattern(_literal(words[0], argument), said["num_layers"])
    if len(words) > 1:
        return [_value_of(word) for word in words]
    return _value_of(words[0])


def _value_of(word: str) -> Any:
    value = number_or_text(word)
    return {"true": True, "false": False, "none": None}.get(word.lower(), value)


def _literal(text: str, argument: Argument) -> Any:
    """Parse a number, or a list in Megatron-LM's form: `[0]*3+[1]*58`."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() as number):
                return number
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval"))
    except (ValueError, TypeError, SyntaxError) as error:
        raise UserError(
            f"{argument.where}: {argument.flag} {text} is neither a number nor a list like [0]*3+[1]*58; write one"
        ) from error


def _pattern(frequency: Any, layers: int) -> list[int]:
    """1 for each layer that is a mixture of experts, else 0."""
    if isinstance(frequency, list):
        return frequency
    return [int(layer % frequency == 0) for layer in range(layers)]


def _in_words(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "nothing"
        case list() if len(value) > 1 and set(value) <= {0, 1}:
            return f"experts in {sum(value)} of {len(value)} layers"
        case float():
            return f"{value:g}"
    return str(value)
