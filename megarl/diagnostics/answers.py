"""Extracts the answer of a response, for a vote among several."""

_BOXED = "\\boxed{"
_MARKED = "####"
_TAGS = ("<answer>", "</answer>")


def answer_of(text: str) -> str:
    """The answer that a response gives: equal texts are one vote.

    It is the last one of the first kind that there is: \\boxed{...}, <answer>...</answer>, the rest of a line after
    "####", or else the whole text. Case and white space count for nothing, nor do dollar signs and a point at the end.
    """
    found = next((answer for find in (_boxed, _tagged, _marked) if (answer := find(text)) is not None), text)
    return " ".join(found.replace("$", " ").split()).rstrip(".").casefold()


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def _tagged(text: str) -> str | None:
    opening, closing = _TAGS
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    return text[start + len(opening) : end] if start >= 0 else None


def _marked(text: str) -> str | None:
    _, marker, rest = text.rpartition(_MARKED)
    return rest.strip().partition("\n")[0] if marker else None
