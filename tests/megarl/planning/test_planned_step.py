"""Memory and seconds of a step go where the sizes, the work and the rates send them."""

from dataclasses import replace
from math import exp

import pytest
from small_step import small_step

from converters.architectures import Lora, read_architecture
from converters.cost.devices import DEVICES
from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.config.folder import known_model
from megarl.planning.cluster import Cluster
from megarl.planning.lengths import exponential_rate
from megarl.planning.memory.activations import Recompute
from megarl.planning.memory.trainer import TrainingOptions, micro_batches_in_flight, trainer_memory
from megarl.planning.refit import engine_sizes, read_model
from megarl.planning.step.knobs import turned_knobs
from megarl.planning.step.prediction import PlannedStep, StepPrediction
from megarl.planning.step.speeds import Speeds
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


def test_gigabytes_of_a_gpu_are_those_of_memory() -> None:
    for name, said in {"A100": 80, "H100": 80, "H200": 141, "GH200": 96, "L40S": 48}.items():
        assert 0.92 * said < DEVICES[name].memory_bytes / 2**30 < said


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


def test_a_layer_of_multi_token_prediction_keeps_its_projection_and_log_probs_beside_a_layer() -> None:
    def kept(layers: int, predicting: int) -> int:
        fields = {"num_hidden_layers": layers, "num_nextn_predict_layers": predicting}
        architecture = read_architecture({**known_model("deepseek_v3"), **fields})
        [rank] = trainer_memory(architecture, ParallelSizes(), TrainingOptions(), micro_batch_tokens=1, micro_batches=1)
        return rank.activations

    # The norms of a hidden state and an embedding keep their inputs, and the projection both results.
    assert kept(61, 1) - kept(62, 0) == 2 * 2 * 2 * 7168 + _AFTER_LAYERS


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
    for each in (large, apart):
        prediction = StepPrediction(each)
        assert (prediction.trainer_room > 0, prediction.engine_room > 0) == (True, True)
        assert (prediction.refit_room < 0) is each.refit.colocated
        assert (prediction.why_not() or "").startswith("a refit lacks") is each.refit.colocated


def test_what_refits_have_on_a_gpu_is_beside_an_engines_share() -> None:
    shared, apart = (StepPrediction(small_step(colocated=colocated)) for colocated in (True, False))
    # Two buckets on each side, of what vLLM leaves of 80 GB.
    assert shared.rollout_room == pytest.approx(8e9 - 4e8)
    assert apart.rollout_room == pytest.approx(8e9 - 2e8)
    for before, rooms in ((shared, ("trainer_room", "refit_room", "rollout_room")), (apart, ("rollout_room",))):
        after = StepPrediction(replace(before.step, staged_bytes=10**9))
        every = ("trainer_room", "refit_room", "rollout_room", "engine_room")
        assert {name for name in every if getattr(before, name) - getattr(after, name) == 10**9} == {*rooms}
        assert after.fits
    full = StepPrediction(replace(apart.step, staged_bytes=10**10))
    assert not full.fits
    assert "a GPU lacks 2.20 GB beside an engine's share of it for the refit's buckets and 10.0 GB of values" in (
        full.why_not() or ""
    )


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


@pytest.mark.parametrize("ratio", [100, 1000, 20_000])
def test_a_limit_that_no_response_comes_near_hardly_matters(ratio: int) -> None:
    step = small_step()
    near, far = (
        StepPrediction(
            replace(step, workload=replace(step.workload, response_tokens=50, max_response_tokens=50 * each))
        )
        for each in (25, ratio)
    )
    assert far.seconds["rollout"] == pytest.approx(near.seconds["rollout"], rel=0.02)
    assert far.seconds["update"] == pytest.approx(near.seconds["update"], rel=0.02)


@pytest.mark.parametrize("mean", [0.0005, 0.1, 0.5, 0.9])
def test_responses_have_the_mean_that_was_given(mean: float) -> None:
    rate = exponential_rate(mean)
    points = [(number + 0.5) / 100_000 for number in range(100_000)]
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
