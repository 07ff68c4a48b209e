"""Names of a rank's model chunks in megatron-core's state dicts, and the prefixes they add to parameter names."""


def chunk_names(count: int) -> list[str]:
    """The names of a rank's `count` chunks: `model` for one, else `model0`, `model1` (virtual pipeline stages)."""
    return ["model"] if count == 1 else [f"model{index}" for index in range(count)]


def chunk_prefixes(count: int) -> list[str]:
    """The prefixes of parameter names: empty for one chunk, else `model0.`, `model1.`."""
    return [""] if count == 1 else [f"{name}." for name in chunk_names(count)]


def split_chunk(name: str, count: int) -> tuple[int, str]:
    """Split a parameter's name into chunk and local name: of two chunks, `model1.decoder.x` is `(1, "decoder.x")`."""
    if count == 1:
        return 0, name
    chunk, _, own = name.partition(".")
    return chunk_names(count).index(chunk), own
