"""Loaders that are traced, beside what they do with real values."""

import pickle
from functools import partial

import torch

from converters.layout import check_tiling
from converters.layouts.traced_layout import fill_padding, local_tensors, trace_loading

UNWRITTEN = -7.0


def run(load, parameters, hf, **options):
    """Trace `load`, and see that the parameters keep their bytes."""
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in hf.items()}
    dtypes = {name: tensor.dtype for name, tensor in hf.items()}
    trace = trace_loading(partial(load, parameters), parameters, shapes, dtypes, **options)
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())
    return pickle.loads(pickle.dumps(trace))


def check_against_load(load, parameters, hf):
    """The traced placements and padding, carried out, give what a load of real values gives."""
    trace = run(load, parameters, hf)
    assert trace.untraced == {}
    check_tiling(trace.shard)
    load(parameters, iter(hf.items()))
    loaded = {name: parameter.clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.fill_(UNWRITTEN)
    fill_padding(trace, parameters)
    tensors = local_tensors(parameters, trace.shard)
    assert trace.dtypes == {name: tensor.dtype for name, tensor in tensors.items()}
    for placement in trace.shard.placements:
        hf_part = hf[placement.hf_name][placement.hf_box.slices()]
        tensors[placement.local_name][placement.local_box.slices()] = hf_part
    for name, parameter in parameters.items():
        assert torch.equal(parameter, loaded[name]), name
    return trace


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, UNWRITTEN, dtype=dtype)


def refuse(parameters, tensor):
    assert parameters["w"].shape == tensor.shape[:1], "no such shape"
