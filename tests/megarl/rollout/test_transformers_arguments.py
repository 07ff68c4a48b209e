"""Arguments of the transformers engine: each does what it says, and a wrong one is a sentence."""

import pytest
import torch
from engine_host import PROMPTS
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.resharding.direct.transfer_spec import check_traces
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.transformers.arguments import TransformersArguments, read_arguments
from megarl.rollout.transformers.batches import Batches
from megarl.rollout.transformers.model import SamplingModel
from megarl.rollout.transformers.weights import ModelWeights

REQUEST = Request(PROMPTS[0], SamplingParameters(samples=6, max_tokens=12, seed=3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 2}, r"engine_args\.max_num_seq: .* has no such option.* did you mean .*\.max_num_seqs"),
        ({"tensor_parallel_size": 2}, r"engine_args\.tensor_parallel_size: the installed transformers has no such"),
        ({"dtype": "float13"}, r"engine_args\.dtype=float13 cannot be: it takes auto or float32"),
        ({"max_num_seqs": "many"}, r"engine_args\.max_num_seqs=many cannot be: it takes int"),
        ({"max_num_seqs": 0}, r"engine_args\.max_num_seqs=0 cannot be: it must be at least 1"),
        ({"max_model_len": -5}, r"engine_args\.max_model_len=-5 cannot be: it must be at least 1"),
    ],
)
def test_arguments_that_do_not_exist(given, message):
    with pytest.raises(UserError, match=message):
        read_arguments(given)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["attn_implementation", "experts_implementation"])
def test_an_implementation_that_transformers_does_not_know(model_folder, name, load_format):
    with pytest.raises(UserError, match=r"transformers cannot serve .*guesswork"):
        SamplingModel(model_folder("qwen3_moe", 0), read_arguments({name: "guesswork", "load_format": load_format}))


def test_attention_and_experts_are_computed_as_asked_for(model_folder, reference_log_probs):
    folder = model_folder("qwen3_moe", 0)
    arguments = read_arguments({"attn_implementation": "eager", "experts_implementation": "eager"})
    model = SamplingModel(folder, arguments)
    assert model.module.config._attn_implementation == model.module.config._experts_implementation == "eager"
    log_probs = model.compute([PROMPTS[0]], model.empty_cache()).logits.log_softmax(-1)
    assert torch.allclose(log_probs[0], reference_log_probs(folder, PROMPTS[0])[-1], atol=1e-5)


def test_the_models_own_context_is_the_default(model_folder):
    folder = model_folder("qwen3", 0)
    assert SamplingModel(folder, TransformersArguments()).max_tokens == 512
    assert SamplingModel(folder, TransformersArguments(max_model_len=32)).max_tokens == 32


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_are_of_the_type_asked_for_but_those_that_transformers_keeps(model_folder, load_format):
    folder = model_folder("deepseek_v3", 0)
    model = SamplingModel(folder, TransformersArguments(dtype="bfloat16", load_format=load_format)).module
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in expected.state_dict().items()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    architecture = read_architecture(read_json(folder / CONFIG))
    trained = architecture.hf_dtypes(torch.bfloat16)
    check_traces([ModelWeights(model).trace(architecture.hf_shapes, trained)], trained)


def test_logits_are_not_rounded_where_that_is_asked_for(model_folder):
    def logits(**given):
        model = SamplingModel(model_folder("qwen3", 0), TransformersArguments(dtype="bfloat16", **given))
        return model.compute([PROMPTS[0]], model.empty_cache()).logits

    rounded, exact = logits(), logits(float32_logits=True)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.allclose(rounded, exact, atol=0.05)


def test_sample_by_sample_none_depends_on_the_others_even_in_its_last_bit(transformers_engines, folders):
    engine = transformers_engines.start(folders[0], max_num_seqs=1)
    ((alone, *_),) = engine.generate([Request(REQUEST.prompt_token_ids, SamplingParameters(max_tokens=12, seed=3))])
    (together,) = engine.generate([REQUEST])
    assert together[0] == alone


def test_no_weights_are_read_where_an_update_brings_them(transformers_engines, folders, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    engine = transformers_engines.start(tmp_path, load_format="dummy")
    assert engine.version() == -1
    with pytest.raises(UserError, match="transformers cannot serve"):
        transformers_engines.start(tmp_path)
    transformers_engines.running = None


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_experts_of_every_token_are_those_of_a_plain_forward(model_folder, check_experts, name):
    """Whatever is sampled together, and though the keys and values are recomputed in between."""
    folder = model_folder(name, 0)
    model = SamplingModel(folder, TransformersArguments(enable_return_routed_experts=True))
    batches = Batches(model, max_samples=4)
    sampling = SamplingParameters(samples=6, max_tokens=9, seed=3)
    futures = batches.add([Request(prompt, sampling) for prompt in PROMPTS[:2]])
    for step in range(100):
        if step == 4:
            batches.forget()
        if batches:
            batches.step(0)
    turns = [turn for future in futures for turn in future.result(timeout=0)]
    assert len({tuple(turn.token_ids) for turn in turns}) > 6
    for turn in turns:
        check_experts(folder, turn, model.routing)
    # The prompt's are one array for all samples that were computed with it.
    assert turns[0].routed_experts[0] is turns[3].routed_experts[0]


def test_what_is_aborted_leaves_experts_to_whoever_goes_on_with_it(model_folder):
    model = SamplingModel(model_folder("qwen3_moe", 0), TransformersArguments(enable_return_routed_experts=True))
    batches = Batches(model, max_samples=4)
    (future,) = batches.add([REQUEST])
    for _ in range(3):
        batches.step(0)
    batches.abort()
    turns = future.result(timeout=0)
    # One had ended before.
    assert [turn.finish_reason == "abort" for turn in turns] == [turn.routed_experts == () for turn in turns]
    assert sorted(len(turn.token_ids) for turn in turns if not turn.routed_experts) == [0, 0, 3, 3, 3]


def test_a_dense_model_has_no_experts_to_return(model_folder):
    with pytest.raises(UserError, match=r"qwen3 model has no experts .* set algorithm\.router_replay=none"):
        SamplingModel(model_folder("qwen3", 0), TransformersArguments(enable_return_routed_experts=True))
