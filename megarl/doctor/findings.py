"""Findings from an inventory: what would not work on this machine, why, and what to do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.doctor.compilers import C_COMPILER, NVCC
from megarl.doctor.inventory import NIXL, Inventory
from megarl.doctor.limits import SHARED_MEMORY, UNLIMITED_LOCKS, VERBS
from megarl.process.gpudirect import GPUDIRECT
from megarl.process.rdma_devices import USABLE_PORT
from megarl.rollout import ENGINES
from megarl.schema import RefitConfig, RolloutConfig
from megarl.tracking import LOGGERS
from megarl.tracking.services import install_command

GIB = 1024**3
MEMORY_BYTES = 8 * GIB
"""Upper estimate of the quickstart's memory."""
DISK_BYTES = 2 * GIB


@dataclass(frozen=True)
class Finding:
    """Something that would not work."""

    blocks: bool
    """Whether it prevents training altogether."""
    what: str
    why: str
    remedy: str


def find(inventory: Inventory) -> list[Finding]:
    """All findings, those that block training first."""
    findings = [finding for check in _CHECKS for finding in check(inventory)]
    return sorted(findings, key=lambda finding: not finding.blocks)


def _setup_command(inventory: Inventory) -> str:
    return "make setup CUDA=1" if inventory.stack == "cuda" else "make setup"


def _check_requirements(inventory: Inventory) -> Iterator[Finding]:
    for unmet in inventory.unmet_requirements:
        yield Finding(True, "megarl train", f"it needs {unmet}", "make setup")


def _check_engine(inventory: Inventory) -> Iterator[Finding]:
    wanted, usual = _setup_command(inventory), RolloutConfig().engine
    if not inventory.engines:
        names = ", ".join(kind.title for kind in ENGINES.values())
        yield Finding(True, "rollouts", f"no engine for device {inventory.stack} is installed ({names})", wanted)
    elif usual not in inventory.engines:
        why = f"{ENGINES[usual].title} for device {inventory.stack} is not installed"
        others = " or ".join(f"rollout.engine={name}" for name in inventory.engines)
        yield Finding(False, f"rollout.engine={usual}", why, f"{wanted}, or {others}")


def _check_own_environments(inventory: Inventory) -> Iterator[Finding]:
    for name, kind in ENGINES.items():
        own, package = kind.own_environment, kind.packages.get(inventory.stack, "")
        if own is None:
            continue
        version, known = inventory.packages.get(package), " or ".join(own.versions)
        if version not in own.versions:
            is_there = f"{kind.title} {version} is there, not {known}"
            why = is_there if version else f"{kind.title} {known} is not installed"
            yield Finding(False, f"rollout.engine={name}", why, own.set_up[inventory.stack])
        elif (there := inventory.own_packages.get(name)) is not None:
            if lacking := [each for each in own.needed[inventory.stack] if each not in there]:
                why = f"beside {kind.title} there is no {', no '.join(lacking)}"
                yield Finding(False, f"rollout.engine={name}", why, own.set_up[inventory.stack])
            elif not any(each in there for each in NIXL):
                why = f"beside {kind.title} there is no NIXL: its refits between machines go by tcp"
                yield Finding(False, "refit.transport=rdma", why, f"pip install {' or '.join(NIXL)} there")


def _check_layouts(inventory: Inventory) -> Iterator[Finding]:
    for kind in ENGINES.values():
        version = inventory.packages.get(kind.packages.get(inventory.stack, ""))
        if version and not kind.knows_layouts_of(version):
            known = ", ".join(kind.layout_versions)
            why = f"where {kind.title} {version} keeps its weights is not known, only of {known}: they go by its loader"
            yield Finding(False, "direct refits", why, f"{kind.title} {known}")


def _check_loopback(inventory: Inventory) -> Iterator[Finding]:
    if not inventory.loopback:
        yield Finding(True, "Ray and the engines", "nothing can listen on 127.0.0.1", "allow loopback sockets")


def _check_torchvision(inventory: Inventory) -> Iterator[Finding]:
    versions = {name: inventory.packages[name] for name in ("torchvision", "torchaudio", "torchcodec")}
    names = [name for name, version in versions.items() if version and not version.endswith("+cpu")]
    if names and inventory.device == "cpu" and not inventory.torch_has_cuda:
        why = f"{', '.join(names)}: built for CUDA, beside a CPU torch importing transformers fails"
        yield Finding(True, "loading models", why, "make setup")


def _check_shared_memory(inventory: Inventory) -> Iterator[Finding]:
    needed = 2 * RefitConfig().bucket_bytes
    free = inventory.shared_memory_bytes
    if free < needed:
        why = f"two buckets of refit.bucket_bytes need {needed / GIB:.1f} GiB of /dev/shm, {free / GIB:.1f} are free"
        yield Finding(
            free == 0, "refit with the default bucket size", why, f"{SHARED_MEMORY}; or a smaller refit.bucket_bytes"
        )


def _check_memory(inventory: Inventory) -> Iterator[Finding]:
    available = inventory.memory_available_bytes
    if available < MEMORY_BYTES:
        why = f"it needs up to {MEMORY_BYTES / GIB:.0f} GiB of memory, {available / GIB:.1f} are available"
        yield Finding(False, "megarl quickstart", why, "end other programs")


def _check_disk(inventory: Inventory) -> Iterator[Finding]:
    if inventory.disk_free_bytes < DISK_BYTES:
        why = f"{inventory.disk_free_bytes / GIB:.1f} GiB are free in the current folder"
        yield Finding(False, "checkpoints and exports", why, "make room, or set output_dir")


def _check_locked_memory(inventory: Inventory) -> Iterator[Finding]:
    if inventory.rdma_devices and inventory.limits.locked_memory_bytes is not None:
        devices = ", ".join(inventory.rdma_devices)
        why = f"memory for {devices} is locked, and a process may lock no more than {inventory.limits.locked_memory}"
        yield Finding(False, "InfiniBand: NCCL, refit.transport=rdma", why, UNLIMITED_LOCKS)


def _check_ports(inventory: Inventory) -> Iterator[Finding]:
    if inventory.ports_obstacle:
        why = f"{inventory.ports_obstacle}: connections go over sockets"
        yield Finding(False, "InfiniBand: NCCL, refit.transport=rdma", why, USABLE_PORT)


def _check_verbs(inventory: Inventory) -> Iterator[Finding]:
    if inventory.rdma_devices and not inventory.has_verbs:
        why = f"{', '.join(inventory.rdma_devices)} cannot be used without libibverbs, and NCCL goes over sockets"
        yield Finding(False, "InfiniBand: NCCL", why, VERBS)


def _check_nixl(inventory: Inventory) -> Iterator[Finding]:
    if inventory.rdma_devices and not any(inventory.packages[each] for each in NIXL):
        why = "there is no NIXL: refits between machines go by tcp"
        yield Finding(False, "refit.transport=rdma", why, _setup_command(inventory))


def _check_gpudirect(inventory: Inventory) -> Iterator[Finding]:
    if inventory.rdma_devices and inventory.gpus and inventory.gpudirect_obstacle:
        devices = ", ".join(inventory.rdma_devices)
        why = f"{devices} cannot reach the memory of GPUs by GPUDirect: {inventory.gpudirect_obstacle}"
        yield Finding(False, "InfiniBand: refit.transport=rdma", why, f"{GPUDIRECT}; else refit.transport=tcp")


def _check_gpus(inventory: Inventory) -> Iterator[Finding]:
    failure = inventory.gpu_failure and f"nvidia-smi lists no GPU ({inventory.gpu_failure})"
    if not inventory.gpus and inventory.torch_has_cuda:
        why = f"{failure or 'there is no GPU, or no driver'}, and what is installed is for GPUs"
        remedy = "see to the driver" if failure else "run megarl doctor on a machine with GPUs"
        yield Finding(
            True, "training here", why, f"{remedy}; a container needs NVIDIA's toolkit (docker run --gpus all)"
        )
        return
    if not inventory.gpus:
        why = f"{failure or 'no NVIDIA GPU'}: everything runs on the CPU"
        yield Finding(False, "models of a real size", why, "see to the driver" if failure else "a machine with GPUs")
        return
    if not inventory.torch_has_cuda:
        why = f"{len(inventory.gpus)} GPUs stay unused: the installed torch is a CPU build"
        yield Finding(False, "training on the GPUs", why, "make setup CUDA=1")
        return
    driver, wanted = inventory.driver_cuda, inventory.torch_cuda
    # A driver runs all minor versions of its CUDA.
    if driver is not None and wanted is not None and driver[0] < wanted[0]:
        why = f"the driver runs CUDA {driver[0]}.{driver[1]} at most, and torch was built for {wanted[0]}.{wanted[1]}"
        yield Finding(True, "training on the GPUs", why, f"a driver for CUDA {wanted[0]} (for 13: 580 or newer)")
    if not inventory.packages["transformer-engine"]:
        why = "transformer-engine is not installed"
        yield Finding(False, "fused layers and FP8", why, "make setup CUDA=1")


def _check_compilers(inventory: Inventory) -> Iterator[Finding]:
    if inventory.device == "cpu":
        return
    if lacking := inventory.compilers.lacking:
        yield Finding(True, "Triton's kernels", f"without {' and '.join(lacking)} it can compile nothing", C_COMPILER)
    if not inventory.compilers.has_nvcc:
        why = "there is no nvcc: engines take other kernels without"
        yield Finding(False, "kernels of FlashInfer and DeepGEMM", why, NVCC)


def _check_loggers(inventory: Inventory) -> Iterator[Finding]:
    for logger, kind in LOGGERS.items():
        if kind.package and not inventory.packages[kind.package]:
            remedy = install_command(logger, inventory.stack)
            yield Finding(False, f"tracking.loggers=[{logger}]", f"{kind.package} is not installed", remedy)


_CHECKS: tuple[Callable[[Inventory], Iterator[Finding]], ...] = (
    _check_requirements,
    _check_engine,
    _check_own_environments,
    _check_layouts,
    _check_loopback,
    _check_torchvision,
    _check_shared_memory,
    _check_memory,
    _check_disk,
    _check_gpus,
    _check_compilers,
    _check_ports,
    _check_locked_memory,
    _check_verbs,
    _check_nixl,
    _check_gpudirect,
    _check_loggers,
)
