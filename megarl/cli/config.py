"""Print the final configuration of a recipe as YAML, with the origin of each value, or how two recipes differ.

Values come from lines of files, overrides, Megatron's flags, or the defaults of the schema. The output is itself a
recipe; a value that is invalid by itself is then reported as by megarl train. --from-verl and --from-slime translate
a command of verl or a script of slime to a recipe, and list what has no counterpart. --diff exits with 0 if two
recipes are equal, and with 1 if they differ; overrides apply to both.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.cli import outcome
from megarl.cli.recipe import add_megatron_args, assignments

if TYPE_CHECKING:
    from megarl.config.assignment import Assignment
    from megarl.config.origins import Setting

EXAMPLES = """examples:
  megarl config --config-name gspo_qwen3_moe loop.steps=200 --tensor-model-parallel-size 8
  megarl config --config-name grpo_deepseek_v3 --given
  megarl config --config-name mine --config-dir ~/recipes --json
  megarl config --diff grpo_qwen3_moe dapo_qwen3_moe
  megarl config --diff grpo_qwen3_moe ~/recipes/mine.yaml
  megarl config --from-verl run_qwen3_moe_30b.sh > recipes/mine.yaml
  megarl config --from-verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5
"""
TAKES_OVERRIDES = True
EXIT_DIFFERENT = 1
_COLUMN = 56


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; overrides and Megatron's flags are left over."""
    parser.usage = (
        "megarl config (--config-name NAME | --diff A B) [KEY=VALUE ...] [--MEGATRON-FLAG [VALUE] ...]\n"
        "       megarl config (--from-verl FILE|KEY=VALUE ... | --from-slime FILE)"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config-name", metavar="NAME", help="recipe: a file of configs/ without .yaml")
    which.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="two recipes, by name or as a file that ends in .yaml"
    )
    which.add_argument(
        "--from-verl",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="a script that runs verl, a YAML file, or its overrides",
    )
    which.add_argument("--from-slime", type=Path, metavar="FILE", help="a script that runs slime")
    parser.add_argument("--config-dir", metavar="DIR", help="folder of your own recipes, looked in first")
    add_megatron_args(parser)
    parser.add_argument("--given", action="store_true", help="leave out what is as the schema has it by default")
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the configuration, or the difference of two recipes; 1 if they differ."""
    if options.diff:
        return _diff(options)
    if options.from_verl or options.from_slime:
        return _translate(options)
    from megarl.config.origins import DEFAULT, explain

    options = _placed(options, options.config_name)
    given = assignments(options)
    settings = explain(options.config_name, given, options.config_dir)
    if options.given:
        settings = {key: setting for key, setting in settings.items() if setting.origin != DEFAULT}
    facts = {key: {"value": setting.value, "origin": setting.origin} for key, setting in settings.items()}
    outcome.print_outcome(options, list(_yaml(settings)), {"configuration": facts})
    # Print before torch is imported for the checks, which takes seconds.
    sys.stdout.flush()
    _check(options, given)
    return 0


def _check(options: argparse.Namespace, given: "Sequence[Assignment]") -> None:
    """Raise UserError for the first value that is invalid by itself; keys left open are not checked."""
    from megarl.config.origins import compose_open
    from megarl.config.validate import check_single_values

    check_single_values(compose_open(options.config_name, [each.text for each in given], options.config_dir)[0])


def _translate(options: argparse.Namespace) -> int:
    from megarl.config.foreign.recipe import check

    if options.overrides:
        raise UserError(f"{options.overrides[0]} cannot be given beside what is translated: override the recipe itself")
    if options.from_verl:
        from megarl.config.foreign.from_verl import from_verl

        title, recipe = " ".join(options.from_verl), from_verl(options.from_verl, os.environ)
    else:
        from megarl.config.foreign.from_slime import from_slime

        title, recipe = str(options.from_slime), from_slime(options.from_slime, os.environ)
    check(recipe)
    facts = {"recipe": recipe.values, "no_counterpart": recipe.absent, "so_in_any_case": recipe.always}
    outcome.print_outcome(options, [recipe.yaml(f"Translated: {title}").rstrip()], facts)
    return 0


def _placed(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options with this recipe's name and folder; the recipe may be given as a file."""
    file = Path(name)
    if file.suffix != ".yaml":
        return argparse.Namespace(**{**vars(options), "config_name": name})
    if not file.is_file():
        raise UserError(f"there is no file {file}; give the name of a recipe without .yaml, or a file")
    return argparse.Namespace(**{**vars(options), "config_name": file.stem, "config_dir": str(file.parent)})


def _diff(options: argparse.Namespace) -> int:
    from megarl.config.origins import explain

    both = (_placed(options, name) for name in options.diff)
    a, b = (explain(each.config_name, assignments(each), each.config_dir) for each in both)
    # An empty group is not a value if the other recipe has keys in it.
    here = [{key: each for key, each in settings.items() if each.value != {}} for settings in (a, b)]
    keys = sorted(key for key in {*here[0], *here[1]} if _of(here[0], key) != _of(here[1], key))
    lines = [f"{key}: {_say(a.get(key))}, {_say(b.get(key))}" for key in keys]
    same = "are the same configuration" if not keys else f"differ in {len(keys)} keys"
    facts = {
        key: [
            None if (setting := each.get(key)) is None else {"value": setting.value, "origin": setting.origin}
            for each in (a, b)
        ]
        for key in keys
    }
    outcome.print_outcome(options, [*lines, f"{options.diff[0]} and {options.diff[1]} {same}"], {"different": facts})
    return EXIT_DIFFERENT if keys else 0


def _of(settings: "Mapping[str, Setting]", key: str) -> tuple[Any, ...]:
    return (settings[key].value,) if key in settings else ()


def _say(setting: "Setting | None") -> str:
    return "not set" if setting is None else f"{_value(setting.value)} ({setting.origin})"


def _yaml(settings: "Mapping[str, Setting]") -> Iterator[str]:
    """The lines of the recipe, each value followed by its origin."""
    groups: list[str] = []
    for key, setting in settings.items():
        *above, name = key.split(".")
        common = 0
        while common < min(len(above), len(groups)) and above[common] == groups[common]:
            common += 1
        for depth in range(common, len(above)):
            yield f"{'  ' * depth}{above[depth]}:"
        groups = above
        line = f"{'  ' * len(above)}{name}: {_value(setting.value)}"
        yield f"{line:<{_COLUMN}} # {setting.origin}"


def _value(value: Any) -> str:
    """`value` as YAML on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()
