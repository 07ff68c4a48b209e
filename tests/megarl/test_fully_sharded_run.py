"""A run that torch's FSDP2 cuts: its engine has the weights of each step, and it goes on without FSDP2."""

import json
from pathlib import Path

import pytest
from whole_runs import job

from megarl.cli.main import main


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("shared_cluster")
def test_engine_critic_and_checkpoint_follow_rows_of_weights(tmp_path: Path) -> None:
    output = tmp_path / "run"
    _python, _module, _main, *command = job(tmp_path)(output)
    command += ["megatron.expert_model_parallel_size=1", "critic.ranks=2", "checkpoint.every=1"]
    # Megatron-LM's own flag.
    assert main([*command, "loop.steps=2", "--use-torch-fsdp2"]) == 0
    assert main([*command, "loop.steps=3"]) == 0
    _, *steps = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["refit/bytes"] > 0
        # The second of two updates, at large steps, has moved every weight that the engine was sent.
        assert line["log_prob_difference/max"] < 1e-5
        assert line["policy/gradient_norm"] > 0
        assert line["value/gradient_norm"] > 0
    assert (output / "huggingface/model.safetensors").exists()
