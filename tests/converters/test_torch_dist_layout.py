"""Chunks of any cut: each element comes from, and goes to, where plain torch puts it, exactly once."""

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from conversions import MODELS, architecture_of, content_of, contents, everything_in, export, make
from distributed import cut, huggingface_tensors, whole_tensors, write_distributed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_layouts import tile

from converters.boxes import Box
from converters.errors import UserError
from converters.hf_to_megatron import plan_conversion
from converters.layouts.megatron import ParallelSizes

UNIFORM = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
FAMILIES = (*UNIFORM, "glm4_moe", "deepseek_v3", "qwen3_first_layer_dense", "deepseek_v3_two_mtp")


@st.composite
def configs(draw):
    """A family with lengths of its own."""
    name = draw(st.sampled_from(FAMILIES))
    fields = {
        "hidden_size": draw(st.sampled_from([4, 8, 12])),
        "head_dim": draw(st.sampled_from([2, 3])),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "intermediate_size": draw(st.sampled_from([4, 8, 12])),
        "moe_intermediate_size": draw(st.sampled_from([2, 4, 6])),
        "vocab_size": draw(st.integers(5, 20)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return name, {**MODELS[name], **fields}


@st.composite
def layouts(draw):
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    expert, expert_tensor = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([None, 1, 2]))
    virtual = draw(st.sampled_from([None, None, 2])) if pipeline > 1 else None
    first = draw(st.sampled_from([None, None, 1, 2])) if pipeline > 1 and not virtual else None
    dense, experts = tensor, expert * (expert_tensor or tensor)
    try:
        return ParallelSizes(
            world_size=pipeline * max(dense, experts) * draw(st.sampled_from([1, 2])),
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            num_layers_in_first_pipeline_stage=first,
        )
    except UserError:
        assume(False)


@given(configs(), layouts(), st.sampled_from([1, 3, 8]))
@settings(max_examples=60)
def test_every_element_of_a_planned_checkpoint_is_written_once_from_the_right_element(model, sizes, multiple):
    name, config = model
    architecture = architecture_of(config)
    try:
        plan = plan_conversion(architecture, sizes, architecture.hf_dtypes(torch.float32), vocabulary_multiple=multiple)
    except UserError:
        assume(False)
    hf = huggingface_tensors(config)
    expected = whole_tensors(config, hf, stacked=name in UNIFORM)
    written = {key: torch.zeros(each.shape) for key, each in plan.contents.tensors.items()}
    times = {key: torch.zeros(each.shape) for key, each in plan.contents.tensors.items()}
    targets = {(target.place.file, target.place.offset): target for target in plan.targets}
    ends = {}
    for key, stored in plan.contents.tensors.items():
        for chunk in stored.chunks:
            target = targets.pop((f"release/{chunk.file}", chunk.offset))
            shape = chunk.box.shape
            assert (target.framed_shape, target.nbytes) == (shape, chunk.box.size * 4)
            values, filled = torch.zeros(target.shape), torch.zeros(target.shape)
            for part in target.parts:
                values[part.box.slices()] = hf[part.source][part.source_box.slices()]
                filled[part.box.slices()] += 1
            assert (filled <= 1).all()
            written[key][chunk.box.slices()] = values.view(shape)
            times[key][chunk.box.slices()] += 1
            ends.setdefault(chunk.file, []).append((chunk.offset, chunk.offset + chunk.length))
    assert not targets
    rows = architecture.gpt_model["vocab_size"]
    for key, tensor in written.items():
        assert (times[key] == 1).all(), key
        if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert not tensor[rows:].any()
            assert len(tensor) == plan.padded_vocabulary
            tensor = tensor[:rows]
        assert torch.equal(tensor, expected[key]), key
    assert written.keys() == expected.keys()
    for file, spans in ends.items():
        assert 0 <= int(file.split("_")[2]) < sizes.world_size
        starts, stops = zip(*sorted(spans), strict=True)
        assert (0, *stops[:-1]) == starts, file
    assert plan.padded_vocabulary % (multiple * sizes.tensor_model_parallel_size) == 0


@given(data=st.data())
@settings(max_examples=25)
def test_chunks_cut_in_any_way_are_exported(data, tmp_path_factory):
    """Through layers, experts, heads, gate and up, as no program would; and through several of them at once."""
    folder = tmp_path_factory.mktemp("any")
    name, config = data.draw(configs())
    stacked = data.draw(st.booleans()) if name in UNIFORM else False
    hf = huggingface_tensors(config)
    tensors = whole_tensors(config, hf, stacked=stacked)
    padding = data.draw(st.integers(0, 3))
    for key in tensors.keys() & {"embedding.word_embeddings.weight", "output_layer.weight"}:
        tensors[key] = torch.cat([tensors[key], torch.full((padding, tensors[key].shape[1]), torch.nan)])
    boxes = {key: tile(data.draw, Box.whole(each.shape), data.draw(st.integers(0, 3))) for key, each in tensors.items()}
    files = data.draw(st.integers(1, 3))
    write_distributed(folder / "megatron", tensors, cut(tensors, boxes), files=files, config=config)
    export(folder / "megatron", folder / "hf", shard_size_bytes=data.draw(st.sampled_from([500, 2**40])))
    hf |= {copy: hf[original] for copy, original in copies_of(config).items()}
    assert content_of(folder / "hf") == contents(hf)


def copies_of(config):
    architecture = architecture_of(config)
    return {copy: architecture.hf_copies[copy] for copy in architecture.exported_copies}


def one_by_one(shape: tuple[int, ...]) -> list[Box]:
    return [Box(index, tuple(i + 1 for i in index)) for index in product(*map(range, shape))]


def test_chunks_of_one_element_are_exported(tmp_path):
    config = {**MODELS["qwen3_moe"], "vocab_size": 5, "hidden_size": 4, "head_dim": 2}
    hf = huggingface_tensors(config)
    tensors = whole_tensors(config, hf, stacked=True)
    boxes = {key: one_by_one(tuple(each.shape)) for key, each in tensors.items()}
    write_distributed(tmp_path / "megatron", tensors, cut(tensors, boxes), config=config)
    export(tmp_path / "megatron", tmp_path / "hf")
    assert content_of(tmp_path / "hf") == contents(hf)


PROGRAM = """
import sys
from pathlib import Path
from conversions import convert, export
from converters.layouts.megatron import ParallelSizes

source, target, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
sizes = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
                      expert_model_parallel_size=2, expert_tensor_parallel_size=1)
convert(source, target / "megatron", sizes, workers=workers)
export(target / "megatron", target / "hf", workers=workers, shard_size_bytes=4000, fp8=True)
"""


@pytest.mark.long
def test_other_processes_with_other_hash_seeds_and_workers_write_the_same_bytes(tmp_path):
    source = make(tmp_path / "source", "deepseek_v3", draw=lambda shape, dtype, _: torch.ones(shape, dtype=dtype))
    written = []
    for seed, workers in (("1", "1"), ("2", "3")):
        # To the same place, which common.pt names.
        out = tmp_path / "out"
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), "."]),
        }
        subprocess.run([sys.executable, "-c", PROGRAM, source, out, workers], env=environment, check=True)
        written.append(everything_in(out))
        shutil.rmtree(out)
    first, second = written
    assert len([name for name in first if name.endswith(".distcp")]) == 2 * 4
    assert first == second


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_two_plans_are_equal(name):
    architecture = architecture_of(MODELS[name])
    sizes = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    first, second = (plan_conversion(architecture, sizes, dtypes, vocabulary_multiple=8) for _ in range(2))
    assert first == second
    assert list(first.contents.tensors) == list(second.contents.tensors)
