"""The table that `megarl eval` prints."""

import json

from megarl.cli.eval import json_of, lines_of, overrides_of
from megarl.cli.evaluation_table import evaluation_table
from megarl.cli.main import build_parser
from megarl.config.compose import compose
from megarl.stages.evaluate import EvalSettings

SAMPLED = {
    "mean_at_2": 0.5,
    "pass_at_2": 1.0,
    "pass_at_1": 0.5,
    "best_at_1": 0.25,
    "best_at_2": 0.75,
    "source/a/b/pass_at_1": 0.125,
    "source/a/b/mean_at_2": 0.0,
    "source/a/b/pass_at_2": 0.0625,
    "accuracy": 0.5,
    "dropped": 3.0,
    "source/a/b/accuracy": 0.0,
}


def test_the_k_are_side_by_side():
    assert evaluation_table(SAMPLED) == [
        "data source            k=1     k=2",
        "all          pass@k    0.5000  1.0000",
        "all          best@k    0.2500  0.7500",
        "all          accuracy  0.5000",
        "a/b          pass@k    0.1250  0.0625",
        "a/b          accuracy  0.0000",
    ]


def test_greedy_answers_have_a_line_per_data_source_or_none():
    assert evaluation_table({"accuracy": 0.5, "source/a/accuracy": 1.0, "source/b/accuracy": 0.0, "dropped": 0.0}) == [
        "all  accuracy  0.5000",
        "a    accuracy  1.0000",
        "b    accuracy  0.0000",
    ]
    assert evaluation_table({"accuracy": 0.5, "dropped": 0.0, "response_length": 3.0}) == []


def test_samples_and_temperature_are_keys_of_the_recipe():
    words = ["eval", "--model", "m", "--files", "e.parquet", "--samples", "8", "--temperature", "0.6"]
    options, options.overrides = build_parser().parse_known_args(words)
    config = compose("eval", overrides_of(options))
    assert (config.loop.eval_samples, config.loop.eval_temperature) == (8, 0.6)


def test_a_temperature_alone_is_that_of_one_response():
    words = ["eval", "--model", "m", "--files", "e.parquet", "--temperature", "0.6"]
    options, options.overrides = build_parser().parse_known_args(words)
    config = compose("eval", overrides_of(options))
    assert EvalSettings.of(config, [7]) == EvalSettings(config.rollout.max_response_tokens, (7,), 1, 0.6)


def test_a_file_that_is_there_is_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "split=test" / "part-0.parquet"
    file.parent.mkdir()
    file.touch()
    words = ["eval", "--model", "m", "--files", "split=test/part-0.parquet", "e.parquet", "loop.eval_samples=4"]
    options, options.overrides = build_parser().parse_known_args(words)
    config = compose("eval", overrides_of(options))
    assert config.data.eval_files == ["split=test/part-0.parquet", "e.parquet"]
    assert config.loop.eval_samples == 4


def test_json_is_all_metrics() -> None:
    assert json.loads(json_of("model", SAMPLED)) == {"model": "model", **SAMPLED}


def test_the_text_begins_with_the_accuracy() -> None:
    first, *table = lines_of(SAMPLED)
    assert first == "accuracy 0.5000 (3 responses could not be scored)"
    assert table == evaluation_table(SAMPLED)
    assert lines_of({"accuracy": 0.5, "dropped": 0.0}) == ["accuracy 0.5000"]
