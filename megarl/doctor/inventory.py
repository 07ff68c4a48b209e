"""Inventory of a machine: packages, processors, GPUs, memory, disk. Only facts; no heavy package is imported."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from megarl.doctor.compilers import Compilers, compilers_here
from megarl.doctor.cuda_versions import Version, driver_cuda, torch_cuda
from megarl.doctor.limits import Limits, limits_here
from megarl.process.gpudirect import gpudirect_obstacle
from megarl.process.rdma_devices import has_verbs, ports_obstacle, rdma_devices
from megarl.rollout import ENGINES
from megarl.tracking import LOGGERS

NIXL = ("nixl-cu12", "nixl-cu13")
"""Packages of which rdma needs one."""
PACKAGES = (
    "torch",
    "megatron-core",
    *(package for kind in ENGINES.values() for package in kind.packages.values()),
    "transformer-engine",
    "flash-attn",
    "triton",
    "ray",
    *NIXL,
    "transformers",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "math-verify",
    "torchvision",
    "torchaudio",
    "torchcodec",
    *(kind.package for kind in LOGGERS.values() if kind.package),
)
_SHARED_MEMORY = Path("/dev/shm")
_NVIDIA_SMI_S = 60.0
"""Without persistence mode, it first initialises each GPU, which takes seconds."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as reported by the driver."""

    name: str
    memory_bytes: int | None
    """None if the driver reports none: the GPU uses the machine's memory, or it is lost."""


@dataclass(frozen=True)
class Inventory:
    """Equipment of a machine. Sizes are in bytes; a package that is not installed maps to None."""

    python: str
    system: str
    packages: dict[str, str | None]
    unmet_requirements: list[str]
    """Requirements of megarl that the installed packages do not meet."""
    cpu_cores: int
    memory_bytes: int
    memory_available_bytes: int
    shared_memory_bytes: int
    """Free space in /dev/shm; 0 if there is none."""
    disk_free_bytes: int
    """Free space in the current folder."""
    gpus: list[Gpu]
    loopback: bool
    """Whether a socket can listen on 127.0.0.1."""
    rdma_devices: list[str]
    limits: Limits
    has_verbs: bool = True
    """Whether libibverbs is installed, through which NCCL uses `rdma_devices`."""
    ports_obstacle: str = ""
    """Why no InfiniBand port can be used although the kernel has devices."""
    gpudirect_obstacle: str = ""
    """Why `rdma_devices` cannot access GPU memory directly, as far as the kernel shows it."""
    compilers: Compilers = field(default_factory=Compilers)
    own_packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name of an engine with its own environment -> the packages installed there that it needs, and NIXL."""
    gpu_failure: str = ""
    """Message of an nvidia-smi that is there and lists no GPU."""
    driver_cuda: Version | None = None
    torch_cuda: Version | None = None

    @property
    def torch_has_cuda(self) -> bool:
        """Whether the installed torch is a CUDA build."""
        return self.torch_cuda is not None

    @property
    def device(self) -> str:
        """The device that Megatron would run on."""
        return "cuda" if self.gpus and self.torch_has_cuda else "cpu"

    @property
    def stack(self) -> str:
        """The device that the installed packages are for: cuda also on a login node without GPUs."""
        return "cuda" if self.torch_has_cuda else "cpu"

    @property
    def engines(self) -> dict[str, str]:
        """Name of an engine -> its distribution, for engines that can sample on such a device."""
        wanted = {name: kind.packages.get(self.stack, "") for name, kind in ENGINES.items()}
        return {name: package for name, package in wanted.items() if self.packages.get(package)}


def take_inventory() -> Inventory:
    """Examine this machine, the environment of this Python, and the environments of engines that have their own."""
    memory = psutil.virtual_memory()
    own = _own_packages()
    gpus, gpu_failure = _gpus()
    return Inventory(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages={name: installed_version(name) for name in PACKAGES} | _engines_of(own),
        own_packages=own,
        unmet_requirements=_unmet_requirements(),
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        shared_memory_bytes=shared_memory_bytes(),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        gpus=gpus,
        gpu_failure=gpu_failure,
        driver_cuda=driver_cuda(),
        torch_cuda=torch_cuda(),
        loopback=_can_listen(),
        rdma_devices=sorted(rdma_devices()),
        limits=limits_here(),
        has_verbs=has_verbs(),
        ports_obstacle=ports_obstacle(),
        gpudirect_obstacle=gpudirect_obstacle(),
        compilers=compilers_here(),
    )


def shared_memory_bytes() -> int:
    """Free space in /dev/shm; 0 if there is none."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0


def installed_version(name: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _own_packages() -> dict[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {}
    for name, kind in ENGINES.items():
        if kind.own_environment is not None:
            names = {*kind.packages.values(), *chain(*kind.own_environment.needed.values()), *NIXL}
            found[name] = kind.own_environment.installed_versions(sorted(names))
    return found


def _engines_of(own: Mapping[str, Mapping[str, str]]) -> dict[str, str | None]:
    return {package: own[name].get(package) for name in own for package in ENGINES[name].packages.values()}


def _unmet_requirements() -> list[str]:
    unmet = []
    for text in requires("megarl") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier} (found {found or 'none'})")
    return unmet


def _gpus() -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists, or why it lists none; neither if it is not installed."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S)
    except FileNotFoundError:
        return [], ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode != 0:
        # It prints its errors on standard output.
        return [], next(iter((done.stdout + done.stderr).split("\n")), "") or f"exit code {done.returncode}"
    rows = (line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line)
    return [Gpu(name.strip(), _bytes_of(mebibytes.strip())) for name, mebibytes in rows], ""


def _bytes_of(mebibytes: str) -> int | None:
    """Bytes from a number that nvidia-smi prints; instead of one it may print `[N/A]`, or an error."""
    return int(mebibytes) * 1024**2 if mebibytes.isdecimal() else None


def _can_listen() -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True
