"""The environment of an SGLang server: variables added to those of the run, and variables removed."""

import re
from collections.abc import Mapping

_USUAL: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A waiting sample that is aborted keeps the tokens last reported: all but the last few.
    "SGLANG_FORCE_STREAM_INTERVAL": "8",
}
WITHHELD = (
    # Interleaves the rows of experts once more at the end of each update.
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
    # Packs FP8 weights, and then accepts no new ones.
    "SGLANG_FORCE_FP8_MARLIN",
    # Returns log-probs from before temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    # Samples tokens, with log-probs, even if weights are NaN.
    "SGLANG_SANITIZE_NAN_LOGITS",
    # Draws experts at random, or takes them in turn.
    "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    # Reads the codes of layers that rollout.weights quantises as if they were weights.
    "SGLANG_FP8_IGNORED_LAYERS",
    # Brings back bugs that SGLang has fixed.
    "SGLANG_DEBUG_REVERT_PR",
)
"""Variables that would silently change samples or their log-probs; they are removed."""
_OLD, _NEW = "SGL_", "SGLANG_"
"""Prefixes of SGLang's variables; in SGLang 0.5.23 the old name overrides the new one."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator."""
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:[^,]*")


def server_environment(of_run: Mapping[str, str], particular: Mapping[str, str], sleeps: bool) -> dict[str, str]:
    """The environment of a server: defaults, then what is `particular` to it, then `of_run`, which takes precedence.

    A server that `sleeps` gets no expandable segments. SGLang frees memory by torch_memory_saver, which does not
    support them: under one of the two variable names it makes the server exit, and under the other, which it does not
    check, it would free nothing.
    """
    withheld = {*WITHHELD, *(name.replace(_NEW, _OLD, 1) for name in WITHHELD)}
    found = {**_USUAL, **particular, **{name: value for name, value in of_run.items() if name not in withheld}}
    for name in _ALLOCATOR if sleeps else ():
        if name in found:
            found[name] = _EXPANDABLE.sub("", found[name]).lstrip(",")
    return found
