"""Commands of the pages that train have a configuration."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import FENCE, ROOT, pages, write

from converters.errors import UserError
from megarl.cli.main import build_parser
from megarl.cli.recipe import read_config
from megarl.schema import MegarlConfig


def training_commands(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Commands that train with a recipe, as arguments of `megarl`; what a page leaves out with dots is filled in."""
    for page, text in pages(root).items():
        code = "\n".join([*FENCE.findall(text), *re.findall(r"^ {4}.*$", text, re.MULTILINE)])
        for line in code.replace("\\\n", " ").splitlines():
            if found := re.match(r" *megarl ((?:train|sft|dpo|reward-model|spin) .*--config-name .*)", line):
                arguments = shlex.split(found[1])
                if arguments[-1] == "...":
                    arguments[-1:] = ["model.path=m", "data.train_files=[d.parquet]", "output_dir=o"]
                yield page, arguments


def recipes_of_a_reader(root: Path, folder: Path) -> None:
    """Write the files that pages tell a reader to write in a folder `recipes`."""
    for text in pages(root).values():
        for name, recipe in re.findall(r"```(?:yaml|bash)\n# (recipes/[\w.]+)\n(.*?)```", text, re.DOTALL):
            write(folder, {name: recipe})


def compose(arguments: list[str]) -> MegarlConfig:
    """The configuration of a command."""
    options, overrides = build_parser().parse_known_args(arguments)
    options.overrides = overrides
    return read_config(options)


@pytest.mark.parametrize(("page", "arguments"), training_commands(ROOT))
def test_a_command_that_trains_has_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, arguments: list[str]
) -> None:
    recipes_of_a_reader(ROOT, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert compose(arguments).output_dir


def test_a_command_with_a_key_that_is_gone_has_none(tmp_path: Path) -> None:
    write(tmp_path, {"README.md": "```\nmegarl train --config-name quickstart \\\n    loop.gone=1 ...\n```\n"})
    ((_, arguments),) = training_commands(tmp_path)
    with pytest.raises(UserError, match="gone"):
        compose(arguments)


def test_the_commands_are_found() -> None:
    assert len(list(training_commands(ROOT))) > 10
