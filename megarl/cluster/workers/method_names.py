"""Stand-in for worker classes that cannot be imported, for type-checked calls by method name."""

from types import SimpleNamespace
from typing import Any


class MethodNames:
    """Stands for a worker's class in calls: `begin` and `call` of a group only read a method's name.

    Only type checkers see the class itself, which is imported only in the worker's processes:

        if TYPE_CHECKING:
            from somewhere_heavy import RankWorker
        else:
            RankWorker = MethodNames()

        group.call(RankWorker.load, folder)
    """

    def __getattr__(self, name: str) -> Any:
        """An object with that `__name__`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(__name__=name)
