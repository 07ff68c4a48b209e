"""Sentences name what was typed: options where a command has them, in place of the keys that they set."""

import pytest

from converters.errors import UserError, names_as_given
from megarl.cli.main import main
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model


def test_a_name_that_is_a_part_of_another_stays():
    with (
        pytest.raises(UserError, match=r"^a\.size, size_of, more_size and --size=3 or --size; lower --size$"),
        names_as_given({"size": "--size"}),
    ):
        raise UserError("a.size, size_of, more_size and size=3 or size; lower size")


def test_details_are_kept():
    with pytest.raises(UserError) as refused, names_as_given({"size": "--size"}):
        raise UserError("no size", "size of a log")
    assert (refused.value.sentence, refused.value.details) == ("no --size", "size of a log")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "nope", "--files", "a.parquet"], "--model=nope is not a HuggingFace folder"),
        (["--model", "model", "--files", "a.parquet"], "--files: there is no file a.parquet"),
        (
            ["--model", "model", "--files", "data/eval.parquet", "--max-response-tokens", "9999999"],
            "tokens and --max-response-tokens=9999999 new ones do not fit",
        ),
    ],
)
def test_eval_names_its_options(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_model("qwen3", tmp_path / "model")
    write_arithmetic(tmp_path / "data", held_out=4)
    assert main(["eval", *words]) == 2
    assert says in capsys.readouterr().err
