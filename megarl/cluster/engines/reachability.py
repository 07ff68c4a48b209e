"""Whether the processes of an engine over machines see each other, before each of them waits for the others."""

from collections.abc import Sequence

from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Worker
from megarl.cluster.workers.worker_actor import SocketAddress
from megarl.process.errors import MachinesUnfit


def listen(processes: Sequence[Worker]) -> list[SocketAddress]:
    """Let each process listen at an address of its machine, until its object is made."""
    return wait([process.begin_listen() for process in processes])


def check_that_all_meet(processes: Sequence[Worker], addresses: Sequence[SocketAddress]) -> None:
    """Raise UserError for a process that does not reach the address of another."""
    unreached = wait([process.begin_unreached(addresses) for process in processes])
    for process, reasons in zip(processes, unreached, strict=True):
        for number, reason in reasons.items():
            host, port = addresses[number]
            raise MachinesUnfit(
                f"{process.log.stem} does not reach {processes[number].log.stem} at {host}:{port} ({reason}): the"
                " machines of an engine have to see each other; open the ports above 1024 between them"
            )
