"""The process of a rank, which runs methods on request."""

from resharding.contenders import megatron_core
from resharding.contenders.direct import DirectChanges
from resharding.contenders.table import CONTENDERS, Contender
from resharding.memory import give_back
from resharding.party import Party
from resharding.processes import Place
from resharding.scenario import Scenario


class Rank:
    """A party with the contenders that it takes part in."""

    def __init__(self, place: Place, scenario: Scenario) -> None:
        megatron_core.prepare()
        self._party = Party(place, scenario)
        self._contenders: dict[str, Contender] = {}

    def open(self, name: str) -> None:
        """Create this rank's part of a contender."""
        self._contenders[name] = CONTENDERS[name](self._party)

    def change(self, name: str) -> None:
        """Change some of the weights, for a contender that moves only changes."""
        if isinstance(contender := self._contenders[name], DirectChanges):
            contender.change()

    def moved_bytes(self, name: str) -> int:
        """Bytes that this rank sends in a run."""
        return self._contenders[name].moved_bytes

    def run(self, name: str) -> None:
        """Move everything once."""
        self._contenders[name].run()

    def wipe(self, name: str) -> None:
        """Overwrite what was written here."""
        self._contenders[name].wipe()

    def wrong(self, name: str) -> list[str]:
        """Names of tensors or buffers with wrong values after the last run."""
        return self._contenders[name].wrong()

    def give_back(self) -> None:
        """Return freed memory to the kernel."""
        give_back()
