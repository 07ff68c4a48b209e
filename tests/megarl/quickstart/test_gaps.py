"""The gap between engine and trainer on an export, of an engine that is exact and of one that is off by what we say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.compose import compose
from megarl.data.stretches import fetch
from megarl.evaluate import fresh_engines
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.gaps import log_prob_gaps
from megarl.quickstart.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("shared_cluster")

TEMPERATURE = 0.5


@pytest.mark.long
def test_each_form_of_weights_has_the_mean_over_all_its_tokens(tmp_path: Path) -> None:
    folder, files = write_tiny_model("qwen3", tmp_path / "model"), write_arithmetic(tmp_path / "data", held_out=8)
    common = [
        f"model.path='{folder}'",
        f"data.eval_files=['{files.eval}']",
        f"output_dir='{tmp_path / 'run'}'",
        "rollout.engine=transformers",
        f"rollout.temperature={TEMPERATURE}",
    ]
    check = compose("eval", ["rollout.max_response_tokens=5", "reward.function=exact_match", *common])
    ranks = ["cluster.trainer_ranks=1", "megatron.expert_model_parallel_size=1"]
    job = compose("quickstart", [*common, *ranks, f"data.train_files=['{files.train}']"])
    with fresh_engines(check) as fresh:
        exact = fresh.sample()
    assert len(exact) == 8
    off = [
        (prompt, replace(turn, log_probs=np.float32(fetch(turn.log_probs) + (0.5 if place < 2 else 0))))
        for place, (prompt, turn) in enumerate(exact)
    ]
    lengths = [len(turn.token_ids) for _, turn in exact]
    gaps = log_prob_gaps(job, folder, {"bf16": exact, "fp8_block": off})
    assert list(gaps) == ["bf16", "fp8_block"]
    assert gaps["bf16"] < 1e-5
    assert gaps["fp8_block"] == pytest.approx(0.5 * sum(lengths[:2]) / sum(lengths), abs=1e-5)
