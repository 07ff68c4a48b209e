"""Recording of what a process does, by torch's profiler, as events of a timeline."""

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
"""An event as Chrome's trace format has it: microseconds since 1970, in `ts`, and their number, in `dur`."""

SHORTEST_OPERATION_US = 50.0
"""Operations of torch that are shorter are left out, and with them most of the file."""
CUT = "more than fits in the timeline"
"""An event from the last that was kept of a process to its end."""
_ALWAYS_KEPT = {"user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset"}
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long int", "Double", "Long"), 8),
    **dict.fromkeys(("float", "int", "Float", "Int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "short int", "BFloat16", "Half"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "Byte", "Char", "Bool"), 1),
}
"""Types as operations name them, and as NCCL's messages do."""


def named(name: str) -> AbstractContextManager[None]:
    """Give the work inside a name in a recording, where it is done for each message of a refit.

    Outside of a recording `record_function` takes 6 us even so, and 100 where its code has left the caches.
    """
    return _RecordFunctionFast(name)


class Profiler:
    """Records all threads of this process, and the GPU's work, from `start` to `stop`.

    Work inside `torch.profiler.record_function` and `named` has its name.
    """

    def __init__(self) -> None:
        # Kineto says on standard error that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        gpu = [ProfilerActivity.CUDA] if device.gpus() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            record_shapes=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def start(self) -> None:
        """Begin to record."""
        self._profile.start()

    def stop(self, most_events: int, since_us: float) -> bytes:
        """End the recording: its events, see `encoded`. An engine's step has millions: few are in memory."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            del self._profile
            with path.open(encoding="utf-8") as trace:
                return encoded(_events(trace), most_events, since_us)


def encoded(events: Iterable[TimelineEvent], most_events: int, since_us: float) -> bytes:
    """The earliest of the events as JSON, each on a line, from `since_us` on; `CUT` is in place of what is left out.

    Events that had begun before begin there: viewers drop those before 0.
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
    """The events of an engine's workers, in their order, by a name; without workers that recorded nothing."""
    return {f"worker {number}": events for number, events in enumerate(found) if events is not None}


_HEAD_END = '"traceEvents": ['
_BASE = re.compile(r'"baseTimeNanoseconds": (\d+)')
_BETWEEN = (" ", "\n", ",")
_NEXT = "\n  {"
"""Begins an object in the list of events, and none inside of one."""
_CHUNK = 2**20
"""Characters."""


def _events(trace: TextIO) -> Iterator[TimelineEvent]:
    """The events to be kept of a file of the profiler, which may be larger than the memory."""
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
    """The objects of a list of which `text` is the beginning, up to its end.

    One that torch (2.13) writes wrongly, as it does a name with a quote, is left out.
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
            # An object that is wrong, or of which the text has only the beginning.
            if (following := text.find(_NEXT, at + 1)) >= 0:
                at = following
                continue
            if not (part := more.read(_CHUNK)):
                raise
            text, at = text[at:] + part, 0
        else:
            yield found


def _category(event: TimelineEvent) -> str | None:
    # Torch records what `named` names as an operator, and none of these has a space in its name.
    is_named = event.get("cat") == "cpu_op" and " " in event["name"]
    return "user_annotation" if is_named else event.get("cat")


def _is_kept(event: TimelineEvent) -> bool:
    category = _category(event)
    return category in _ALWAYS_KEPT or (
        category in ("cpu_op", "cuda_runtime") and event["dur"] >= SHORTEST_OPERATION_US
    )


def _bytes(name: str, args: Mapping[str, Any]) -> int:
    """Bytes that a collective or a message of one is given; 0 of all else."""
    if not name.startswith(("gloo:", "nccl:")):
        return 0
    if "In msg nelems" in args:
        return int(args["In msg nelems"]) * _ELEMENT_BYTES.get(args["dtype"], 1)
    pairs = zip(args.get("Input type", ()), args.get("Input Dims", ()), strict=True)
    return sum(_ELEMENT_BYTES[kind] * prod(shape) for kind, shape in pairs if kind in _ELEMENT_BYTES)
