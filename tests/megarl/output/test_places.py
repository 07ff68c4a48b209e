"""A run whose output would touch what it reads is refused."""

import pytest

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.output.places import LOGS, check_output


@pytest.fixture
def config(tmp_path):
    model = tmp_path / "run" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    settings = compose("quickstart", ["model.path=unset", "data.train_files=[]", "data.eval_files=[]"])
    settings.output_dir = str(tmp_path / "run")
    settings.model.path = str(tmp_path / "elsewhere")
    return settings


def refused(config, *words):
    with pytest.raises(UserError) as refusal:
        check_output(config)
    for word in ("write over its own input", *words):
        assert word in str(refusal.value)


def test_inputs_elsewhere_and_beside_what_is_written_are_left_alone(config, tmp_path):
    config.data.train_files = [str(tmp_path / "run" / "data" / "train.parquet")]
    config.reward.function = f"{tmp_path / 'run' / 'reward.py'}:score"
    check_output(config)


@pytest.mark.parametrize("name", ["huggingface", "huggingface/sub", "checkpoints/iter_0000003", "critic", "logs", "."])
def test_a_model_at_in_or_around_what_is_written(config, tmp_path, name):
    config.model.path = str(tmp_path / "run" / name)
    refused(config, "model.path=", "another output_dir")


@pytest.mark.parametrize(
    "key", ["model.megatron_checkpoint", "critic.path", "reward_model.path", "implicit_reward_model.path"]
)
def test_every_model(config, tmp_path, key):
    group, _, name = key.partition(".")
    setattr(getattr(config, group), name, str(tmp_path / "run" / "huggingface"))
    refused(config, key)


@pytest.mark.parametrize("key", ["data.train_files", "data.eval_files", "sft.train_files", "preference.eval_files"])
def test_every_file(config, tmp_path, key):
    group, _, name = key.partition(".")
    setattr(getattr(config, group), name, ["other.parquet", str(tmp_path / "run" / "logs" / "a.parquet")])
    refused(config, key)


def test_a_reward_function(config, tmp_path):
    config.reward.function = f"{tmp_path / 'run' / 'huggingface' / 'reward.py'}:score"
    refused(config, "reward.function")


def test_a_link_to_the_model_in_the_place_of_the_export(config, tmp_path):
    model = tmp_path / "model"
    (tmp_path / "run" / "huggingface").rename(model)
    (tmp_path / "run" / "huggingface").symlink_to(model)
    config.model.path = str(model)
    refused(config, "model.path=")


def test_a_model_of_links_into_what_is_written(config, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (links / "config.json").symlink_to(tmp_path / "run" / "huggingface" / "config.json")
    config.model.path = str(links)
    refused(config, "model.path=")


def test_an_evaluation_may_be_of_what_a_run_wrote(config, tmp_path):
    config.model.path = str(tmp_path / "run" / "huggingface")
    check_output(config, written=(LOGS,))


@pytest.mark.parametrize("output", ["", " ", "a\0b"])
def test_an_output_dir_without_a_name(config, output):
    config.output_dir = output
    with pytest.raises(UserError, match="output_dir="):
        check_output(config)


def test_an_output_dir_that_is_or_lies_below_a_file(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        config.output_dir = str(output)
        with pytest.raises(UserError, match="is a file"):
            check_output(config)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_where_a_folder_belongs(config, tmp_path):
    (tmp_path / "run" / "logs").write_text("mine")
    with pytest.raises(UserError, match="logs is in the way"):
        check_output(config)
