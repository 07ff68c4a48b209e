"""A run whose responses in flight keep their keys and values: every log-prob is that of what its engine had read."""

import shutil
from pathlib import Path

import pytest
import torch
from test_colocated_ahead import PROMPTS, log_probs, model, steps
from test_colocation import MIB, STEPS, small

from megarl.data import Turn
from megarl.data.stretches import fetch
from megarl.quickstart.rows import write_rows
from megarl.schema import MegarlConfig

pytestmark = pytest.mark.usefixtures("shared_cluster")

BLOCK, LONGEST = 32, 160
"""Tokens that vLLM keeps together in its prefix cache, and of a response."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_was_read_is_kept_and_new_prompts_never_meet_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, versions = kept(tmp_path), tmp_path / "versions"
    shutil.copytree(config.model.path, versions / "0")
    run = steps(config, versions, monkeypatch)
    assert [group.ordinal for step in run for group in step.groups] == list(range(STEPS * PROMPTS))
    met, switched = 0, set[int]()
    for step in run:
        assert step.metrics["staleness/max"] <= 1
        # With `recompute`, this many tokens of those in flight.
        assert step.metrics["refit/tokens_recomputed"] == 0
        for turn in step.turns:
            check_log_probs(turn, versions)
            met += turn.cached_tokens or 0
            if len(set(fetch(turn.versions).tolist())) == 2:
                switched.add(step.version)
    # All prompts are drawn in every step: without the cache, and without a switch, nothing would be shown.
    assert met > 0
    assert switched
    for step in run:
        gap = step.metrics.get("staleness/kept_kv_gap", 0.0)
        assert (gap > 1e-4) == (step.version in switched), (step.version, gap)


def kept(folder: Path) -> MegarlConfig:
    """As many prompts as a step has, each longer than a block of vLLM's, so that every step begins as the last."""
    config = small(folder)
    rows = [
        {
            "data_source": "any",
            "prompt": [{"role": "user", "content": f"{place:02d}+34=" * 7}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for place in range(PROMPTS)
    ]
    write_rows(folder / "prompts.parquet", rows)
    config.data.train_files, config.data.max_prompt_tokens = [str(folder / "prompts.parquet")], 48
    config.loop.prompts_per_step = PROMPTS
    config.schedule.max_staleness, config.schedule.in_flight = 1, "keep"
    config.rollout.max_response_tokens = LONGEST
    arguments = {"max_model_len": 48 + LONGEST, "max_num_seqs": 5, "block_size": BLOCK}
    config.rollout.engine_args |= {**arguments, "kv_cache_memory_bytes": 32 * MIB}
    return config


def check_log_probs(turn: Turn, folder: Path) -> None:
    """Check each token against the weights of its version, over keys and values of those that had read what it met."""
    versions, own = fetch(turn.versions).tolist(), torch.tensor(fetch(turn.log_probs))
    prompt, token_ids = fetch(turn.prompt_ids).tolist(), fetch(turn.token_ids).tolist()
    assert len(prompt) > BLOCK
    old, new = versions[0], versions[-1]
    switch = versions.index(new) if new != old else len(versions)
    assert versions == [old] * switch + [new] * (len(versions) - switch)
    expected = log_probs(folder / str(old), prompt + token_ids)[len(prompt) - 1 :][:switch]
    torch.testing.assert_close(own[:switch], expected, atol=1e-5, rtol=0)
    if new != old:
        after = over_kept(folder / str(old), folder / str(new), prompt + token_ids, read=len(prompt) + switch - 1)
        torch.testing.assert_close(own[switch:], after, atol=1e-5, rtol=0)


@torch.no_grad()
def over_kept(old: Path, new: Path, token_ids: list[int], read: int) -> torch.Tensor:
    """Log-probs of tokens behind the first `read` + 1, by a model that goes on where another has read `read`."""
    sequence = torch.tensor([token_ids])
    cache = model(old)(sequence[:, :read], use_cache=True).past_key_values
    logits = model(new)(sequence[:, read:], past_key_values=cache, use_cache=True).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, sequence[0, read + 1 :, None])[:, 0]
