"""Reward functions of a user, in a file as runs load them."""

import asyncio
import time


def as_number(data_source, solution_str, ground_truth, extra_info):
    """The number that the response is, after so many milliseconds."""
    number = float(solution_str)
    time.sleep(number / 1000)
    return {"score": number, "half": number / 2}


async def as_number_later(data_source, solution_str, ground_truth, extra_info):
    number = float(solution_str)
    await asyncio.sleep(number / 1000)
    return {"score": number, "half": number / 2}


def got_all_by_name(*, extra_info, ground_truth, solution_str, data_source):
    return float((data_source, solution_str, ground_truth, extra_info) == ("source", "text", "truth", {"index": 3}))


running = 0
three = asyncio.Barrier(3)


async def at_once(data_source, solution_str, ground_truth, extra_info):
    """How many run, itself among them, a little after three do."""
    global running
    running += 1
    await three.wait()
    await asyncio.sleep(0.02)
    found = running
    running -= 1
    return found


async def notes_and_fails(data_source, solution_str, ground_truth, extra_info):
    """The first of all fails a little after the others."""
    extra_info["begun"].append(solution_str)
    await asyncio.sleep(0.05 if solution_str == "0" else 0)
    raise RuntimeError(solution_str)


async def notes_and_waits(data_source, solution_str, ground_truth, extra_info):
    extra_info["begun"].set()
    try:
        await asyncio.sleep(extra_info["seconds"])
    finally:
        extra_info["ended"].set()
    return 1.0


async def when_allowed(data_source, solution_str, ground_truth, extra_info):
    """The number that the response is, once that may be said."""
    while not extra_info["is_allowed"].is_set():
        await asyncio.sleep(0.01)
    return float(solution_str)


async def text(data_source, solution_str, ground_truth, extra_info):
    return solution_str


def is_truth(data_source, solution_str, ground_truth, extra_info):
    """Whether the response is the ground truth; "8" is no response at all."""
    if solution_str == "8":
        raise ValueError("no answer")
    return float(solution_str == ground_truth)


def length(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "last": ord(solution_str[-1])}


async def as_length(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
