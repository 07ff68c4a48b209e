"""Batches that are drawn and not trained on yet are in a checkpoint."""

import json

import torch

from megarl.data import PromptSampler
from megarl.run.batches import BatchStream, StepBatch, read_waiting
from megarl.run.checkpoint_files import at_once
from megatron_ext.packing.packing import RaggedBatch


def test_batches_that_wait_are_read_as_they_were(tmp_path):
    batches = [
        StepBatch(
            RaggedBatch(torch.arange(3) + first, torch.tensor([1, 2]), {"weights": torch.rand(3)}, unit=2),
            {"drawn": float(first)},
        )
        for first in (0, 5, 9)
    ]
    stream = BatchStream(PromptSampler(4, shuffle=False, seed=0), lambda _sampler, _step: batches)
    assert stream.after(0) is batches[0]
    state = json.loads(json.dumps(stream.save(at_once(tmp_path))))
    for found, expected in zip(read_waiting(tmp_path, state), batches[1:], strict=True):
        assert found.metrics == expected.metrics
        assert found.batch.unit == 2
        assert torch.equal(found.batch.tokens, expected.batch.tokens)
        assert torch.equal(found.batch.lengths, expected.batch.lengths)
        assert torch.equal(found.batch.fields["weights"], expected.batch.fields["weights"])


def test_nothing_is_written_where_none_waits(tmp_path):
    stream = BatchStream(PromptSampler(4, shuffle=False, seed=0), lambda _sampler, _step: [])
    assert stream.save(at_once(tmp_path))["waiting"] == []
    assert list(tmp_path.iterdir()) == []
