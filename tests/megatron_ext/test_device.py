"""The CPU layer: what megatron-core asks of CUDA and NCCL, answered by CPU and gloo."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext import device

pytestmark = pytest.mark.skipif(device.backend() != "gloo", reason="the CPU layer is not installed beside a GPU")

THREE = ParallelSizes(world_size=3)


def rows(rank: int, count: int) -> Tensor:
    return torch.arange(count * 2, dtype=torch.float32).view(count, 2) + 100 * rank


def collectives(rank: int, sizes: ParallelSizes) -> dict[str, Tensor]:
    average = torch.tensor([float(rank), 3.0])
    dist.all_reduce(average, op=dist.ReduceOp.AVG)

    gathered = [torch.empty(count, 2) for count in (2, 0, 3)]
    dist.all_gather(gathered, rows(rank, (2, 0, 3)[rank]))

    scattered = torch.empty((1, 3, 2)[rank], 2)
    dist.reduce_scatter(scattered, [rows(rank, count) for count in (1, 3, 2)])

    # Rank r sends r + 1 rows to each rank; the sizes are tensors, as the MoE dispatcher has them.
    exchanged = torch.empty(1 + 2 + 3, 2)
    sent = torch.full((3,), rank + 1)
    dist.all_to_all_single(exchanged, rows(rank, 3 * (rank + 1)), torch.tensor([1, 2, 3]), sent)
    return {"average": average, "gathered": torch.cat(gathered), "scattered": scattered, "exchanged": exchanged}


def test_collectives_of_nccl_that_megatron_uses() -> None:
    results = run_ranks(collectives, THREE)
    for rank, result in enumerate(results):
        assert result["average"].tolist() == [1.0, 3.0]
        assert torch.equal(result["gathered"], torch.cat([rows(0, 2), rows(2, 3)]))
        assert torch.equal(result["scattered"], sum(rows(sender, (1, 3, 2)[rank]) for sender in range(3)))
        expected = [rows(sender, 3 * (sender + 1)).split(sender + 1)[rank] for sender in range(3)]
        assert torch.equal(result["exchanged"], torch.cat(expected))


def random_numbers_inside_and_outside(rank: int, sizes: ParallelSizes) -> tuple[bool, list[Tensor]]:
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with get_cuda_rng_tracker().fork():
            draws.append(torch.rand(4))
    return torch.equal(before, torch.get_rng_state()), draws


def test_forking_the_random_number_generator_restores_it() -> None:
    results = run_ranks(random_numbers_inside_and_outside, ParallelSizes(world_size=2, tensor_model_parallel_size=2))
    for restored, (first, second) in results:
        assert restored
        assert not torch.equal(first, second)
    assert not torch.equal(results[0][1][0], results[1][1][0]), "tensor-parallel ranks must draw differently"


@pytest.mark.parametrize("factory", [torch.zeros, torch.ones, torch.empty])
@pytest.mark.parametrize("place", ["cuda", "cuda:0", torch.device("cuda")])
def test_tensors_made_on_cuda_are_on_cpu(factory, place) -> None:
    assert factory(2, device=place).device == torch.device("cpu")
    assert torch.tensor([1.0], device=place).device == torch.device("cpu")
    assert torch.empty_like(torch.zeros(1), device=place).device == torch.device("cpu")


def test_device_contexts_still_work() -> None:
    with torch.device("meta"):
        assert torch.empty(2).is_meta
        assert torch.zeros(2).is_meta


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "torch.cuda.FloatTensor"), (torch.bfloat16, "torch.cuda.BFloat16Tensor")]
)
def test_tensors_have_the_type_names_of_cuda(dtype: torch.dtype, name: str) -> None:
    assert torch.zeros(1, dtype=dtype).type() == name
    assert torch.zeros(1).type(dtype).dtype is dtype


def test_pinned_memory_is_that_of_the_host() -> None:
    # Latent attention under context parallelism asks for it, whatever the device.
    assert torch.tensor([1], pin_memory=True).item() == 1


def test_installing_after_megatron_is_refused() -> None:
    code = "import sys; sys.modules['megatron.core'] = sys; from megatron_ext import device; device.install()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "before the first import of megatron" in result.stderr


def test_installing_again_changes_nothing() -> None:
    before = torch.zeros, dist.all_reduce, torch.Tensor.type
    device.install()
    assert before == (torch.zeros, dist.all_reduce, torch.Tensor.type)


@pytest.mark.long
def test_nothing_is_compiled() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert torch.compile(double) is torch.compile(dynamic=True)(double) is double
    # Megatron's decorators ask for it on import, and the compiler's own import is what takes the time.
    code = (
        "import sys; from megatron_ext import device; device.install(); import megatron.core; "
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_float32_is_multiplied_fast_and_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(200, 300, generator=generator) for _ in range(2))
    # Rounded to bfloat16 the numbers would be wrong in the third digit.
    torch.testing.assert_close(a @ b.T, (a.double() @ b.double().T).float(), rtol=1e-5, atol=1e-4)
    wanted = "bf16" if device._is_amd() else "none"
    assert torch.backends.mkldnn.matmul.fp32_precision == wanted


def test_memory_and_place() -> None:
    assert device.device() == torch.device("cpu")
    assert device.peak_memory_bytes() > 2**20
    device.synchronize()
