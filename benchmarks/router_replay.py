"""Router replay: how often engine and trainer choose other experts, and how far their log-probs are apart by that.

The quickstart's mixture-of-experts models, warmed up as there, the trainer's two expert-parallel ranks in bf16, each
trained for a few steps with every engine. With the weights that sampled the tokens of a step, the trainer computes
their log-probs by its own routing and by the engine's; means over the steps are shown.
"""

import argparse
import tempfile
from datetime import date
from pathlib import Path
from statistics import mean

from lab import FAMILIES, FORMATS, ROOT, Lab
from machine import at_least_one, describe, give_out

from converters.number_formats import AS_TRAINED

METRICS = {
    "experts/changed_by_replay": "{:.2%}",
    "experts/tokens_changed_by_replay": "{:.2%}",
    "experts/gap_own_routing": "{:.5f}",
    "experts/gap_replayed": "{:.5f}",
}
"""Metrics of a step that are shown, and how."""
HEAD = (
    "| model | engine | weights | choices that differ | tokens with one | gap, own routing | replayed |\n"
    "|---|---|---|---:|---:|---:|---:|"
)


def main() -> None:
    """Run each model with each engine and form of weights, and print the table or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_experts = FAMILIES[1:]
    parser.add_argument("--models", nargs="+", choices=with_experts, default=with_experts)
    parser.add_argument("--engines", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--weights", nargs="+", default=[AS_TRAINED, "fp8_block"], help="what engines hold weights in")
    parser.add_argument("--steps", type=at_least_one, default=10)
    parser.add_argument("--write", type=Path, help="file for the page; each row is also printed")
    options = parser.parse_args()
    page = [f"`make benchmark-router-replay`, {date.today()}, {describe(ROOT)}. {options.steps} steps each.", "", HEAD]
    print("\n".join(page), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch), options.steps)
        for family in options.models:
            for engine in options.engines:
                for weights in (each for each in options.weights if each in FORMATS[engine]):
                    lines = lab.run(family, engine, weights, "algorithm.router_replay=rollout")
                    cells = (shown.format(mean(line[name] for line in lines)) for name, shown in METRICS.items())
                    page.append(f"| {' | '.join((family, engine, weights, *cells))} |")
                    print(page[-1], flush=True)
    if options.write:
        note = (
            "A choice is that of a token in a layer. Gaps are the mean of |engine - trainer| of the sampled tokens'"
            " log-probs, in nats."
        )
        give_out("\n".join(["# Router replay, on a CPU", "", *page, "", note, ""]), options.write)


if __name__ == "__main__":
    main()
