"""Runs contenders in turn: A B C, B C A, ...; before that each is opened, verified once, and its memory measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from resharding.memory import Growth
from resharding.processes import Ranks, Timed, running
from resharding.rank import Rank
from resharding.scenario import Scenario


class WrongValuesError(RuntimeError):
    """A contender wrote wrong values."""


@dataclass(frozen=True)
class Facts:
    """Figures that are the same in every run of a contender."""

    moved_bytes: int
    trainer_extra_bytes: int
    """Peak memory growth of a trainer rank from opening to the end of the second run."""
    worker_extra_bytes: int
    """The same for a worker, without mapped shared memory, which belongs to the trainer's ranks."""


@dataclass(frozen=True)
class Run:
    """One run."""

    contender: str
    round: int
    timed: Timed


def measure(
    scenario: Scenario, contenders: Sequence[str], rounds: int, report: Callable[[str], None]
) -> tuple[dict[str, Facts], list[Run]]:
    """Start the processes of all ranks and run the contenders in turn.

    Raises WrongValuesError if one of them writes wrong values.
    """
    with running(scenario.ranks, Rank, scenario) as ranks:
        facts = {}
        for name in contenders:
            facts[name] = _prepare(ranks, name, scenario.trainer.ranks)
            report(f"{name}: every value is right")
        return facts, list(_rounds(ranks, contenders, rounds, report))


def _prepare(ranks: Ranks, name: str, sources: int) -> Facts:
    ranks.call("give_back")
    with Growth(ranks.held) as growth:
        ranks.call("open", name)
        for _ in range(2):
            ranks.call("run", name)
    ranks.call("wipe", name)
    if not any(ranks.call("wrong", name)):
        raise WrongValuesError(f"{name}: what is wiped counts as right")
    ranks.call("run", name)
    for rank, wrong in enumerate(ranks.call("wrong", name)):
        if wrong:
            raise WrongValuesError(f"{name}: {wrong[0]}, one of {len(wrong)}, is wrong on rank {rank}")
    trainer, workers = growth.of_ranks[:sources], growth.of_ranks[sources:]
    return Facts(
        sum(ranks.call("moved_bytes", name)),
        max(held.anonymous + held.shared for held in trainer),
        max(held.anonymous for held in workers),
    )


def _rounds(ranks: Ranks, contenders: Sequence[str], rounds: int, report: Callable[[str], None]) -> Iterator[Run]:
    for number in range(rounds):
        first = number % len(contenders)
        runs = []
        for name in (*contenders[first:], *contenders[:first]):
            ranks.call("change", name)
            runs.append(Run(name, number, ranks.time("run", name)))
        report(f"round {number + 1}/{rounds}: " + ", ".join(f"{run.contender} {run.timed.seconds:.3f}" for run in runs))
        yield from runs
