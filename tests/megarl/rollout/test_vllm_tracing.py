"""Traced layouts of vLLM, against real loads by vLLM and against the layout that engines are planned with."""

import pickle

import pytest
import torch
from engine_host import PROMPTS
from planned_bytes import check_that_it_is_traced, planned_refit
from traced_layouts import different, held_elements
from vllm_ranks import random_tensors

from converters.architectures import read_architecture
from converters.layout import check_tiling
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.layouts.traced_layout import local_tensors, traced_layout, untraced
from converters.number_formats import FP8_BLOCK, MXFP8
from converters.plan import plan
from converters.topology import Topology
from megarl.planning.refit import engine_sizes
from megarl.quickstart.tiny_models import IN_BLOCKS
from megarl.resharding.direct.quantised_shard import Quantisation
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.rollout.vllm.kind import VLLM

DENSE = ("llama", "qwen2", "qwen3")
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
# Two ranks first: with every change of their number the processes have to join anew.
CASES = [
    *((name, 2, True) for name in EXPERTS),
    *((name, 2, False) for name in DENSE + EXPERTS),
    *((name, 1, False) for name in DENSE + EXPERTS),
]


def _record_load_and_write(rank, shapes, dtypes):
    """The trace, and what went wrong with it: compared with a real load, then in place of one."""
    from megarl.rollout.vllm.tracing import after_direct_write, loaded_parameters, trace_model

    problems = []
    every = dict(rank.model.named_parameters())
    parameters = loaded_parameters(rank.model)
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    trace = trace_model(rank.model, rank.config.model_config, shapes, dtypes)
    tensors, tensors_before = local_tensors(parameters, trace.shard), local_tensors(before, trace.shard)
    for (name, box), value in zip(trace.shard.padding, trace.padding_values, strict=True):
        if not (tensors[name][box.slices()] == value).all():
            problems.append(f"the padding {box} of {name} is not {value}")
        tensors_before[name][box.slices()] = value
    problems += [f"trace wrote {name}" for name in before if not equal(before[name], parameters[name])]

    hf = {name: tensor.to(dtypes[name]) for name, tensor in random_tensors(shapes).items()}
    with torch.no_grad():
        rank.model.load_weights(iter(hf.items()))
    after_direct_write(rank.model, rank.config.model_config)
    loaded = {name: parameter.clone() for name, parameter in every.items()}
    for placement in trace.shard.placements:
        part = tensors[placement.local_name][placement.local_box.slices()]
        if not equal(part, hf[placement.hf_name][placement.hf_box.slices()]):
            problems.append(f"not loaded there: {placement}")

    for parameter in parameters.values():
        parameter.data.fill_(0)
    for placement in trace.shard.placements:
        part = hf[placement.hf_name][placement.hf_box.slices()]
        tensors[placement.local_name][placement.local_box.slices()] = part
    after_direct_write(rank.model, rank.config.model_config)
    problems += [f"{name} differs" for name, parameter in every.items() if not equal(parameter, loaded[name])]
    return trace, problems


def equal(one, other):
    """Whether two tensors have the same bytes: codes in FP8 cannot be compared."""
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)))


@pytest.mark.parametrize(("name", "tensor_parallel", "expert_parallel"), CASES)
def test_a_recorded_layout_is_what_a_real_load_does(ranks, tiny_config, name, tensor_parallel, expert_parallel):
    folder, config = tiny_config(name)
    architecture = read_architecture(config)
    shapes, dtypes = architecture.hf_shapes, architecture.hf_dtypes(torch.float32)
    arguments = {"tensor_parallel_size": tensor_parallel, "enable_expert_parallel": expert_parallel}
    results = ranks(_record_load_and_write, folder, arguments, shapes, dtypes)
    assert [problem for _, problems in results for problem in problems] == []
    traces = [trace for trace, _ in results]
    assert untraced(traces) == {}
    for trace in traces:
        check_tiling(trace.shard)
        assert set(trace.dtypes.values()) == {torch.float32}
        assert len(pickle.dumps(trace)) < 20_000
    layout = traced_layout([trace.shard for trace in traces], shapes)
    assert layout.ranks == tensor_parallel
    trainer = ParallelSizes(world_size=2)
    source = megatron_layout(architecture, trainer, module_names="te")
    moved = sum(transfer.destination_box.size for transfer in plan(source, layout))
    assert moved == sum(placement.local_box.size for each in traces for placement in each.shard.placements)

    parallel = ParallelSizes(
        world_size=tensor_parallel,
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=tensor_parallel if expert_parallel else 1,
        expert_tensor_parallel_size=1 if expert_parallel else tensor_parallel,
    )
    assert different(architecture, traces, parallel) == set()
    # Two engines on a machine, apart from the trainer's, whose workers pass things on.
    check_that_it_is_traced(planned_refit(architecture, trainer, parallel, replicas=2), traces)


@pytest.mark.parametrize("number_format", [FP8_BLOCK, MXFP8], ids=lambda each: each.name)
# Each rank has 128 rows of keys: a part of them, or all that there are.
@pytest.mark.parametrize("heads", [{"num_key_value_heads": 8}, {"num_key_value_heads": 1, "head_dim": 128}])
def test_a_recorded_layout_of_codes_and_scales_is_what_a_real_load_does(ranks, tiny_config, number_format, heads):
    folder, config = tiny_config("qwen3_moe", **IN_BLOCKS["qwen3_moe"] | heads)
    architecture = read_architecture(config)
    shapes, dtypes = number_format.checkpoint(architecture, architecture.hf_dtypes(torch.float32))
    given = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    results = ranks(_record_load_and_write, folder, VLLM.quantised(given, number_format, architecture), shapes, dtypes)
    assert [problem for _, problems in results for problem in problems] == []
    traces = [trace for trace, _ in results]
    assert untraced(traces) == {}
    topology = Topology.apart(2, 2)
    quantisation = Quantisation(number_format, torch.float32)
    sizes = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
    spec = TransferSpec(architecture, sizes, "te", traces, 1, topology, 100_000, quantisation)
    spec.check(architecture.hf_dtypes(torch.float32))
    assert all(spec.outgoing(0).values())
    refit = planned_refit(architecture, sizes, engine_sizes(2, 2), number_format=number_format)
    check_that_it_is_traced(refit, traces, quantisation)


def _derive_again(rank):
    from vllm.model_executor.layers.attention import MLAAttention

    from megarl.rollout.vllm.tracing import after_direct_write

    attention = next(module for module in rank.model.modules() if isinstance(module, MLAAttention))
    for name in ("W_UV", "W_UK_T"):
        # As for FP8: of memory of their own.
        setattr(attention, name, torch.nn.Parameter(getattr(attention, name).data.clone(), requires_grad=False))
    weight = attention.kv_b_proj.weight
    weight.data.copy_(torch.randn(weight.shape))
    after_direct_write(rank.model, rank.config.model_config)
    keys_and_values = torch.cat([attention.W_UK_T.transpose(1, 2), attention.W_UV], dim=2)
    return torch.equal(keys_and_values.permute(0, 2, 1).flatten(0, 1), weight)


def test_what_vllm_derives_from_weights_is_computed_anew(ranks, tiny_config):
    assert ranks(_derive_again, tiny_config("deepseek_v3")[0], {}) == [True]


def _refused_version(rank, version):
    import vllm

    from converters.errors import UserError
    from megarl.rollout.vllm.tracing import trace_model

    installed, vllm.__version__ = vllm.__version__, version
    try:
        trace_model(rank.model, rank.config.model_config, {}, {})
    except UserError as error:
        return str(error)
    finally:
        vllm.__version__ = installed
    return None


def test_a_version_that_is_not_known_is_refused(ranks, tiny_config):
    folder, _ = tiny_config("qwen3")
    assert ranks(_refused_version, folder, {}, "0.33.1") == [
        "vLLM 0.33.1 is installed, and how it keeps weights is known for 0.32 only: install one of these"
    ]
    assert ranks(_refused_version, folder, {}, "0.32.4+cu130") == [None]


def test_a_running_engine_is_recorded_and_goes_on(served, assert_greedy):
    weights = served.first
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in weights.tensors.items()}
    (packed,) = served.engine.trace_layout(shapes, dtypes)
    trace = packed.unpacked()
    assert trace.untraced == {}
    held = held_elements(traced_layout([trace.shard], shapes).shard(0), shapes)
    assert all(mask.all() for mask in held.values())
    assert_greedy(served.folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
    served.update(served.second, served.engine.version() + 1)
    assert_greedy(served.folders[1], PROMPTS[0], served.greedy(PROMPTS[0]))
