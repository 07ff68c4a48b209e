"""How far engine and trainer are apart after every refit: families of models in each engine and number format.

Tiny models of the quickstart whose sizes fit the blocks of all formats, warmed up as there, the trainer in bf16. Each
is trained for a few steps with every engine; shown is |engine - trainer| of the sampled tokens' log-probs.
"""

import argparse
import tempfile
from collections.abc import Mapping
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean

from lab import FAMILIES, FORMATS, ROOT, Lab
from machine import at_least_one, describe, give_out

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
"""Engine -> the forms of keys and values that it keeps, each with its overrides."""
GAP = "log_prob_difference/mean"
HEAD = (
    "| model | engine | weights | keys and values | mean, nats | largest of a step | bytes of a refit |\n"
    "|---|---|---|---|---:|---:|---:|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--engines", nargs="+", choices=FORMATS, default=["vllm", "transformers"])
    parser.add_argument("--weights", nargs="+", help="forms of weights, which are else all that an engine holds")
    parser.add_argument(
        "--keys-and-values", nargs="+", choices=KEYS_AND_VALUES["vllm"], default=[AS_COMPUTED], help="their forms"
    )
    parser.add_argument("--steps", type=at_least_one, default=10)
    parser.add_argument("--write", type=Path, help="file for the page; each row is also printed")
    options = parser.parse_args()
    page = [f"`make benchmark-gaps`, {date.today()}, {describe(ROOT)}. {options.steps} steps each.", "", HEAD]
    print("\n".join(page), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch), options.steps)
        for family in options.models:
            for engine in options.engines:
                weights = [each for each in FORMATS[engine] if each in (options.weights or FORMATS[engine])]
                kept = [each for each in options.keys_and_values if each in KEYS_AND_VALUES[engine]]
                for held_in, kept_in in product(weights, kept):
                    lines = lab.run(family, engine, held_in, *KEYS_AND_VALUES[engine][kept_in])
                    gaps = [line[GAP] for line in lines]
                    cells = family, engine, held_in, kept_in, f"{mean(gaps):.4f}", f"{max(gaps):.4f}"
                    page.append(f"| {' | '.join(cells)} | {max(line['refit/bytes'] for line in lines):,.0f} |")
                    print(page[-1], flush=True)
    if options.write:
        give_out("\n".join(["# Engine and trainer on the same weights", "", *page, ""]), options.write)


if __name__ == "__main__":
    main()
