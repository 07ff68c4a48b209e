"""The proposed sizes are the fastest of all that fit, and what falls out is counted."""

from dataclasses import replace

import pytest
from small_step import CONFIG, small_step

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.number_formats import FP8_BLOCK
from megarl.planning.search import say_engine, say_trainer, search
from megarl.planning.sizes import all_engine_sizes, all_trainer_sizes
from megarl.planning.step.knobs import turned_knobs
from megarl.planning.step.prediction import StepPrediction

GPUS = 8


def test_nothing_that_fits_is_faster_than_the_proposal() -> None:
    template = small_step(memory_gbyte=24)
    found = search(template, GPUS)
    best = found.best[0]
    assert best.fits
    refit = template.refit
    others = [
        StepPrediction(
            replace(template, refit=replace(refit, trainer=trainer, engine=engine, replicas=GPUS // engine.world_size))
        )
        for trainer in all_trainer_sizes(refit.architecture, GPUS, 8)
        for engine in all_engine_sizes(refit.architecture, GPUS, 8)
    ]
    fitting = [each.step_seconds for each in others if each.fits]
    assert fitting
    # Engines are tried with the fastest trainers: the refit, which both decide, is the smallest part.
    assert best.step_seconds <= 1.001 * min(fitting)
    assert [each.step_seconds for each in found.best] == sorted(each.step_seconds for each in found.best)
    assert found.fitting >= len(fitting)


def test_no_proposal_is_made_twice() -> None:
    proposed = [(say_trainer(each), say_engine(each)) for each in search(small_step(colocated=False), 4).best]
    assert len({*proposed}) == len(proposed)


def test_fsdp2_is_searched_among_the_sizes_that_it_can_have() -> None:
    template = small_step(expert_tensor_parallel_size=2, use_torch_fsdp2=True)
    for each in search(template, GPUS).best:
        sizes = each.step.refit.trainer
        assert sizes.use_torch_fsdp2
        assert sizes.pipeline_model_parallel_size == sizes.expert_model_parallel_size == 1
        assert ", FSDP2" in say_trainer(each)


def test_gpus_are_split_where_trainer_and_engines_have_their_own() -> None:
    best = search(small_step(colocated=False), 16).best[0].step.refit
    assert best.trainer.world_size + best.destinations == 16


def test_engines_without_copies_to_share_out_are_not_proposed() -> None:
    def smallest(kv_ranks: int) -> int:
        engine = replace(template.engine, kv_ranks=kv_ranks)
        found = search(replace(template, engine=engine), GPUS).best
        return min(each.step.refit.engine.tensor_model_parallel_size for each in found)

    architecture = read_architecture({**CONFIG, "num_key_value_heads": 2})
    template = small_step()
    refit = replace(template.refit, architecture=architecture, engine_architecture=architecture)
    template = replace(template, refit=refit)
    assert [smallest(1) < 4, smallest(2), smallest(4)] == [True, 4, 8]


def test_what_falls_out_is_counted_with_the_nearest() -> None:
    found = search(small_step(memory_gbyte=16), GPUS)
    assert found.fallen_out[0].count > 0
    assert "cuts of the trainer do not fit; the nearest, 8 GPUs, TP" in found.fallen_out[0].say()


def test_where_nothing_fits_the_nearest_is_named() -> None:
    with pytest.raises(UserError, match=r"nothing fits on 8 GPUs: .* cuts of the trainer do not fit; the nearest"):
        search(small_step(memory_gbyte=8), GPUS)


@pytest.mark.parametrize("colocated", [True, False])
def test_more_gpus_than_a_step_has_work_for_are_said_to_be_so(colocated: bool) -> None:
    with pytest.raises(UserError, match=r"on 1000000 GPUs has responses for all of its ranks: .*; give fewer GPUs, or"):
        search(small_step(colocated=colocated), 1_000_000)


def test_engines_that_fit_nowhere_are_blamed_alone() -> None:
    step = small_step(memory_gbyte=80)
    # Keys and values of one response are more than a GPU has, and some trainers have more ranks than responses.
    work = replace(step.workload, prompts=1, samples=2, max_response_tokens=10**8)
    with pytest.raises(UserError, match=r"nothing fits on 8 GPUs: \d+ cuts of an engine do not fit") as refused:
        search(replace(step, workload=work), GPUS)
    assert "trainer" not in str(refused.value)


def test_engines_that_no_run_can_have_are_named_with_the_reason_alone() -> None:
    step = small_step()
    with pytest.raises(
        UserError, match=r"one of them because decode_context_parallel_size 3 .*: set it to a"
    ) as refused:
        search(replace(step, engine=replace(step.engine, kv_ranks=3)), GPUS)
    assert "more memory" not in str(refused.value)


def test_one_gpu_is_not_shared_out() -> None:
    with pytest.raises(UserError, match=r"need a GPU each, and --gpus is 1: give 2 or more, or --colocated"):
        search(small_step(colocated=False), 1)


def test_only_engines_that_a_run_can_have_are_proposed() -> None:
    template = small_step(colocated=True)
    template = replace(template, refit=replace(template.refit, number_format=FP8_BLOCK))
    found = search(template, 16)
    assert found.fallen_out[1].unserved > 0
    assert "cuts of an engine are none that a run can have, one of them because " in found.fallen_out[1].say()
    for each in (*found.best, *(knob.prediction for knob in turned_knobs(template))):
        if each.step.refit.engine != template.refit.engine:
            each.step.refit.check_served()
    sizes = [each for each in all_engine_sizes(template.refit.architecture, 16, 8) if each.world_size == 16]
    assert {each.tensor_model_parallel_size for each in sizes} > {16}
