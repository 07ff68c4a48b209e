"""Methods of a worker by their names, where its class cannot be imported."""

from types import SimpleNamespace
from typing import Any


class MethodNames:
    """Stands for the class of a worker in calls: `begin` and `call` of a group read no more of a method than its name.

    Only type checkers see the class itself, which is imported in the worker's processes alone:

        if TYPE_CHECKING:
            from somewhere_heavy import RankWorker
        else:
            RankWorker = MethodNames()

        group.call(RankWorker.load, folder)
    """

    def __getattr__(self, name: str) -> Any:
        """The method of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(__name__=name)
