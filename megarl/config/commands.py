"""Describes each command that takes a configuration: what it reads, trains and refits, and for how many steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from megarl.schema import MegarlConfig


@dataclass(frozen=True)
class CommandFacts:
    """How a command uses the configuration; its checks are all in `megarl/config/validate.py`."""

    files: Sequence[str] = ()
    """Keys of the lists of files that it reads; the first list may not be empty."""
    steps_key: str = ""
    """Key of its number of optimizer steps; empty if it has none."""
    refits_engines: bool = False
    """Whether the policy that it trains is loaded into engines."""
    trains_auxiliary: bool = False
    """Whether it also trains models other than the policy."""

    def steps(self, config: MegarlConfig) -> int:
        """Number of optimizer steps."""
        return attrgetter(self.steps_key)(config) if self.steps_key else 0


_PREFERENCES = CommandFacts(("preference.train_files", "preference.eval_files"), "preference.steps")
COMMAND_FACTS: Mapping[str, CommandFacts] = {
    "train": CommandFacts(
        ("data.train_files", "data.eval_files"), "loop.steps", refits_engines=True, trains_auxiliary=True
    ),
    "sft": CommandFacts(("sft.train_files", "sft.eval_files"), "sft.steps"),
    "dpo": _PREFERENCES,
    "reward-model": _PREFERENCES,
    "spin": replace(_PREFERENCES, refits_engines=True),
    "eval": CommandFacts(("data.eval_files",)),
    "chat": CommandFacts(),
}
