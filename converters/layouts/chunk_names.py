"""Names of a rank's model chunks: megatron-core's for state dicts, and what they put before the names of parameters."""


def chunk_names(count: int) -> list[str]:
    """The chunks of a rank that has so many: `model` alone, or `model0`, `model1` with virtual pipeline stages."""
    return ["model"] if count == 1 else [f"model{index}" for index in range(count)]


def chunk_prefixes(count: int) -> list[str]:
    """The beginnings of the names of parameters: none where there is one chunk, else `model0.`, `model1.`."""
    return [""] if count == 1 else [f"{name}." for name in chunk_names(count)]


def split_chunk(name: str, count: int) -> tuple[int, str]:
    """The chunk of a parameter and its name there: `model1.decoder.x` is `(1, "decoder.x")` of two chunks."""
    if count == 1:
        return 0, name
    chunk, _, own = name.partition(".")
    return chunk_names(count).index(chunk), own
