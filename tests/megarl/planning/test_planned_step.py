"""Memory and seconds of a step go where the sizes, the work and the rates send them."""

from dataclasses import replace
from math import exp

import pytest
from small_step import small_step

from converters.architectures import Architecture, Lora
from converters.cost.devices import DEVICES
from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.cluster import Cluster
from megarl.planning.lengths import exponential_rate
from megarl.planning.memory.activations import Recompute
from megarl.planning.memory.engine import engine_memory
from megarl.planning.memory.rank_weights import rank_weights
from megarl.planning.memory.trainer import TrainingOptions, micro_batches_in_flight, trainer_memory
from megarl.planning.refit import engine_sizes, read_model, read_trained_model
from megarl.planning.step.knobs import turned_knobs
from megarl.planning.step.prediction import PlannedStep, StepPrediction
from megarl.planning.step.rollout import Decoding, rollout_seconds
from megarl.planning.step.speeds import ENGINE_STEP_S, RECORDED_LAYER_S, Speeds
from megarl.planning.step.training import PassSeconds, Training
from megarl.planning.workload import Workload


def recomputing(step: PlannedStep) -> PlannedStep:
    return replace(step, training=replace(step.training, recompute=Recompute(is_full=True)))


def test_recomputation_trades_memory_for_seconds() -> None:
    step = small_step()
    kept, again = StepPrediction(step), StepPrediction(recomputing(step))
    assert again.trainer_memory.activations < kept.trainer_memory.activations / 3
    assert again.seconds["update"] > 1.2 * kept.seconds["update"]
    assert again.seconds["rollout"] == kept.seconds["rollout"]


def test_longer_responses_take_longer_to_sample() -> None:
    step = small_step()
    longer = replace(step, workload=replace(step.workload, response_tokens=2000, max_response_tokens=8192))
    assert StepPrediction(longer).seconds["rollout"] > 1.5 * StepPrediction(step).seconds["rollout"]


def test_an_engine_has_no_more_samples_at_once_than_it_computes() -> None:
    step = small_step()
    few, fewer = (replace(step, engine=replace(step.engine, most_samples=most)) for most in (16, 8))
    assert StepPrediction(few).rollout_seconds > 1.5 * StepPrediction(step).rollout_seconds
    assert StepPrediction(fewer).rollout_seconds > 1.5 * StepPrediction(few).rollout_seconds
    # Four groups of two ranks with all of attention.
    groups = replace(fewer, refit=replace(fewer.refit, engine=engine_sizes(2, 8), replicas=2))
    assert StepPrediction(groups)._decoding.most_samples == 4 * 8


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


def test_gigabytes_of_a_gpu_are_those_of_memory() -> None:
    for name, said in {"A100": 80, "H100": 80, "H200": 141, "GH200": 96, "L40S": 48}.items():
        assert 0.92 * said < DEVICES[name].memory_bytes / 2**30 < said


def test_tokens_are_in_longer_sequences_than_the_mean() -> None:
    # Uniform between 0 and 4,096, as a mean in the middle assumes least: the mean of the squares over the mean.
    alone = Workload(prompt_tokens=1, response_tokens=2048, max_response_tokens=4096)
    assert alone.attention_tokens == pytest.approx(2 / 3 * 4096, rel=1e-3)
    same = Workload(prompt_tokens=1000, response_tokens=1, max_response_tokens=1)
    assert same.attention_tokens == pytest.approx(same.sequence_tokens, rel=1e-3)


def test_tokens_are_decoded_in_longer_sequences_than_half_of_the_mean() -> None:
    # Uniform between 0 and 4,096: half of the mean of the squares over the mean.
    work = Workload(prompts=1, samples=8, prompt_tokens=100, response_tokens=2048, max_response_tokens=4096)
    engine = replace(StepPrediction(small_step())._decoding, most_samples=4)
    more = rollout_seconds(engine, replace(work, samples=9), 1) - rollout_seconds(engine, work, 1)
    assert more == pytest.approx(2048 / 4 * engine.step_seconds(4, 100 + 4096 / 3), rel=1e-5)
    same = Workload(prompt_tokens=100, response_tokens=4096, max_response_tokens=4096)
    assert same.decoded_tokens == pytest.approx(100 + 4096 / 2, rel=0.01)


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
    pairs = with_it.workload.attention_tokens * 128 * (192 + 128)
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


def test_turns_move_all_to_the_host_and_back() -> None:
    step = small_step()
    plain = StepPrediction(step)
    reference = StepPrediction(replace(step, training=replace(step.training, keeps_reference=True)))
    assert plain.seconds["turns"] == pytest.approx(2 * (sum(plain.host_bytes) - plain.engine_memory.weights) / 25e9)
    added = 2 * reference.trainer_memory.reference / 25e9
    assert reference.seconds["turns"] - plain.seconds["turns"] == pytest.approx(added)


_AFTER_LAYERS = 2 * 2 * 7168 + 48
"""Bytes of a token: what the last norm and the output layer of DeepSeek-V3 read, and its log-prob."""


@pytest.mark.parametrize(
    ("modules", "spared"),
    [
        # One layer has them again, when the last norm and the log-probs are done with.
        # DeepSeek-V3 has 58 layers with experts: the products that go into the second matrix of each of 8.
        ({"moe_act"}, 57 * 2 * 8 * 2048 + _AFTER_LAYERS),
        # Keys and queries of 192 and values of 128, of 128 heads.
        ({"mla_up_proj"}, 60 * 2 * 128 * (192 + 192 + 128) + _AFTER_LAYERS),
        # Each of its kernels has the norm before it, but for those of latents (61) and of experts (58).
        ({"layernorm"}, (61 + 58) * 2 * 7168),
        ({"core_attn"}, 0),
    ],
)
def test_modules_that_are_computed_again_spare_their_tensors(modules: set[str], spared: int) -> None:
    def kept(recompute: Recompute) -> float:
        training = TrainingOptions(recompute=recompute)
        architecture, sizes = read_model("deepseek_v3"), ParallelSizes()
        [rank] = trainer_memory(architecture, sizes, training, micro_batch_tokens=1, micro_batches=1)
        return rank.activations

    found = kept(Recompute()) - kept(Recompute(modules=frozenset(modules)))
    assert found == spared


def test_stale_samples_are_made_beside_training() -> None:
    step = small_step(colocated=False)
    in_turn, beside = StepPrediction(step), StepPrediction(replace(step, staleness=1))
    assert in_turn.step_seconds == pytest.approx(sum(in_turn.seconds.values()))
    longer = max(beside.rollout_seconds, sum(beside.training_seconds.values()))
    assert beside.step_seconds == pytest.approx(longer + beside.seconds["refit"])
    on_shared_gpus = StepPrediction(replace(small_step(), staleness=1))
    assert on_shared_gpus.step_seconds == pytest.approx(sum(on_shared_gpus.seconds.values()))


def test_a_pipeline_waits_at_its_ends() -> None:
    stages = StepPrediction(small_step(pipeline_model_parallel_size=8))
    one = StepPrediction(small_step())
    assert stages.seconds["update"] > one.seconds["update"]
    assert stages.trainer_memory.weights < one.trainer_memory.weights / 3


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "expected"),
    [(4, None, 8, [4, 3, 2, 1]), (4, None, 2, [2, 2, 2, 1]), (2, 2, 8, [5 / 2, 3 / 2]), (1, None, 8, [1])],
)
def test_stages_are_as_many_micro_batches_ahead_as_stages_follow(
    stages: int, chunks: int | None, micro_batches: int, expected: list[float]
) -> None:
    sizes = ParallelSizes(
        world_size=stages, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks
    )
    assert [micro_batches_in_flight(sizes, stage, micro_batches) for stage in range(stages)] == expected


def test_a_step_that_does_not_fit_says_by_how_much_and_what_helps() -> None:
    prediction = StepPrediction(small_step(memory_gbyte=10, expert_model_parallel_size=8))
    assert not prediction.fits
    assert (said := prediction.why_not()) is not None
    assert "too much, and most of it is activations: recompute layers (--recompute full)" in said
    assert prediction.trainer_room == pytest.approx(0.94 * 10e9 - prediction.trainer_bytes, abs=1)
    state = StepPrediction(small_step(memory_gbyte=24)).why_not()
    assert "9.33 GB too much, and most of it is gradients: raise --pp, --tp, --ep" in (state or "")
    tight = StepPrediction(small_step(memory_gbyte=7))
    assert "an engine's rank lacks" in (tight.why_not() or "")
    assert StepPrediction(small_step()).why_not() is None


def test_a_refit_has_the_weights_of_both_on_a_gpu_that_they_share() -> None:
    step = small_step(memory_gbyte=7, world_size=128, pipeline_model_parallel_size=16)
    one_token = replace(step.workload, prompt_tokens=1, response_tokens=1, max_response_tokens=1)
    step = replace(step, workload=replace(one_token, max_tokens_per_micro_batch=2))
    step = replace(step, engine=replace(step.engine, prefill_tokens=1, utilization=0.99))
    large = replace(step, refit=replace(step.refit, bucket_bytes=15 * 10**8, buckets=1))
    both = large.refit.bucket_bytes * 2 + StepPrediction(large).trainer_memory.weights
    assert both + StepPrediction(large).engine_memory.weights > 0.94 * 7e9
    # Buckets of as many bytes in all.
    apart = replace(large, refit=replace(large.refit, colocated=False, buckets=2))
    for shared, says in ((large, "a refit lacks"), (apart, None)):
        prediction = StepPrediction(shared)
        assert (prediction.trainer_room > 0, prediction.engine_room > 0) == (True, True)
        assert (prediction.why_not() or "").startswith(says or "")
        assert prediction.fits is (says is None)


def test_optimizer_state_follows_its_types_and_goes_to_the_host() -> None:
    assert TrainingOptions.of({}).optimizer_bytes == 12
    small = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "torch.bfloat16"}
    assert TrainingOptions.of(small).optimizer_bytes == 8
    assert TrainingOptions.of({}, "fp32").optimizer_bytes == 8
    aware = {"use_precision_aware_optimizer": True}
    assert TrainingOptions.of(aware).optimizer_bytes == 10
    assert TrainingOptions.of({**aware, **small}).optimizer_bytes == 6
    assert TrainingOptions.of({**aware, "store_param_remainders": False}).optimizer_bytes == 12
    assert TrainingOptions.of({**aware, "main_params_dtype": "fp16"}).optimizer_bytes == 10
    host = {"optimizer_cpu_offload": True}
    assert TrainingOptions.of(host).optimizer_bytes == 4
    assert TrainingOptions.of({**host, "optimizer_offload_fraction": 0.5}).optimizer_bytes == 8
    assert TrainingOptions.of({**host, **aware}).optimizer_bytes == 0
    assert TrainingOptions.of({**host, **aware, "optimizer_offload_fraction": 0.5}).optimizer_bytes == 6


def test_fsdp2_has_rows_at_rest_and_gathers_layers_beside_each_pass() -> None:
    whole = small_step(expert_tensor_parallel_size=2)
    rows = replace(whole, refit=replace(whole.refit, trainer=replace(whole.refit.trainer, use_torch_fsdp2=True)))
    before, after = StepPrediction(whole), StepPrediction(rows)
    # Sixteen ranks, of which two are one of tensor parallelism.
    for part in ("weights", "gradients"):
        assert getattr(after.trainer_memory, part) == getattr(before.trainer_memory, part) / 8
    assert after.trainer_memory.optimizer == before.trainer_memory.optimizer
    assert after.trainer_memory.activations == before.trainer_memory.activations
    assert before.trainer_memory.gathered == 0
    assert 4 / 16 < after.trainer_memory.gathered / before.trainer_memory.weights < 6 / 16
    # Passes of large micro-batches are longer than what is gathered beside them; those of one sequence are not, over a
    # slow network.
    assert after.seconds["log_probs"] == before.seconds["log_probs"]
    tiny = replace(rows.workload, max_tokens_per_micro_batch=1)
    slow = Cluster(gpus_per_node=1, nic_gbit_per_s=50)
    whole, rows = (replace(each, workload=tiny, refit=replace(each.refit, cluster=slow)) for each in (whole, rows))
    assert StepPrediction(rows).seconds["update"] > 2 * StepPrediction(whole).seconds["update"]


def test_a_trainer_that_gathers_too_much_is_told_what_helps() -> None:
    step = small_step(memory_gbyte=1, world_size=512, expert_tensor_parallel_size=2, use_torch_fsdp2=True)
    # With next to no tokens.
    step = replace(
        step, workload=replace(step.workload, max_tokens_per_micro_batch=1, response_tokens=1, prompt_tokens=1)
    )
    assert "most of it is gathered: raise --tp, which cuts the layers that FSDP2 gathers" in (
        StepPrediction(step).why_not() or ""
    )


def test_the_knob_that_saves_most_comes_first() -> None:
    step = small_step()
    knobs = turned_knobs(step)
    names, seconds = [each.name for each in knobs], [each.prediction.step_seconds for each in knobs]
    assert seconds == sorted(seconds)
    assert {"--tp 4", "--tp 1", "--pp 2", "--ep 2", "--engine-tp 4 --replicas 4", "--recompute full"} <= {*names}
    turned = knobs[names.index("--pp 2")].prediction.step.refit.trainer
    assert (turned.pipeline_model_parallel_size, turned.world_size) == (2, 16)


def test_a_knob_turns_what_its_name_says_and_nothing_else() -> None:
    step = small_step(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        num_layers_in_first_pipeline_stage=2,
        num_layers_in_last_pipeline_stage=2,
    )
    step = replace(step, workload=replace(step.workload, max_tokens_per_micro_batch=1))
    knobs = {each.name: each.prediction.step for each in turned_knobs(step)}
    trainer = step.refit.trainer
    assert knobs["--ep 2"].refit.trainer == replace(trainer, expert_model_parallel_size=2)
    assert not [name for name in knobs if name.startswith("--micro-batch-tokens")]
    # Sixteen layers: stages of as many need no layers of their own at the ends, but those of the base are given.
    even = "--pp 2 --decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 8"
    ends = {"num_layers_in_first_pipeline_stage": 8, "num_layers_in_last_pipeline_stage": 8}
    assert knobs[even].refit.trainer == replace(trainer, pipeline_model_parallel_size=2, **ends)
    engines = knobs["--engine-tp 4 --replicas 4"].refit
    assert (engines.engine.tensor_model_parallel_size, engines.replicas) == (4, 4)


def test_collectives_are_as_fast_as_the_slowest_way() -> None:
    speeds = Speeds(small_step().device, Cluster())
    inside, outside = speeds.gather(1e9, 8), speeds.gather(1e9, 8, stride=8)
    assert inside == pytest.approx(15e-6 + 1e9 * 7 / 8 / (450e9 * 0.75))
    assert outside == pytest.approx(100e-6 + 1e9 * 7 / 8 / (50e9 * 0.8))
    assert speeds.gather(1e9, 1) == speeds.all_to_all(1e9, 1) == 0
    assert speeds.all_reduce(1e9, 8) == pytest.approx(2 * inside - 15e-6)
    assert speeds.all_to_all(1e9, 16) == pytest.approx(100e-6 + 1e9 * 8 / 16 / (50e9 * 0.8))


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.9])
def test_responses_have_the_mean_that_was_given(mean: float) -> None:
    rate = exponential_rate(mean)
    points = [(number + 0.5) / 10_000 for number in range(10_000)]
    weights = [exp(-rate * point) for point in points]
    assert sum(p * w for p, w in zip(points, weights, strict=True)) / sum(weights) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompts": 0}, "the step's prompts is 0; it must be at least 1"),
        ({"prompt_tokens": float("nan")}, "the step's prompt_tokens is nan"),
        ({"response_tokens": 600}, "the mean response of 600 tokens is longer than the longest, 512"),
    ],
)
def test_work_that_cannot_be_is_refused(fields: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Workload(**fields)


def test_an_adapter_has_few_gradients_and_needs_no_reference() -> None:
    step = small_step()
    with_reference = replace(step, training=replace(step.training, keeps_reference=True))
    adapted = replace(step, training=replace(with_reference.training, lora=Lora(8, 16)))
    whole, few = StepPrediction(with_reference), StepPrediction(adapted)
    assert whole.trainer_memory.reference == whole.trainer_memory.weights
    assert few.trainer_memory.reference == 0
    assert few.trainer_memory.gradients < whole.trainer_memory.gradients / 20
    assert whole.trainer_memory.weights < few.trainer_memory.weights < 1.05 * whole.trainer_memory.weights
    assert few.seconds["update"] < 0.8 * whole.seconds["update"]
