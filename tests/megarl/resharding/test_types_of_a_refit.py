"""The table of the types that a refit meets is complete for ranks and workers, and short."""

import ast
import re
import secrets
import threading
from pathlib import Path

import torch
from small_configs import make_config
from transfer_ranks import DestinationRank, SourceRank
from transfer_scenes import Scene

from converters.layouts.parallel_sizes import ParallelSizes
from converters.topology import Topology
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.kernels import Block, gather, scatter

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("converters", "megatron_ext", "megarl")
MOST = 35
SCENE = Scene(make_config("qwen3"), ParallelSizes(world_size=1), workers=2, topology=Topology([0], [0], [1, 1], [1, 2]))


def types_of_the_table() -> list[str]:
    rows = re.findall(r"^\| (?:made once|controller|Megatron rank, .*?|engine's worker) \| (.*) \|$", page(), re.M)
    assert len(rows) == 4
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def page() -> str:
    return (ROOT / "docs/refit.md").read_text()


def at_once(*functions) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def public_types(value) -> set[str]:
    """The public types of ours among a value and its first elements."""
    if isinstance(value, dict | list | tuple | set):
        elements = list(value.values() if isinstance(value, dict) else value)[:2]
        return set().union(*map(public_types, elements))
    kind = type(value)
    return {kind.__name__} if kind.__module__.split(".")[0] in PACKAGES and kind.__name__[0] != "_" else set()


def types_met() -> set[str]:
    """The public types in the variables of all that runs in a source rank and two workers while they move weights."""
    source, workers = SourceRank(SCENE, 0), [DestinationRank(SCENE, rank) for rank in range(2)]
    everyone = [source, *workers]
    listeners, relays = [source.open()], [worker.open() for worker in workers]
    rendezvous = Rendezvous(SCENE.transport, secrets.token_bytes(16), listeners, None, 2, 20.0, relays)
    met: set[str] = set()

    def note(frame, event, _argument) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").split(".")[0] in PACKAGES:
            for value in list(frame.f_locals.values()):
                met.update(public_types(value))

    # Machine code is compiled once in a process, whoever needs it first.
    for kernel in (gather, scatter):
        kernel(Block(torch.empty(0, dtype=torch.uint8), [], [], []), 0)
    try:
        at_once(*(lambda rank=rank: rank.connect(rendezvous) for rank in everyone))
        threading.setprofile(note)
        at_once(lambda: source.send(1), *(lambda worker=worker: worker.receive(1) for worker in workers))
    finally:
        threading.setprofile(None)
        for rank in everyone:
            rank.close()
    return met


def test_all_that_ranks_and_workers_meet_is_in_the_table() -> None:
    table = types_of_the_table()
    met = types_met()
    assert {"Sender", "Receiver", "Piece"} <= met
    # A transport's own endpoint is called as the protocol, with the transport's name before it.
    assert [name for name in met if not any(name.endswith(known) for known in table)] == []


def test_the_table_is_short_and_names_types_that_exist() -> None:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    classes = {
        node.name for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
    }
    table = types_of_the_table()
    assert len(table) == len(set(table)) <= MOST
    assert set(table) <= classes
