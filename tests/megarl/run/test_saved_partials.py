"""Parts of responses in a checkpoint: read again they are what they were, and go on if the same is asked."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megarl.cluster.engines.progress_log import PartialSample
from megarl.data import Turn
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.run.checkpoint_files import at_once
from megarl.run.saved_partials import SavedPartial, read_partials, save_partials

REQUEST = Request([7, 8], SamplingParameters(samples=3, max_tokens=200, stop_token_ids=(2,), seed=5))


def test_partials_are_read_as_they_were_saved(tmp_path) -> None:
    begun = PartialSample(*(np.arange(100).astype(each) for each in (np.int32, np.float32, np.int32)))
    experts = (np.arange(5).astype(np.uint16).view("V2"),)
    ended = Turn.of([7, 8], [4, 5, 2], [-1, -2, -3], [0, 0, 1], "stop", experts)
    greedy = replace(REQUEST, sampling=replace(REQUEST.sampling, samples=1, temperature=0.0))
    partials = {
        3: [SavedPartial.of(REQUEST, {2: begun.cut(), 0: ended}), SavedPartial.of(greedy, {})],
        9: [SavedPartial.of(REQUEST, {})],
    }
    described = json.loads(json.dumps(save_partials(partials, at_once(tmp_path))))
    assert read_partials(tmp_path, described) == partials


def test_without_partials_there_is_no_file(tmp_path) -> None:
    assert read_partials(tmp_path, save_partials({}, at_once(tmp_path))) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, prompt_token_ids=[7, 9]),
        replace(REQUEST, sampling=replace(REQUEST.sampling, temperature=0.5)),
        replace(REQUEST, sampling=replace(REQUEST.sampling, samples=2)),
        replace(REQUEST, sampling=replace(REQUEST.sampling, seed=6)),
    ],
)
def test_a_request_that_is_another_one_now_is_sampled_anew(other) -> None:
    turns = {0: Turn.of((), [4], [-1], [0], "abort")}
    partial = SavedPartial.of(REQUEST, turns)
    assert partial.behind(REQUEST) == turns
    assert partial.behind(replace(REQUEST, priority=4)) == turns
    assert partial.behind(other) == {}
