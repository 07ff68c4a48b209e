"""The models that benchmarks write for a GPU have the sizes that their names say."""

from math import prod

import pytest
from models_by_size import LARGE
from transformers import AutoConfig

from converters.architectures import read_architecture
from converters.cost.compute import forward_flops
from megarl.quickstart.tiny_models import TINY_MODELS


@pytest.mark.parametrize(("name", "billions", "met"), [("dense_1b", 1.34, 1.28), ("moe_2b", 2.15, 0.50)])
def test_a_model_has_as_many_parameters_as_its_name_says(name: str, billions: float, met: float) -> None:
    alike, fields = LARGE[name]
    config = AutoConfig.for_model(alike, **{**TINY_MODELS[alike].fields, **fields}).to_dict()
    architecture = read_architecture(config)
    assert sum(map(prod, architecture.hf_shapes.values())) / 1e9 == pytest.approx(billions, abs=0.005)
    assert forward_flops(architecture).per_token / 2 / 1e9 == pytest.approx(met, abs=0.005)
