"""INT8 per channel in SGLang: what its own layers do, with the hooks and without; no server is started."""

import json
from types import SimpleNamespace

import pytest
import torch
from in_sglang import output_of

from converters.number_formats import INT8_CHANNEL
from megarl.rollout.sglang import cpu, int8

EXPERTS = {
    "w13_weight": [3, 64, 64],
    "w2_weight": [3, 64, 32],
    "w13_weight_scale": [3, 64, 1],
    "w2_weight_scale": [3, 64, 1],
}
LINEAR = {"weight": [32, 64], "weight_scale": [32, 1]}


@pytest.fixture(scope="module")
def layers():
    return json.loads(output_of("int8_in_sglang.py").splitlines()[-1])


@pytest.mark.sglang
def test_parameters_stay_as_they_were_loaded(layers):
    for hooks, has_loader in (("by itself", False), ("with hooks", True)):
        experts = {name: [shape, has_loader] for name, shape in EXPERTS.items()}
        assert layers[hooks]["experts"] == [experts, experts]
    linear = {name: [shape, True] for name, shape in LINEAR.items()}
    assert layers["with hooks"]["linear"] == [linear, linear]
    # By itself SGLang turns a matrix, and turns it back when the next update ends.
    turned = [[[64, 32], False], [[32, 64], False]]
    assert [each["weight"] for each in layers["by itself"]["linear"]] == turned
    assert layers["reasons"] == [None, None]


@pytest.mark.sglang
def test_the_kernel_of_a_gpu_gets_the_transpose(layers):
    """The stand-in for it takes nothing else; what is left is what quantised activations cost."""
    assert 1e-3 < layers["by the kernel"] < 0.02


@pytest.mark.sglang
def test_a_cpu_multiplies_by_the_decoded_weights(layers):
    assert layers["by itself on a CPU"] is None
    assert None not in layers["products by itself"]
    assert (layers["float32 by itself"], layers["float32"]) == (False, True)
    assert max(layers["decoded"]) < 1e-6
    assert min(layers["not decoded"]) > 1e-3


def test_a_product_is_that_of_the_decoded_matrix():
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (torch.randn(shape, generator=generator) for shape in ((24, 40), (3, 40), (24,)))
    codes, scales = INT8_CHANNEL.quantise(weight)
    layer = SimpleNamespace(weight=torch.nn.Parameter(codes, False), weight_scale=torch.nn.Parameter(scales, False))
    found = int8.multiply_by_columns(cpu.int8.multiply, None, layer, x, bias)
    # The scale of a row is that of an output.
    expected = (x @ codes.float().T) * scales.T + bias
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - (x @ weight.T + bias)).abs().max() > 1e-3
