"""An advantage estimator, and what it asks for."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from megarl.algorithms.advantages.scored import Advantages


@dataclass(frozen=True)
class Estimator:
    """A way to estimate advantages."""

    function: Callable[..., Advantages]
    """Maps ScoredResponses to Advantages; its keyword-only arguments are fields of AlgorithmConfig, by their names."""
    needs: frozenset[str] = frozenset()
    """The optional fields of ScoredResponses that it cannot do without."""
    smallest_group: int = 1
    """Responses to each prompt at least: 2 where they are compared with each other."""
    reads_kl: bool = True
    """Whether `token_rewards`, in which a KL may be, change the advantages."""

    @property
    def options(self) -> tuple[str, ...]:
        """The fields of AlgorithmConfig that it reads."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
