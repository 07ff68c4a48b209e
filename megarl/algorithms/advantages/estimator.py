"""An advantage estimator, and what it asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.algorithms.advantages.scored import Advantages
from megarl.algorithms.parts import option_types
from megatron_ext.dataclass_fields import FieldType


@dataclass(frozen=True)
class Estimator:
    """A way to estimate advantages."""

    function: Callable[..., Advantages]
    """Maps ScoredResponses to Advantages; its options are keyword-only, with defaults."""
    needs: frozenset[str] = frozenset()
    """The optional fields of ScoredResponses that it cannot do without."""
    smallest_group: int = 1
    """Responses to each prompt at least: 2 where they are compared with each other."""
    reads_kl: bool = True
    """Whether `token_rewards`, in which a KL may be, change the advantages."""

    @property
    def options(self) -> Mapping[str, FieldType]:
        """Name -> type of its options."""
        return option_types(self.function)
