"""Seconds of the passes of a trainer and of an engine, by first principles."""

from dataclasses import replace

import pytest
from small_step import small_step

from converters.architectures import Architecture
from converters.cost.devices import DEVICES
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.cluster import Cluster
from megarl.planning.memory.engine import engine_memory
from megarl.planning.memory.rank_weights import rank_weights
from megarl.planning.memory.trainer import TrainingOptions
from megarl.planning.refit import engine_sizes, read_model, read_trained_model
from megarl.planning.step.prediction import StepPrediction
from megarl.planning.step.rollout import Decoding, rollout_seconds
from megarl.planning.step.speeds import ENGINE_STEP_S, RECORDED_LAYER_S, Speeds
from megarl.planning.step.training import PassSeconds, Training
from megarl.planning.workload import Workload


@pytest.mark.parametrize(
    ("model", "seconds_of_a_pair"),
    [
        # A head reads the latent of 512 with 64 of position, and adds up the latent: 148 TFLOP/s are the bound.
        ("deepseek_v3", 61 * 128 * 2 * (512 + 64 + 512) / (0.6 * 148e12)),
        # Four heads share each of eight keys and values of 128 in bf16: 4,000 GB/s are the bound.
        ("qwen3_8b", 36 * 8 * 2 * 128 * 2 / (0.7 * 4e12)),
    ],
)
def test_decoding_a_latent_on_every_rank_is_bound_by_products(model: str, seconds_of_a_pair: float) -> None:
    cluster, architecture, sizes = Cluster(memory_gbyte_per_s=4000), read_model(model), engine_sizes(1, None)
    memory = engine_memory(architecture, sizes, None, memory_bytes=96e9, utilization=0.9, prefill_tokens=1)
    engine = Decoding(architecture, sizes, None, memory, Speeds(DEVICES["H20"], cluster))
    short, long = (engine.step_seconds(64, context) for context in (4096, 8192))
    assert (long - short) / (64 * 4096) == pytest.approx(seconds_of_a_pair)


def test_an_embedding_that_is_the_output_layer_is_multiplied_with() -> None:
    model, cluster = read_model("qwen3_1_7b"), Cluster()
    memory = engine_memory(model, engine_sizes(1, None), None, memory_bytes=80e9, utilization=0.9, prefill_tokens=1)
    engine = Decoding(model, engine_sizes(1, None), None, memory, Speeds(DEVICES["H100"], cluster))
    # 1.72 billion parameters are read for a token, and all of them are multiplied with a prompt.
    assert memory.weights == pytest.approx(2 * 1.7206e9, rel=1e-3)
    read = engine.step_seconds(1, 0) - 28 * RECORDED_LAYER_S - ENGINE_STEP_S
    assert read == pytest.approx(memory.weights / (0.7 * 3350e9), rel=1e-3)
    assert engine.prefill_seconds(1000, 0) == pytest.approx(1000 * 2 * 1.7206e9 / (0.6 * 989e12), rel=1e-3)
    stages = ParallelSizes(world_size=2, pipeline_model_parallel_size=2)
    assert [rank_weights(model, stages, stage).logits for stage in range(2)] == [0, 151_936 * 2048]


def test_long_prompts_take_the_square_of_their_length() -> None:
    model, sizes = read_model("deepseek_v3"), engine_sizes(1, None)
    memory = engine_memory(model, sizes, None, memory_bytes=80e9, utilization=0.9, prefill_tokens=1)
    engine = Decoding(model, sizes, None, memory, Speeds(DEVICES["H100"], Cluster()))
    short, long = (engine.prefill_seconds(65536, length) for length in (1024, 4096))
    # Half of the pairs; queries and keys of 192, and values of 128, as prompts have them and no latent.
    flops = 65536 * (4096 - 1024) / 2 * 2 * 128 * (192 + 128) * 61
    assert long - short == pytest.approx(flops / (0.6 * 989e12))


def test_tokens_are_in_longer_sequences_than_the_mean() -> None:
    # Uniform between 0 and 4,096, as a mean in the middle assumes least: the mean of the squares over the mean.
    alone = Workload(prompt_tokens=1, response_tokens=2048, max_response_tokens=4096)
    assert alone.attention_length == pytest.approx(2 / 3 * 4096, rel=1e-3)
    same = Workload(prompt_tokens=1000, response_tokens=1, max_response_tokens=1)
    assert same.attention_length == pytest.approx(same.sequence_tokens, rel=1e-3)


def test_tokens_are_decoded_in_longer_sequences_than_half_of_the_mean() -> None:
    # Uniform between 0 and 4,096: half of the mean of the squares over the mean.
    work = Workload(prompts=1, samples=8, prompt_tokens=100, response_tokens=2048, max_response_tokens=4096)
    engine = replace(StepPrediction(small_step())._decoding, most_samples=4)
    more = rollout_seconds(engine, replace(work, samples=9), 1) - rollout_seconds(engine, work, 1)
    assert more == pytest.approx(2048 / 4 * engine.step_seconds(4, 100 + 4096 / 3), rel=1e-5)
    same = Workload(prompt_tokens=100, response_tokens=4096, max_response_tokens=4096)
    assert same.decoding_context == pytest.approx(100 + 4096 / 2, rel=0.01)


def test_attention_of_a_pass_sees_the_lengths_of_sequences() -> None:
    step = small_step()
    # Uniform, and all of one length: as many tokens, and attention to 2/3 of the longest or to half of it.
    work = Workload(prompt_tokens=1, response_tokens=100_000, max_response_tokens=200_000, samples=2, prompts=16)
    works = work, replace(work, max_response_tokens=100_000)
    longer, same = (StepPrediction(replace(step, workload=each)) for each in works)
    pair = 16 * longer.step.workload.tokens / 8 * (2 / 3 - 0.5) * 200_000 * 8 * 2 * 128
    added = longer.seconds["log_probs"] - same.seconds["log_probs"]
    assert added == pytest.approx(pair / (0.6 * 989e12), rel=0.03)


def passes(model: Architecture, **sizes: int) -> Training:
    trainer = ParallelSizes(**sizes)
    work = Workload(prompt_tokens=1, response_tokens=16383, max_response_tokens=16383)
    return Training(model, trainer, TrainingOptions(), Speeds(DEVICES["H100"], Cluster()), work)


@pytest.mark.parametrize(
    ("model", "gathers"), [("deepseek_v3", 4 * 61), ("qwen3_30b_a3b", 2 * 48), ("qwen3_8b", 4 * 36)]
)
def test_shared_experts_gather_tokens_over_tensor_parallelism_and_others_do_not(model: str, gathers: int) -> None:
    architecture = read_model(model)
    training = passes(architecture, world_size=2, tensor_model_parallel_size=2)
    hidden = 2 * 16384 * architecture.transformer_config["hidden_size"]
    [stage] = training._stages
    assert stage.tensor == pytest.approx(gathers * (15e-6 + hidden / 2 / (0.75 * 450e9)))


def test_a_layer_of_multi_token_prediction_is_computed_in_updates_with_its_logits() -> None:
    with_it, without = (passes(read_trained_model("deepseek_v3", layers)) for layers in (1, 0))
    # Attention, a shared expert and eight others, a router, the projection of two hidden states, and logits.
    weights = 187_107_328 + 9 * 3 * 7168 * 2048 + 256 * 7168 + 2 * 7168**2 + 129_280 * 7168
    pairs = with_it.workload.attention_length * 128 * (192 + 128)
    added = with_it._stages[0].computing - without._stages[0].computing
    assert added == pytest.approx(16384 * (2 * weights + pairs) / (0.6 * 989e12), rel=1e-3)
    assert with_it.log_prob_seconds == without.log_prob_seconds


def test_interleaved_stages_send_after_each_of_their_chunks() -> None:
    sizes = {"world_size": 4, "pipeline_model_parallel_size": 4}
    model = read_model("qwen3_8b")
    [whole, *_], [cut, *_] = (
        passes(model, **sizes)._stages,
        passes(model, **sizes, virtual_pipeline_model_parallel_size=3)._stages,
    )
    assert cut.sending == 3 * whole.sending == pytest.approx(3 * 2 * 16384 * 4096 / (0.8 * 50e9))
    assert cut.computing == whole.computing


def test_a_backward_pass_exchanges_gradients_and_inputs_that_nobody_kept() -> None:
    forward = PassSeconds(computing=1, tensor=10, experts=100, context=1000, sending=10000)
    assert forward.after(2, again=False) == 2 + 10 + 5 + 100 + 2000 + 10000
    assert forward.after(1, again=True) == 1 + 10 + 5 + 100 + 2000 + 10000 + 1 + 10 + 100 + 1000
