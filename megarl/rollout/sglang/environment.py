"""The environment of an SGLang server: what is in it beside that of the run, and what of that it does not see."""

import re
from collections.abc import Mapping

_USUAL: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # An aborted sample that waits has the tokens that were told of: all but the last few.
    "SGLANG_FORCE_STREAM_INTERVAL": "8",
}
WITHHELD = (
    # It interleaves the rows of experts anew at the end of each update.
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
    # It packs weights in FP8, and takes no others in their place.
    "SGLANG_FORCE_FP8_MARLIN",
    # Log-probs would be those before temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    # Tokens would be drawn, with log-probs, from weights that are no numbers.
    "SGLANG_SANITIZE_NAN_LOGITS",
    # Experts would be drawn at random, or taken in turn.
    "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    # Codes of layers that rollout.weights quantises would be read as if they were weights.
    "SGLANG_FP8_IGNORED_LAYERS",
    # It puts back mistakes that SGLang has mended.
    "SGLANG_DEBUG_REVERT_PR",
)
"""Variables with which SGLang would change samples, or their log-probs, without a word; without them it does not."""
_OLD, _NEW = "SGL_", "SGLANG_"
"""How names of its variables begin; SGLang 0.5.23 takes a value under the old name in place of one under the new."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names by which torch takes the settings of its allocator."""
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:[^,]*")


def server_environment(of_run: Mapping[str, str], particular: Mapping[str, str], sleeps: bool) -> dict[str, str]:
    """The environment of a server: `of_run`, over what is usual and what is `particular` to this server.

    One that `sleeps` has no expandable segments. With them torch_memory_saver, by which SGLang gives memory back, ends
    the server under one of the two names, and under the other, at which it does not look, would give nothing back.
    """
    withheld = {*WITHHELD, *(name.replace(_NEW, _OLD, 1) for name in WITHHELD)}
    found = {**_USUAL, **particular, **{name: value for name, value in of_run.items() if name not in withheld}}
    for name in _ALLOCATOR if sleeps else ():
        if name in found:
            found[name] = _EXPANDABLE.sub("", found[name]).lstrip(",")
    return found
