"""Bookkeeping of a weight update: every tensor of the model exactly once."""

from collections.abc import Iterable, Sequence

from megarl.rollout.protocol import UpdateError


class WeightUpdate:
    """An update to `version` that consists of the tensors `names`."""

    def __init__(self, version: int, names: Sequence[str]) -> None:
        self.version = version
        self.failed = False
        self.loads_by_name = False
        """Whether weights have come through the engine's own loader."""
        self._missing = set(names)
        self._names = frozenset(names)

    def accept(self, names: Iterable[str]) -> None:
        """Note that `names` are about to be written. Raises UpdateError for one that is unknown or was written."""
        for name in names:
            if name not in self._names:
                raise UpdateError(f"update {self.version}: {name} is not a tensor of this update")
            if name not in self._missing:
                raise UpdateError(f"update {self.version}: {name} was already written")
            self._missing.remove(name)

    def accept_all(self) -> None:
        """Note that all tensors are about to be written at once. Raises UpdateError as `accept`."""
        self.accept(self._names)

    def check_version(self, version: int) -> None:
        """Raise UpdateError if this is an update to another version."""
        if version != self.version:
            raise UpdateError(f"version {version} cannot be written or committed: update {self.version} is under way")

    def check_complete(self) -> None:
        """Raise UpdateError, naming what is missing, if the update is incomplete."""
        if self._missing:
            raise UpdateError(
                f"update {self.version}: {len(self._missing)} of {len(self._names)} tensors were not written, "
                f"the first is {min(self._missing)}"
            )
