"""Records a process with torch's profiler, as timeline events."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any, TextIO

from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile

from megatron_ext import device

TimelineEvent = dict[str, Any]
"""An event in Chrome's trace format: `ts` in microseconds since 1970, and `dur`, the duration in microseconds."""

SHORTEST_OPERATION_US = 50.0
"""Shorter torch operations are left out, which removes most of the file."""
CUT = "more than fits in the timeline"
"""Name of the event from a process's last kept event to its end."""
_ALWAYS_KEPT = {"user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset"}
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long int", "Double", "Long"), 8),
    **dict.fromkeys(("float", "int", "Float", "Int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "short int", "BFloat16", "Half"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "Byte", "Char", "Bool"), 1),
}
"""Dtypes by the names that operations and NCCL's messages use."""


def named(name: str) -> AbstractContextManager[None]:
    """Name the work inside for a recording; cheap enough for each message of a refit.

    Outside a recording `record_function` costs 6 us even so, and 100 us when its code is no longer in the caches.
    """
    return _RecordFunctionFast(name)


class Profiler:
    """Records all threads of this process, and the GPU's work, from `start` to `stop`.

    Work inside `torch.profiler.record_function` and `named` has its name.
    """

    def __init__(self) -> None:
        # Kineto announces start and stop on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        gpu = [ProfilerActivity.CUDA] if device.gpus() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            record_shapes=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def start(self) -> None:
        """Start recording."""
        self._profile.start()

    def stop(self, most_events: int, since_us: float) -> bytes:
        """Stop, and return the events as `encoded` does; streamed, as an engine's step may have millions."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            del self._profile
            with path.open(encoding="utf-8") as trace:
                return encoded(_events(trace), most_events, since_us)


def encoded(events: Iterable[TimelineEvent], most_events: int, since_us: float) -> bytes:
    """Encode the earliest events from `since_us` on as JSON, one per line, with `CUT` in place of the events left out.

    Events that began before `since_us` are cut to begin there, as viewers drop negative times.
    """
    kept, last_us = list[tuple[float, bytes]](), 0.0
    is_cut = False
    for event in events:
        began_us = event["ts"] - since_us
        if began_us < 0:
            began_us, event = 0.0, {**event, "dur": max(event["dur"] + began_us, 0.0)}
        last_us = max(last_us, began_us)
        kept.append((began_us, json.dumps({**event, "ts": began_us}).encode()))
        if len(kept) >= 2 * most_events:
            is_cut, kept = True, sorted(kept)[:most_events]
    if is_cut or len(kept) > most_events:
        kept = sorted(kept)[:most_events]
        began_us = kept[-1][0]
        cut = {"name": CUT, "ph": "X", "tid": 0, "ts": began_us, "dur": last_us - began_us, "args": {}}
        kept.append((began_us, json.dumps(cut).encode()))
    return b"\n".join(line for _, line in kept)


def by_worker(found: Sequence[bytes | None]) -> dict[str, bytes]:
    """The events of an engine's workers in order, by worker name, without workers that recorded nothing."""
    return {f"worker {number}": events for number, events in enumerate(found) if events is not None}


_HEAD_END = '"traceEvents": ['
_BASE = re.compile(r'"baseTimeNanoseconds": (\d+)')
_BETWEEN = (" ", "\n", ",")
_NEXT = "\n  {"
"""Starts an object of the list of events; nothing inside an object looks like it."""
_CHUNK = 2**20
"""In characters."""


def _events(trace: TextIO) -> Iterator[TimelineEvent]:
    """Yield the events to keep from a profiler file, which may be larger than the memory."""
    head = ""
    while (end := head.find(_HEAD_END)) < 0:
        part = trace.read(_CHUNK)
        assert part, "torch's profiler writes no events"
        head += part
    base = _BASE.search(head, 0, end)
    assert base is not None, "torch's profiler does not say since when it counts"
    since_1970_us = int(base.group(1)) / 1000
    for event in _objects(head[end + len(_HEAD_END) :], trace):
        if event.get("ph") == "X" and _is_kept(event):
            category, args = _category(event), event.get("args", {})
            kept = {"name": event["name"], "cat": category, "ph": "X", "tid": event["tid"], "dur": event["dur"]}
            found = {"bytes": nbytes} if (nbytes := _bytes(event["name"], args)) else {}
            yield {**kept, "ts": since_1970_us + event["ts"], "args": found}


def _objects(text: str, more: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list whose text begins with `text` and continues in `more`.

    Malformed objects are left out: torch 2.13 writes some, for names with a quote.
    """
    decode, at = json.JSONDecoder().raw_decode, 0
    while True:
        while text[at : at + 1] in _BETWEEN:
            at += 1
        if text[at : at + 1] == "]":
            return
        try:
            found, at = decode(text, at)
        except json.JSONDecodeError:
            # The object is malformed, or its text is incomplete so far.
            if (following := text.find(_NEXT, at + 1)) >= 0:
                at = following
                continue
            if not (part := more.read(_CHUNK)):
                raise
            text, at = text[at:] + part, 0
        else:
            yield found


def _category(event: TimelineEvent) -> str | None:
    # Torch records work inside `named` as an operator, but only names from `named` contain a space.
    is_named = event.get("cat") == "cpu_op" and " " in event["name"]
    return "user_annotation" if is_named else event.get("cat")


def _is_kept(event: TimelineEvent) -> bool:
    category = _category(event)
    return category in _ALWAYS_KEPT or (
        category in ("cpu_op", "cuda_runtime") and event["dur"] >= SHORTEST_OPERATION_US
    )


def _bytes(name: str, args: Mapping[str, Any]) -> int:
    """Bytes of a collective or point-to-point message; 0 for other events."""
    if not name.startswith(("gloo:", "nccl:")):
        return 0
    if "In msg nelems" in args:
        return int(args["In msg nelems"]) * _ELEMENT_BYTES.get(args["dtype"], 1)
    pairs = zip(args.get("Input type", ()), args.get("Input Dims", ()), strict=True)
    return sum(_ELEMENT_BYTES[kind] * prod(shape) for kind, shape in pairs if kind in _ELEMENT_BYTES)
