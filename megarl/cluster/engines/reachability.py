"""Checks that the processes of an engine on several machines can reach each other, before they wait for each other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Call, Worker
from megarl.cluster.workers.worker_actor import SocketAddress
from megarl.process.errors import MachinesUnfit


def meeting(processes: Sequence[Worker]) -> Iterator[Sequence[Call[Any]]]:
    """Let each process try to reach all others; yields the calls of each step, which must end before the next step.

    Raises UserError if a process does not reach another. Processes listen until their engine is created.
    """
    listening = [process.begin_listen() for process in processes]
    yield listening
    addresses = wait(listening)
    looking = [process.begin_unreached(addresses) for process in processes]
    yield looking
    check_that_all_meet(processes, addresses, wait(looking))


def check_that_all_meet(
    processes: Sequence[Worker], addresses: Sequence[SocketAddress], unreached: Sequence[Mapping[int, str]]
) -> None:
    """Raise UserError if a process does not reach another's address; `unreached` gives each process's failures."""
    for process, reasons in zip(processes, unreached, strict=True):
        for number, reason in reasons.items():
            host, port = addresses[number]
            raise MachinesUnfit(
                f"{process.log.stem} does not reach {processes[number].log.stem} at {host}:{port} ({reason}): the"
                " machines of an engine have to see each other; open the ports above 1024 between them"
            )
