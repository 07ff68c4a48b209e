"""The transformers engine against transformers itself and plain computations."""

from itertools import chain, islice

import pytest
import torch
from engine_host import GREEDY, PROMPTS
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.traced_layout import traced_layout
from megarl.quickstart.tiny_models import TINY_MODELS
from megarl.rollout.protocol import Request, RequestEnded, SamplingParameters
from megarl.rollout.sampling import check_sampling
from megarl.rollout.transformers.arguments import TransformersArguments
from megarl.rollout.transformers.model import SamplingModel
from megarl.rollout.transformers.sampling import kept_log_probs, tokens_at
from megarl.rollout.transformers.weights import ModelWeights

DUMMY = TransformersArguments(load_format="dummy")


@pytest.fixture
def kind():
    return "transformers"


def test_log_probs_are_those_of_a_plain_forward(served, reference_log_probs):
    sampling = SamplingParameters(samples=4, temperature=0.8, max_tokens=16, seed=5)
    for prompt, turns in zip(
        PROMPTS, served.engine.generate([Request(prompt, sampling) for prompt in PROMPTS]), strict=True
    ):
        for turn in turns:
            tokens = torch.from_numpy(turn.token_ids).long()
            plain = reference_log_probs(served.folders[0], prompt + tokens.tolist(), temperature=0.8)
            plain = plain[len(prompt) - 1 : -1].gather(1, tokens[:, None])[:, 0]
            assert torch.allclose(torch.from_numpy(turn.log_probs), plain, atol=1e-5)


def test_a_response_is_the_same_bit_for_bit_whatever_is_served_before_and_with_it(served):
    requests = [
        Request(prompt, SamplingParameters(samples=5, max_tokens=12, top_p=0.9, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
    ]
    together = served.engine.generate(requests)
    assert served.engine.generate(requests[::-1])[::-1] == together
    assert [served.engine.generate([request])[0] for request in requests] == together


@pytest.mark.parametrize(("name", "experts"), [("qwen3", None), ("qwen3_moe", "eager")])
def test_a_row_has_the_same_logits_beside_any_number_of_others_and_where_another_engine_goes_on(
    model_folder, name, experts
):
    arguments = TransformersArguments(dtype="float32", experts_implementation=experts)
    model = SamplingModel(model_folder(name, 1), arguments)
    tokens = torch.randint(4, 50, (6, 8), generator=torch.Generator().manual_seed(0))

    def first_of(rows, begun=0):
        """The logits after the tokens of the first row, of which `begun` were sampled before."""
        cache = model.empty_cache()
        logits = [model.compute_prompt(PROMPTS[0] + tokens[:begun, 0].tolist(), begun, cache).logits[0]]
        cache.batch_repeat_interleave(rows)
        return logits + [model.compute(row[:rows, None].tolist(), cache).logits[0] for row in tokens[begun:]]

    alone = first_of(1)
    for rows in range(1, 9):
        for begun in range(6):
            assert all(map(torch.equal, first_of(rows, begun), alone[begun:]))


def test_submitted_requests_end_one_by_one_and_those_of_a_refused_call_all_with_its_sentence(served):
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]
    served.engine.submit(dict(enumerate(requests, start=10)))
    served.engine.submit({7: requests[0], 8: Request([5, 64], GREEDY)})
    events = (event for event in chain.from_iterable(served.engine.events()) if isinstance(event, RequestEnded))
    answers = {event.number: event.answer for event in islice(events, len(requests) + 2)}
    assert [answers[number] for number in range(10, 10 + len(requests))] == served.engine.generate(requests)
    assert all("outside of the model's vocabulary" in str(answers[number]) for number in (7, 8))
    assert isinstance(answers[7], UserError)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tensor_of_a_checkpoint_lies_where_transformers_loads_it(model_folder, name):
    """From no weights, through the engine's loader, to the bytes that `from_pretrained` has; each is one parameter."""
    folder = model_folder(name, 1)
    module = SamplingModel(folder, DUMMY).module
    weights = ModelWeights(module)
    weights.load(load_file(folder / "model.safetensors").items())
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    found = module.state_dict()
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    architecture = read_architecture(read_json(folder / CONFIG))
    trace = weights.trace(architecture.hf_shapes, architecture.hf_dtypes(torch.float32))
    assert not trace.untraced
    layout = traced_layout([trace.shard], architecture.hf_shapes)
    plain = huggingface_layout(architecture.hf_shapes).shard(0)
    assert set(layout.shard(0).placements) == set(plain.placements)
    assert dict(layout.shard(0).local_shapes) == dict(plain.local_shapes)


@pytest.mark.parametrize(("name", "tied"), [("qwen3_moe", False), ("qwen3", True)])
def test_every_byte_is_the_trainers_after_a_direct_refit(
    transformers_engines, model_folder, make_trainer, assert_greedy, name, tied
):
    folders = [model_folder(name, seed, tied) for seed in (0, 1)]
    engine = transformers_engines.start(folders[0], load_format="dummy")
    trainer = make_trainer(engine, folders[0])
    trainer.connect()
    trainer.load(folders[1])
    trainer.update(1)
    written = load_file(folders[1] / "model.safetensors")
    held = engine._weights.loaded_parameters()
    assert held.keys() == written.keys()
    assert [name for name in held if not torch.equal(held[name], written[name])] == []
    ((turn,),) = engine.generate([Request(PROMPTS[0], GREEDY)])
    assert_greedy(folders[1], PROMPTS[0], turn)


def test_a_tensor_that_the_model_does_not_have_is_refused(model_folder):
    weights = ModelWeights(SamplingModel(model_folder("qwen3", 0), DUMMY).module)
    name = "model.norm.weight"
    shapes, dtypes = {name: (97,), "surplus": (2,)}, {name: torch.float32, "surplus": torch.float32}
    refused = weights.trace(shapes, dtypes).refused
    assert "shape [96], not [97]" in refused[name]
    assert "the model has no surplus" in refused["surplus"]


def test_prompts_of_other_tokens_than_the_models_are_refused(served):
    with pytest.raises(UserError, match="outside of the model's vocabulary of 64"):
        served.engine.generate([Request([5, 64], GREEDY)])


@pytest.mark.parametrize(
    "values", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_k": 0}, {"top_k": -2}, {"max_tokens": 0}]
)
def test_values_that_say_no_distribution(values):
    with pytest.raises(UserError, match=f"a request with {next(iter(values))}="):
        check_sampling(SamplingParameters(**values))


@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=12),
    top_k=st.integers(-1, 12).filter(bool),
    top_p=st.floats(0.05, 1.0),
)
def test_what_is_kept_is_what_the_fields_say(weights, top_k, top_p):
    """Against a loop over the tokens by their share; ties at the end of top_p may go either way."""
    shares = torch.tensor(weights, dtype=torch.float64)
    log_probs = kept_log_probs(shares.log()[None] * 0.7, SamplingParameters(temperature=0.7, top_k=top_k, top_p=top_p))
    kept = log_probs[0].isfinite()
    ranked = sorted(weights, reverse=True)
    if top_k > 0:
        ranked = [weight for weight in ranked if weight >= ranked[min(top_k, len(ranked)) - 1]]
    needed, mass = 0, 0.0
    while mass < top_p * sum(ranked) - 1e-9:
        mass += ranked[needed]
        needed += 1
    assert sorted(shares[kept].tolist(), reverse=True) == pytest.approx(ranked[: max(1, needed)])
    assert torch.allclose(log_probs[0][kept], (shares[kept] / shares[kept].sum()).log())


def test_a_number_chooses_the_token_in_whose_share_it_is():
    log_probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log()
    numbers = torch.tensor([0.0, 0.2499, 0.2501, 1 - 2**-53], dtype=torch.float64)
    assert tokens_at(log_probs.expand(4, -1), numbers).tolist() == [1, 1, 3, 3]


def test_the_likeliest_token_is_kept_however_little_is_asked_for():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    log_probs = kept_log_probs(logits, SamplingParameters(top_p=1e-9))
    assert torch.equal(log_probs.isfinite().nonzero()[:, 1], logits.argmax(-1))
