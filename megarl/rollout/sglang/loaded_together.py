"""Holds back tensors that SGLang's loader needs in the same call, but which may come in different buckets.

The loader of DeepSeek's models (SGLang 0.5.23) concatenates q_a_proj and kv_a_proj_with_mqa and loads them as one. If a
call ends before both have come, it silently forgets the first.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_PAIR = ("q_a_proj", "kv_a_proj_with_mqa")


class LoadedTogether:
    """Keeps what the loader would forget until its counterpart comes.

    Example: a bucket with only layer 0's q_a_proj gives nothing to load; with the next bucket, which has its
    kv_a_proj_with_mqa, both go to the loader.
    """

    def __init__(self, config: Any) -> None:
        """`config` is the model's."""
        self._joins = getattr(config, "q_lora_rank", None) is not None
        self._kept: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Drop what is kept: an update begins."""
        self._kept.clear()

    def ready(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to load now: the given ones with their kept counterparts, without those that must wait."""
        if not self._joins:
            return dict(tensors)
        here = self._kept | dict(tensors)
        ready = {
            name: tensor for name, tensor in here.items() if (partner := _partner(name)) is None or partner in here
        }
        self._kept = {name: tensor for name, tensor in here.items() if name not in ready}
        return ready

    def waiting(self) -> list[str]:
        """The names of kept tensors; if any are left at its end, an update is incomplete."""
        return list(self._kept)


def _partner(name: str) -> str | None:
    """The name of the tensor that must be loaded together with `name`; None if there is none."""
    for part, other in (_PAIR, _PAIR[::-1]):
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{other}.")
    return None
