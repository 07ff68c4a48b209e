"""Tensors that SGLang's loader takes in one call alone, which may come in different buckets.

The loader of DeepSeek's models (SGLang 0.5.23) joins the rows of q_a_proj and of kv_a_proj_with_mqa and loads the two
as one. It forgets one of them, without an error, when a call ends before the other comes.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_PAIR = ("q_a_proj", "kv_a_proj_with_mqa")


class LoadedTogether:
    """Keeps what a loader would forget until the rest of it comes.

    Example: a bucket with layer 0's q_a_proj alone gives nothing to load; with the next one, which has its
    kv_a_proj_with_mqa, both go to the loader.
    """

    def __init__(self, config: Any) -> None:
        """`config` is that of a model."""
        self._joins = getattr(config, "q_lora_rank", None) is not None
        self._kept: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Keep nothing: an update begins."""
        self._kept.clear()

    def ready(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors to load now: those given, with what was kept for them, but for those that are kept."""
        if not self._joins:
            return dict(tensors)
        here = self._kept | dict(tensors)
        ready = {
            name: tensor for name, tensor in here.items() if (partner := _partner(name)) is None or partner in here
        }
        self._kept = {name: tensor for name, tensor in here.items() if name not in ready}
        return ready

    def waiting(self) -> list[str]:
        """Names of what is kept, at whose end an update is not whole."""
        return list(self._kept)


def _partner(name: str) -> str | None:
    """The name of the tensor without which the loader forgets `name`; None where it needs no other."""
    for part, other in (_PAIR, _PAIR[::-1]):
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{other}.")
    return None
