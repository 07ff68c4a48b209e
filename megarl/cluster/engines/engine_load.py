"""Metrics of the engines' load."""

from collections.abc import Sequence

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.workers.calls import answer_of, unfinished
from megarl.cluster.workers.worker import Failed
from megarl.rollout.protocol import Engine, Load

_WAIT_S = 1.0
"""How long an engine that is computing a step may take to report its load."""


def load_metrics(handles: Sequence[EngineHandle]) -> dict[str, float]:
    """Metrics of the load since the last call; engines that do not answer in time are left out."""
    said = _said(handles)
    if not said:
        return {}
    used = [each.kv_used for each in said if each.kv_used is not None]
    return {
        "engines/running": sum(each.running for each in said) / len(said),
        "engines/waiting": max(each.waiting for each in said),
        "engines/tokens_preempted": float(sum(each.preempted for each in said)),
        **({"engines/kv_used": max(used)} if used else {}),
    }


def _said(handles: Sequence[EngineHandle]) -> list[Load]:
    asked = [(handle, handle.begin(Engine.load)) for handle in handles if handle.is_up]
    late = unfinished([call for _, call in asked], _WAIT_S) if asked else []
    said = []
    for handle, call in asked:
        answer = None if call in late else answer_of(call)
        if isinstance(answer, Failed):
            # A death is noticed elsewhere, too.
            if handle.is_up and call.worker is handle.worker:
                raise answer.failure
        elif answer is not None:
            said.append(answer)
    return said
