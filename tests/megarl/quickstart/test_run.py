"""The quickstart before anything of it runs."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from converters.errors import UserError
from megarl.cli.quickstart import run
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.models import MODELS
from megarl.quickstart.outcome import Outcome
from megarl.quickstart.run import _check_config, _job_config, _largest, _warm_up_config, main, named_for
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.tracking import Run, open_tracker, read_history

USUAL = {"model": "qwen3", "engine": None, "weights": "as_trained", "schedule": "sync", "steps": None}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"engine": "tgi"}, r"--engine=tgi is not an engine: use one of sglang, transformers, vllm"),
        ({"steps": 0}, "--steps 0 is too small; give at least 1"),
        ({"steps": -3}, "--steps -3 is too small; give at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        run(Namespace(**{**USUAL, **wrong}, output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_no_shell_has_expanded_is_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=f"{tmp_path} holds files that are not a quickstart's"):
        main(Namespace(**{**USUAL, "model": "none"}, output_dir="~"))


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    output = tmp_path / "it's {one}, [of] many (paths)"
    model = write_tiny_model("qwen3", output / "model")
    files = write_arithmetic(output / "data")
    options = Namespace(**USUAL, output_dir=str(output))
    warm_up = _warm_up_config(MODELS["qwen3"], output, model, files, options.weights)
    job = _job_config(MODELS["qwen3"], output, model, files, options)
    check = _check_config(job, output)
    assert warm_up is not None
    assert (warm_up.model.path, warm_up.sft.train_files) == (str(model), [str(files.sft_train)])
    assert (job.output_dir, job.model.path, job.data.train_files) == (str(output), str(model), [str(files.train)])
    assert (check.output_dir, check.data.eval_files) == (str(output / "check"), [str(files.eval)])


def test_a_file_in_the_way_is_told_of_by_the_option(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file cannot be written \(File exists\): choose another --output-dir$"):
        main(Namespace(**USUAL, output_dir=str(file)))


def test_a_format_that_the_engine_does_not_hold_is_refused_before_an_earlier_quickstart_is_removed(
    tmp_path: Path,
) -> None:
    earlier = [tmp_path / ".megarl-quickstart", tmp_path / "summary.json"]
    for file in earlier:
        file.touch()
    with pytest.raises(UserError, match=r"^--weights=fp8_block is not for --engine=transformers, which holds weights"):
        main(Namespace(**{**USUAL, "engine": "transformers", "weights": "fp8_block"}, output_dir=str(tmp_path)))
    assert sorted(tmp_path.iterdir()) == sorted(earlier)


def test_a_recipe_limits_the_context_of_any_engine_by_the_engine_s_own_name() -> None:
    given = {"dtype": "float32", "max_model_len": 32}
    assert named_for("vllm", given) == named_for("transformers", given) == given
    assert named_for("sglang", given) == {"dtype": "float32", "context_length": 32}


def test_a_difference_that_was_not_finite_does_not_end_the_report(tmp_path: Path) -> None:
    name = "log_prob_difference/max"
    tracker = open_tracker(["jsonl"], Run(tmp_path, first_step=0, last_step=3, resumed=False))
    for step, value in enumerate([0.5, float("nan"), 0.75]):
        tracker.log(step, {name: value})
    tracker.close()
    assert _largest(read_history(tmp_path), name) == 0.75
    assert _largest(read_history(tmp_path)[1:2], name) == "never finite"


@pytest.mark.parametrize(
    ("outcome", "is_confirmed", "has_learned", "says"),
    [
        (Outcome(0.75, 0.75, 0.0, 0.6), True, True, "gives the same held-out accuracy, 0.7500"),
        (Outcome(0.75, 0.74, 0.02, 0.6), True, True, "gives the same held-out accuracy, 0.7400"),
        (Outcome(0.25, 0.25, 0.0, None), True, True, "gives the same held-out accuracy, 0.2500"),
        (Outcome(0.25, 0.25, 0.0, 0.6), True, False, "0.2500, but its number of steps reaches 0.6 at least"),
        (Outcome(0.75, 0.74, 0.0, 0.6), False, True, "0.7400 in a fresh vLLM, but training ended with 0.7500"),
        (Outcome(0.25, 0.75, 0.02, 0.6), False, False, "the exported model is not the trained one"),
    ],
)
def test_a_quickstart_has_to_learn_and_to_export_what_it_trained(
    outcome: Outcome, is_confirmed: bool, has_learned: bool, says: str
) -> None:
    assert (outcome.export_is_confirmed, outcome.has_learned) == (is_confirmed, has_learned)
    assert says in outcome.sentence("vLLM")
