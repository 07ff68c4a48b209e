"""An engine with a slot for adapters, connected to a segment, and checks of what it serves."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from adapters import Adapted
from engine_host import END_ID, GREEDY, PROMPTS, SEGMENT_BYTES

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from megarl.data.stretches import fetch
from megarl.resharding.loader.buckets import cut_into_buckets, views
from megarl.resharding.shared_memory import Segment
from megarl.rollout.adapter_slot import with_adapter_slot
from megarl.rollout.protocol import Request, UpdateError
from megarl.schema import RolloutConfig

BLOCK = [*range(4, 44)]
"""A prompt whose keys and values are kept for the next one that begins so."""


class Slot:
    """An engine of the kind of this name, which `start` starts, with a slot for the adapters of `adapted`."""

    def __init__(self, start: Callable[..., Any], adapted: Adapted, engine: str = "vllm", **arguments: Any) -> None:
        rollout = RolloutConfig(engine=engine, engine_args=arguments)
        architecture = read_architecture(read_json(adapted.model / CONFIG))
        self.engine = start(adapted.model, **with_adapter_slot(rollout, architecture, adapted.lora))
        segment = Segment(SEGMENT_BYTES)
        self._memory = segment.memory
        self.engine.map_segments([segment.handle()], SEGMENT_BYTES)
        segment.close()

    def begin(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.engine.begin_update(version, list(tensors))

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for bucket in cut_into_buckets(shapes, dict.fromkeys(shapes, torch.float32), SEGMENT_BYTES // 20, segments=1):
            for name, view in views(bucket, self._memory).items():
                view.copy_(tensors[name])
            self.engine.write(bucket)
            self._memory.fill_(255)

    def update(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.begin(version, tensors)
        self.write(tensors)
        self.engine.commit_update(version)


def check_greedy(slot: Slot, adapted: Adapted, adapter: int) -> None:
    """Tokens and log-probs of greedy answers are those of the adapter in PEFT."""
    for prompt, (turn,) in zip(PROMPTS, slot.engine.generate([Request(each, GREEDY) for each in PROMPTS]), strict=True):
        check_tokens(adapted, adapter, prompt, turn, slice(None))


def check_tokens(adapted: Adapted, adapter: int, prompt: list[int], turn: Any, part: slice) -> None:
    """A part of an answer is the adapter's, after all that comes before it."""
    token_ids = fetch(turn.token_ids).tolist()
    best = adapted.log_probs(adapter, [*prompt, *token_ids])[len(prompt) - 1 : -1].max(-1)
    assert token_ids[part] == best.indices.tolist()[part]
    found = torch.tensor(fetch(turn.log_probs))
    torch.testing.assert_close(found[part], best.values[part], atol=1e-5, rtol=0)


def check_that_an_update_that_breaks_off_leaves_nothing(slot: Slot, adapted: Adapted) -> None:
    """A part of the second adapter, and then the first: nothing of the second is left. It is the engine's next."""
    first, second = adapted.tensors
    new = slot.engine.version() + 1
    slot.begin(new, second)
    slot.write(dict(list(second.items())[: len(second) // 2]))
    with pytest.raises(UpdateError, match="tensors were not written"):
        slot.engine.commit_update(new)
    slot.update(new, first)
    check_greedy(slot, adapted, 0)


def check_that_no_key_or_value_outlives_its_adapter(slot: Slot, adapted: Adapted, kept: int) -> None:
    """A prompt finds `kept` tokens of its like, and none once the adapter is another, or the same anew."""

    def cached() -> int:
        return slot.engine.generate([Request(BLOCK, GREEDY)])[0][0].cached_tokens

    for _ in range(2):
        slot.update(slot.engine.version() + 1, adapted.tensors[0])
        assert [cached(), cached()] == [0, kept]


def check_an_answer_over_two_adapters(
    adapted: Adapted, prompt: list[int], turn: Any, versions: tuple[int, int]
) -> None:
    """An answer begun with the first adapter, of the first of two versions, goes on with the second."""
    found = fetch(turn.versions).tolist()
    switch = found.index(versions[1])
    assert found == [versions[0]] * switch + [versions[1]] * (len(found) - switch)
    assert switch > 0
    check_tokens(adapted, 0, prompt, turn, slice(0, switch))
    check_tokens(adapted, 1, prompt, turn, slice(switch, None))


def long_prompt(adapted: Adapted) -> list[int]:
    """A prompt that the first adapter answers with no end token soon."""
    answers = ((prompt, adapted.greedy(0, prompt, 40)) for prompt in ([token, 9] for token in range(4, 60)))
    return next(prompt for prompt, tokens in answers if END_ID not in tokens)
