"""Log-prob gaps between engine and trainer after every refit: model families by engine and number format.

Uses the quickstart's tiny models in sizes that fit the blocks of all formats, warmed up in the same way, with the
trainer in bf16. Each is trained for a few steps with every engine; the table shows |engine - trainer| of the sampled
tokens' log-probs.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

from lab import FORMATS, Lab
from model_table import options_parser, show_table

AS_COMPUTED = "as_computed"
KEYS_AND_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        AS_COMPUTED: (),
        "fp8": ("+rollout.engine_args.kv_cache_dtype=fp8",),
        "fp8, bound scales": ("+rollout.engine_args.kv_cache_dtype=fp8", "rollout.kv_scales=bound"),
    },
    "sglang": {AS_COMPUTED: (), "fp8": ("+rollout.engine_args.kv_cache_dtype=fp8_e4m3",)},
    "transformers": {AS_COMPUTED: ()},
}
"""Engine -> formats of its KV cache, with the overrides of each."""
GAP = "log_prob_difference/mean"
HEAD = (
    "| model | engine | weights | keys and values | mean, nats | largest of a step | bytes of a refit |\n"
    "|---|---|---|---|---:|---:|---:|"
)


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[Sequence[str]]:
    """Yield the row of each run."""
    lab = Lab(scratch, options.steps)
    for family, engine in product(options.models, options.engines):
        weights = [each for each in FORMATS[engine] if each in (options.weights or FORMATS[engine])]
        kept = [each for each in options.keys_and_values if each in KEYS_AND_VALUES[engine]]
        for held_in, kept_in in product(weights, kept):
            lines = lab.run(family, engine, held_in, *KEYS_AND_VALUES[engine][kept_in])
            gaps, moved = [line[GAP] for line in lines], max(line["refit/bytes"] for line in lines)
            yield family, engine, held_in, kept_in, f"{mean(gaps):.4f}", f"{max(gaps):.4f}", f"{moved:,.0f}"


def main() -> None:
    """Run all of them, and print the table or write it to a file."""
    parser = options_parser(__doc__, known_engines=FORMATS, engines=["vllm", "transformers"], steps=10)
    parser.add_argument("--weights", nargs="+", help="forms of weights, which are else all that an engine holds")
    parser.add_argument(
        "--keys-and-values", nargs="+", choices=KEYS_AND_VALUES["vllm"], default=[AS_COMPUTED], help="their forms"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        show_table(
            "Engine and trainer on the same weights",
            "gaps",
            HEAD,
            rows(options, Path(scratch)),
            options.write,
            told=f" {options.steps} steps each.",
        )


if __name__ == "__main__":
    main()
