"""Submitted requests with token events every 50 ms, compared with one call for all requests.

Both run in turn on the same vLLM engine with the same requests. Reports tokens per second and their ratio.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import chain, count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from machine import at_least_one, describe, give_out

from megarl.data import Turn
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.protocol import Progress, Request, RequestEnded, SamplingParameters
from megarl.rollout.vllm.engine import VllmEngine

_PROMPT = range(10, 42)


def main() -> None:
    """Print the figures, or write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=at_least_one, default=64)
    parser.add_argument("--tokens", type=at_least_one, default=256, help="the most of a response")
    parser.add_argument("--rounds", type=at_least_one, default=25)
    parser.add_argument("--output", type=Path, help="the Markdown file to write")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        engine = VllmEngine(write_tiny_model("qwen3", Path(folder), seed=0), {"max_model_len": 512})
        engine.start()
        try:
            page = _measured(engine, options.requests, options.tokens, options.rounds)
        finally:
            engine.close()
    give_out(page, options.output)


def _measured(engine: VllmEngine, requests: int, tokens: int, rounds: int) -> str:
    machine = describe(Path.cwd())
    asked = [
        Request(list(_PROMPT), SamplingParameters(max_tokens=tokens, seed=seed), priority=seed)
        for seed in range(requests)
    ]
    submitted, told = _submitted(engine)
    ways: dict[str, Callable[[Sequence[Request]], list[list[Turn]]]] = {
        "generate": engine.generate,
        "submit": submitted,
    }
    for way in ways.values():
        way(asked)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        answers = {}
        for name, way in ways.items():
            began_s = time.perf_counter()
            answers[name] = way(asked)
            sampled = sum(len(turn.token_ids) for turns in answers[name] for turn in turns)
            speeds[name].append(sampled / (time.perf_counter() - began_s))
        if answers["generate"] != answers["submit"]:
            raise SystemExit("the two ways gave different answers")
    ratios = [one / other for one, other in zip(speeds["submit"], speeds["generate"], strict=True)]
    lines = [
        f"| `{name}` | {median(each):,.0f} | {min(each):,.0f} to {max(each):,.0f} |" for name, each in speeds.items()
    ]
    return "\n".join(
        [
            "# Submitted requests beside one call",
            "",
            f"`make benchmark-engine-calls`, {date.today()}, {machine}.",
            f"A tiny Qwen3 in vLLM, {requests} requests of at most {tokens} tokens, {rounds} rounds in turn,",
            "the same answers to the bit.",
            "",
            "| call | tokens/s, median | range |",
            "|---|---:|---:|",
            *lines,
            "",
            f"`submit` and `events` have {median(ratios):.3f} of the tokens/s of `generate`, the median of the rounds"
            f" ({min(ratios):.3f} to {max(ratios):.3f}).",
            f"Tokens were told of {next(told) / (rounds + 1):.0f} times a round.",
            "",
        ]
    )


def _submitted(engine: VllmEngine) -> tuple[Callable[[Sequence[Request]], list[list[Turn]]], "count[int]"]:
    """Sample by `submit` and `events`, and count the token events."""
    numbers, told, events = count(), count(), chain.from_iterable(engine.events())

    def ask(requests: Sequence[Request]) -> list[list[Turn]]:
        asked = {next(numbers): request for request in requests}
        engine.submit(asked)
        answers: dict[int, list[Turn]] = {}
        while len(answers) < len(asked):
            event = next(events)
            if isinstance(event, Progress):
                next(told)
            elif not isinstance(event, RequestEnded):
                continue
            elif isinstance(event.answer, list):
                answers[event.number] = event.answer
            else:
                raise event.answer
        return [answers[number] for number in asked]

    return ask, told


if __name__ == "__main__":
    main()
