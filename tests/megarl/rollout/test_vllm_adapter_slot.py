"""The adapter alone in an engine's slot: what is sampled is PEFT's, after every refit of it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Adapted
from engine_host import END_ID, GREEDY, PROMPTS, SEGMENT_BYTES

from converters.architectures import Lora, read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.data.stretches import here
from megarl.resharding.loader.buckets import cut_into_buckets, views
from megarl.resharding.shared_memory import Segment
from megarl.rollout.adapter_slot import with_adapter_slot
from megarl.rollout.protocol import Event, Progress, Request, SamplingParameters, UpdateError
from megarl.schema import RolloutConfig

LORA = Lora(3, 12.0)
ATTENTION_AND_DOWN = Lora(9, 4.0, ("q_proj", "v_proj", "down_proj"))
ATTENTION = Lora(3, 12.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
LONG = SamplingParameters(temperature=0, max_tokens=400)
BLOCK = [*range(4, 44)]
"""A prompt whose keys and values are kept for the next one that begins so."""


class Slot:
    """An engine with a slot, connected to a segment."""

    def __init__(self, engines: Any, adapted: Adapted, **arguments: Any) -> None:
        rollout = RolloutConfig(engine_args=arguments)
        architecture = read_architecture(read_json(adapted.model / CONFIG))
        self.engine = engines.start(adapted.model, **with_adapter_slot(rollout, architecture, adapted.lora))
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
    token_ids = here(turn.token_ids).tolist()
    best = adapted.log_probs(adapter, [*prompt, *token_ids])[len(prompt) - 1 : -1].max(-1)
    assert token_ids[part] == best.indices.tolist()[part]
    found = torch.tensor(here(turn.log_probs))
    torch.testing.assert_close(found[part], best.values[part], atol=1e-5, rtol=0)


@pytest.fixture
def adapted(model_folder: Callable[..., Path], tmp_path: Path) -> Adapted:
    return Adapted(model_folder("qwen3", 0), tmp_path, LORA)


def test_the_slot_is_filled_in_place(engines: Any, adapted: Adapted) -> None:
    slot = Slot(engines, adapted)
    first, second = adapted.tensors
    assert slot.engine.version() == -1
    with pytest.raises(UpdateError, match="commit a weight update before the first generation"):
        slot.engine.generate([Request(PROMPTS[0], GREEDY)])
    slot.update(0, first)
    check_greedy(slot, adapted, 0)
    slot.update(1, second)
    check_greedy(slot, adapted, 1)
    check_that_an_update_that_breaks_off_leaves_nothing(slot, adapted)
    check_that_no_key_or_value_outlives_its_adapter(slot, adapted)
    check_that_answers_go_on_with_the_next_adapter(slot, adapted)


def check_that_an_update_that_breaks_off_leaves_nothing(slot: Slot, adapted: Adapted) -> None:
    first, second = adapted.tensors
    slot.begin(2, second)
    slot.write(dict(list(second.items())[: len(second) // 2]))
    with pytest.raises(UpdateError, match="tensors were not written"):
        slot.engine.commit_update(2)
    slot.update(2, first)
    check_greedy(slot, adapted, 0)


def check_that_no_key_or_value_outlives_its_adapter(slot: Slot, adapted: Adapted) -> None:
    def cached() -> int:
        return slot.engine.generate([Request(BLOCK, GREEDY)])[0][0].cached_tokens

    assert (cached(), cached()) == (0, 32)
    slot.update(3, adapted.tensors[0])
    assert (cached(), cached()) == (0, 32)


def check_that_answers_go_on_with_the_next_adapter(slot: Slot, adapted: Adapted) -> None:
    answers = ((prompt, adapted.greedy(0, prompt, 40)) for prompt in ([token, 9] for token in range(4, 60)))
    prompt = next(prompt for prompt, tokens in answers if END_ID not in tokens)
    slot.engine.submit({1: Request(prompt, LONG)})
    told = slot.engine.events()
    # It has told of its first tokens.
    next(told)
    slot.update(4, adapted.tensors[1])
    (end,) = next(ends for ends in map(only_ends, told) if ends)
    (turn,) = end.answer
    versions = here(turn.versions).tolist()
    switch = versions.index(4)
    assert versions == [3] * switch + [4] * (len(versions) - switch)
    check_tokens(adapted, 0, prompt, turn, slice(0, switch))
    check_tokens(adapted, 1, prompt, turn, slice(switch, None))


def only_ends(told: list[Event | Progress]) -> list[Event]:
    return [each for each in told if isinstance(each, Event)]


@pytest.mark.parametrize("lora", [LORA, ATTENTION], ids=["all", "attention"])
def test_experts_have_their_adapters(
    engines: Any, model_folder: Callable[..., Path], tmp_path: Path, lora: Lora
) -> None:
    adapted = Adapted(model_folder("qwen3_moe", 0), tmp_path, lora)
    slot = Slot(engines, adapted)
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "lora", "arguments"),
    [
        ("llama", LORA, {}),
        ("qwen2", ATTENTION_AND_DOWN, {}),
        ("qwen3", ATTENTION_AND_DOWN, {}),
        ("qwen3_moe", LORA, {}),
        ("qwen3_moe", LORA, {"enable_expert_parallel": True}),
        ("qwen3_moe", ATTENTION_AND_DOWN, {}),
    ],
)
def test_tensor_parallel_ranks_have_their_parts(
    engines: Any, model_folder: Callable[..., Path], tmp_path: Path, model: str, lora: Lora, arguments: dict[str, Any]
) -> None:
    adapted = Adapted(model_folder(model, 0), tmp_path, lora)
    slot = Slot(engines, adapted, tensor_parallel_size=2, **arguments)
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)


def completed(*adapted: str) -> dict[str, tuple[Any, ...]]:
    """Shapes of A and B of an expert's matrices, and whether they are zeros, of which some are `adapted`."""
    from vllm.lora.lora_weights import LoRALayerWeights

    from megarl.rollout.vllm import adapter_slot

    shapes = {"gate": ((3, 8), (6, 3)), "down": ((3, 6), (8, 3)), "up": ((3, 8), (6, 3))}
    loras = {name: LoRALayerWeights(name, 3, 12, *map(torch.ones, shapes[name])) for name in adapted}
    adapter_slot._complete(loras, list(shapes))
    return {
        name: (tuple(each.lora_a.shape), tuple(each.lora_b.shape), not each.lora_a.any() and not each.lora_b.any())
        for name, each in loras.items()
    }


@pytest.mark.parametrize("adapted", [("gate",), ("down",), ("gate", "up"), ("up", "down"), ()])
def test_what_of_an_expert_is_not_adapted_is_zeros(vllm_process: Any, adapted: tuple[str, ...]) -> None:
    of_gate, of_down = ((3, 8), (6, 3)), ((3, 6), (8, 3))
    shapes = {"gate": of_gate, "down": of_down, "up": of_gate} if adapted else {}
    assert vllm_process(completed, *adapted) == {name: (*each, name not in adapted) for name, each in shapes.items()}


REFUSED = {
    "sglang": ("qwen3", RolloutConfig(engine="sglang"), LORA, r"merge=false is not for rollout\.engine=sglang"),
    "transformers": ("qwen3", RolloutConfig(engine="transformers"), LORA, r"is not for rollout\.engine=transformers"),
    "codes": ("qwen3", RolloutConfig(weights="fp8_block"), LORA, r"rollout\.weights=fp8_block holds others"),
    "latent attention": ("deepseek_v3", RolloutConfig(), LORA, r"leave out that of kv_b_proj: vLLM decodes with"),
    "its other matrices": (
        "deepseek_v3",
        RolloutConfig(),
        Lora(3, 12.0, ("o_proj",)),
        "qwen3, qwen3_moe, and this is a deepseek_v3 model",
    ),
    "rank": ("qwen3", RolloutConfig(), Lora(513, 1.0), "takes a rank of at most 512, and it is 513"),
    "stages": (
        "qwen3",
        RolloutConfig(engine_args={"pipeline_parallel_size": 2}),
        LORA,
        "parallel_size=2: leave",
    ),
    "no weights": ("qwen3", RolloutConfig(engine_args={"load_format": "dummy"}), LORA, "load_format=dummy: leave"),
    "quantised": ("qwen3", RolloutConfig(engine_args={"quantization": "fp8"}), LORA, "quantization=fp8: leave"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_slot_is_refused(model_folder: Callable[..., Path], case: str) -> None:
    model, rollout, lora, says = REFUSED[case]
    with pytest.raises(UserError, match=says):
        with_adapter_slot(rollout, read_architecture(read_json(model_folder(model, 0) / CONFIG)), lora)
