"""Router replay: how often engine and trainer choose different experts, and the resulting log-prob differences.

Uses the quickstart's mixture-of-experts models, warmed up in the same way, with the trainer's two expert-parallel ranks
in bf16, each trained for a few steps with every engine. With the weights that sampled a step's tokens, the trainer
computes their log-probs by its own routing and by the engine's; the table shows means over the steps.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

from lab import FORMATS, Lab
from model_table import FAMILIES, options_parser, show_table

from converters.number_formats import AS_TRAINED

METRICS = {
    "experts/changed_by_replay": ".2%",
    "experts/tokens_changed_by_replay": ".2%",
    "experts/gap_own_routing": ".5f",
    "experts/gap_replayed": ".5f",
}
"""The step metrics that are shown, and their formats."""
HEAD = (
    "| model | engine | weights | choices that differ | tokens with one | gap, own routing | replayed |\n"
    "|---|---|---|---:|---:|---:|---:|"
)


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[Sequence[str]]:
    """Yield the row of each run."""
    lab = Lab(scratch, options.steps)
    for family, engine, weights in product(options.models, options.engines, options.weights):
        if weights in FORMATS[engine]:
            lines = lab.run(family, engine, weights, "algorithm.router_replay=rollout")
            yield (
                family,
                engine,
                weights,
                *(f"{mean(line[name] for line in lines):{shown}}" for name, shown in METRICS.items()),
            )


def main() -> None:
    """Run all of them, and print the table or write it to a file."""
    parser = options_parser(__doc__, models=FAMILIES[1:], known_engines=FORMATS, engines=list(FORMATS), steps=10)
    parser.add_argument("--weights", nargs="+", default=[AS_TRAINED, "fp8_block"], help="what engines hold weights in")
    options = parser.parse_args()
    told = (
        f" {options.steps} steps each. A choice is that of a token in a layer. Gaps are the mean of |engine - trainer|"
        " of the sampled tokens' log-probs, in nats."
    )
    with tempfile.TemporaryDirectory() as scratch:
        show_table(
            "Router replay, on a CPU", "router-replay", HEAD, rows(options, Path(scratch)), options.write, told=told
        )


if __name__ == "__main__":
    main()
