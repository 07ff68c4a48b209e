"""Make .venv, or repair it: nothing found there is trusted, everything is compared with the lock file.

If everything is in order, nothing is changed, and it takes under a second. Otherwise whatever is missing, half-written
or of another version is reinstalled. A stamp is written last, so that an interrupted set-up is noticed.
Needs only a Python; see `--help`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from distributions import canonical, damaged_file, find_distributions, find_faults, read_lock, version_of

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "megarl-setup.json"
LOCK = ROOT / "constraints" / "cpu.txt"
CUDA_LOCK = ROOT / "constraints" / "cuda.txt"
BENCHMARK_LOCK = ROOT / "constraints" / "benchmark.txt"
PYTHONS = ("3.11", "3.12", "3.13")
BUILD_TOOLS = ("pip", "setuptools")
HARMFUL = ("torchvision", "torchaudio", "torchcodec")
"""Linked against CUDA: with a CPU torch they break `import transformers`."""
TORCH_INDEX = {
    "cpu": "https://download.pytorch.org/whl/cpu",
    "cuda": "https://download.pytorch.org/whl/cu130",
}
CUDA_HOMES = ("/usr/local/cuda",)
COMPILED = "transformer-engine-torch"
"""Published only as source: compiled against the installed torch, without a GPU but with CUDA's headers."""
HEADERS = ("nvidia/nccl/include", "nvidia/cudnn/include")
"""Folders in wheels with headers that it includes, as a CUDA toolkit has neither."""


class SetupError(Exception):
    """One sentence for the user."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[setup] {text}", flush=True)


# --- the stamp ---------------------------------------------------------------------------------------------------


def fingerprint(files: list[Path], *facts: str) -> str:
    """One hash of everything a set-up depends on."""
    digest = hashlib.sha256()
    for part in (*(file.read_bytes() for file in files), *(fact.encode() for fact in facts)):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def read_stamp() -> dict:
    """The stamp of the last complete set-up; empty if there is none."""
    try:
        return json.loads(STAMP.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}


def write_stamp(stamp: dict) -> None:
    """Write the stamp atomically."""
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(stamp, indent=1))
    partial.replace(STAMP)


# --- the interpreter ---------------------------------------------------------------------------------------------


def python_version(python: str | Path) -> str | None:
    """'3.11' for an interpreter that runs; None for one that does not."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_python() -> str:
    """A supported interpreter, preferably of the version that is tested first."""
    for version in PYTHONS:
        for candidate in (sys.executable, shutil.which(f"python{version}")):
            if candidate and python_version(candidate) == version:
                return candidate
    raise SetupError(
        f"megarl needs Python {', '.join(PYTHONS)}; none was found on the PATH: install {packages_of('3.11')}"
        " (Ubuntu 24.04 and Debian 12 and 13 have such a python3)"
    )


def packages_of(version: str) -> str:
    """Packages of Debian and Ubuntu for a Python, for pip in a .venv, and for the headers that Triton includes."""
    return f"python{version}, python{version}-venv and python{version}-dev"


def make_venv() -> None:
    """Keep a .venv if its Python runs and it was made here; otherwise make it again."""
    location = read_stamp().get("location", str(VENV))
    runs = python_version(VENV / "bin" / "python") in PYTHONS
    if runs and location == str(VENV):
        return
    python = find_python()
    if location != str(VENV):
        remove_venv(f"was made as {location}")
    elif VENV.is_symlink() and not VENV.exists():
        remove_venv("leads nowhere")
    elif VENV.exists() and any(VENV.iterdir()):
        remove_venv("has no Python that runs here")
    say(f"making .venv with {python}")
    # Without pip at first: the ensurepip below also repairs a .venv that was interrupted before it had pip. venv
    # rejects a link, so it gets the real path.
    subprocess.run([python, "-m", "venv", "--without-pip", str(VENV.resolve())], check=True)


def remove_venv(fault: str) -> None:
    """Remove a .venv that has to be made again.

    Raises SetupError if it is a link, whose target may belong to another checkout.
    """
    if VENV.is_symlink():
        raise SetupError(
            f"{VENV} is a link to {VENV.readlink()} and {fault}: remove the link, or let it lead to an empty folder,"
            " and run this again"
        )
    say(f".venv {fault}: making it anew")
    shutil.rmtree(VENV)


def site_packages() -> Path:
    """The folder of .venv's distributions."""
    return VENV / "lib" / f"python{python_version(VENV / 'bin' / 'python')}" / "site-packages"


# --- pip ---------------------------------------------------------------------------------------------------------


def pip(*arguments: str, label: str = "", environment: dict[str, str] | None = None) -> None:
    """Run pip quietly, counting what it collects; its last lines are shown only if it fails.

    `environment` has variables to add to those of this process.
    """
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    # pip inherits the lock of `hold_lock`: if this process is killed, a new set-up waits for the orphan.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        close_fds=False,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=15)
    collected = 0
    for line in process.stdout:
        last.append(line.rstrip())
        collected += line.startswith("Collecting ")
        if label and sys.stdout.isatty():
            doing = "unpacking" if line.startswith("Installing collected") else "collecting"
            print(f"\r[setup]   {doing}: {collected} {label}", end="", flush=True)
    if label and sys.stdout.isatty():
        print("\r\033[K", end="")
    if process.wait() != 0:
        print("\n".join(last), file=sys.stderr)
        raise SetupError(f"pip {arguments[0]} failed; its last lines are above. Run the same command again to go on")


def is_cuda_build(version: str, requirements: list[str]) -> bool:
    """Whether a torch wheel with this metadata is a CUDA build, which requires NVIDIA's libraries."""
    if "+" in version:
        return not version.endswith("+cpu")
    return any(canonical(requirement).startswith(("nvidia-", "cuda-")) for requirement in requirements)


def torch_source(version: str, variant: str) -> list[str]:
    """Pip arguments for finding a build of torch for this variant; empty if pip finds one by default."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--dry-run", "--no-deps", "--ignore-installed", "--report", "-", f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = "none"
    if done.returncode == 0:
        metadata = json.loads(done.stdout)["install"][0]["metadata"]
        found = "cuda" if is_cuda_build(metadata["version"], metadata.get("requires_dist", [])) else "cpu"
    if found == variant:
        say(f"torch {version}: plain pip finds a build for {variant.upper()}")
        return []
    say(f"torch {version}: for plain pip there is {found}; taking PyTorch's wheels for {variant.upper()}")
    return ["--index-url", TORCH_INDEX[variant]]


def remove_leftovers(names: list[str]) -> None:
    """Remove what breaks pip: half-removed folders, and records of damaged distributions."""
    for folder in site_packages().glob("~*"):
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    found = find_distributions(site_packages())
    for name in names:
        folders = found.get(name, [])
        if len(folders) > 1 or any(damaged_file(folder) in ("METADATA", "RECORD", "INSTALLER") for folder in folders):
            for folder in folders:
                shutil.rmtree(folder)


def install(wanted: dict[str, str], faults: dict[str, str], variant: str) -> None:
    """Install the locked version of every faulty distribution: build tools, torch, then the others together.

    Distributions compiled against torch come last.
    """
    remove_leftovers(list(faults))
    for name, fault in sorted(faults.items()) if len(faults) <= 8 else []:
        say(f"{name}: {fault}")
    locked = ["install", "--no-deps", "--force-reinstall"]
    tools = [f"{name}=={wanted[name]}" for name in BUILD_TOOLS if name in faults]
    if tools:
        ensure_pip()
        pip(*locked, *tools)
    if "torch" in faults:
        pip(*locked, *torch_source(wanted["torch"], variant), f"torch=={wanted['torch']}")
    others = [f"{name}=={wanted[name]}" for name in sorted(faults) if name not in (*BUILD_TOOLS, "torch", COMPILED)]
    if others:
        say(f"installing {len(others)} packages")
        pip(*locked, "--no-build-isolation", *others, label=f"of {len(others)} packages")
    if COMPILED in faults:
        say(f"compiling {COMPILED}, which takes minutes")
        pip(*locked, "--no-build-isolation", f"{COMPILED}=={wanted[COMPILED]}", environment=with_headers())


def ensure_pip() -> None:
    """Install pip into .venv. Raises SetupError if its Python lacks ensurepip, as Debian's without python3-venv."""
    python = VENV / "bin" / "python"
    try:
        subprocess.run([str(python), "-m", "ensurepip"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(
            f"Python's ensurepip failed in .venv ({why}): on Debian and Ubuntu install"
            f" {packages_of(str(python_version(python)))}, then run the same command again"
        ) from error


def with_headers() -> dict[str, str]:
    """The variable that makes compilers search `HEADERS`, too, after the build's own folders."""
    own = [str(site_packages() / folder) for folder in HEADERS]
    return {"CPATH": os.pathsep.join([*own, *filter(None, [os.environ.get("CPATH")])])}


# --- the two stacks ----------------------------------------------------------------------------------------------


def set_up_cpu(locks: list[Path]) -> dict[str, str]:
    """Install the locked CPU stack; return what .venv must contain from now on."""
    wanted = {name: version for lock in locks for name, version in read_lock(lock).items()}
    faults = find_faults(site_packages(), wanted)
    if faults:
        install(wanted, faults, "cpu")
    harmful = [name for name in HARMFUL if name in find_distributions(site_packages())]
    if harmful:
        say(f"removing {', '.join(harmful)}: built for CUDA, they break transformers beside a CPU torch")
        pip("uninstall", "--yes", *harmful)
    return wanted


def set_up_cuda() -> dict[str, str]:
    """Install the locked CUDA stack; return what .venv must contain from now on. It needs no GPU."""
    wanted = read_lock(CUDA_LOCK)
    faults = find_faults(site_packages(), wanted)
    if "torch" in faults:
        faults.setdefault(COMPILED, "compiled against another torch")
    if COMPILED in faults and not has_cuda_toolkit():
        raise SetupError(
            f"{COMPILED} is compiled here, which needs the CUDA 13 toolkit: load its module or set CUDA_HOME, or use"
            " Dockerfile.cuda"
        )
    if faults:
        install(wanted, faults, "cuda")
    return wanted


def has_cuda_toolkit() -> bool:
    """Whether Transformer Engine's build would find CUDA's compiler."""
    homes = (os.environ.get("CUDA_HOME"), *CUDA_HOMES)
    return shutil.which("nvcc") is not None or any(home and Path(home, "bin", "nvcc").is_file() for home in homes)


def has_nvidia_gpu() -> bool:
    """Whether the driver reports a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def set_up(cuda: bool, benchmark: bool) -> None:
    """Create or repair .venv. Raises SetupError with one sentence if that fails."""
    started = time.monotonic()
    if cuda and not has_nvidia_gpu():
        say("nvidia-smi shows no GPU here: .venv will be for machines that have one")
    if cuda and read_stamp().get("variant") == "cpu":
        remove_venv("was made for a CPU")
    make_venv()
    stamp = read_stamp()
    variant = "cuda" if cuda or stamp.get("variant") == "cuda" else "cpu"
    benchmark = benchmark or stamp.get("benchmark", False)
    locks = [CUDA_LOCK if variant == "cuda" else LOCK, *([BENCHMARK_LOCK] if benchmark else [])]
    inputs = [*locks, ROOT / "pyproject.toml", Path(__file__)]
    current = fingerprint(inputs, str(python_version(VENV / "bin" / "python")), variant)
    harmful = variant == "cpu" and any(name in find_distributions(site_packages()) for name in HARMFUL)
    if stamp.get("fingerprint") == current and not harmful and not find_faults(site_packages(), stamp["packages"]):
        return
    STAMP.unlink(missing_ok=True)
    packages = set_up_cuda() if variant == "cuda" else set_up_cpu(locks)
    pip("install", "--no-deps", "--no-build-isolation", "--editable", ".")
    packages["megarl"] = version_of(find_distributions(site_packages())["megarl"][0])
    faults = find_faults(site_packages(), packages)
    if faults:
        raise SetupError(f"after the install .venv is still not in order: {faults}; remove .venv and run this again")
    facts = {"fingerprint": current, "variant": variant, "benchmark": benchmark, "location": str(VENV)}
    write_stamp({**facts, "packages": packages})
    say(f".venv is ready ({variant}, {len(packages)} packages, {time.monotonic() - started:.0f} s)")


def hold_lock() -> int:
    """Wait until no other set-up runs here. The lock is on the folder itself: it leaves no file, and ends with us."""
    folder = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(folder, True)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is running here: waiting for it")
        fcntl.flock(folder, fcntl.LOCK_EX)
    return folder


def main() -> int:
    """Parse the command line and set up; return 0 if .venv is in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="install the CUDA stack; no GPU has to be here")
    parser.add_argument("--benchmark", action="store_true", help="also install what the benchmarks compare with")
    options = parser.parse_args()
    return run_alone(lambda: set_up(options.cuda, options.benchmark))


def run_alone(work: Callable[[], None]) -> int:
    """Run a set-up exclusively; return the exit status, printing one sentence if it is not 0."""
    folder = hold_lock()
    try:
        work()
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n[setup] interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    finally:
        os.close(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
