"""Extraction of the boxed answer of a response: \\boxed{...}."""

import re

_BRACE = re.compile(r"\\boxed\s{0,9}\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} with balanced braces that is not empty; None without one.

    For nested boxes, returns the content of the inner one. Takes one pass over the text.
    """
    open_braces: list[tuple[int, bool]] = []
    found: str | None = None
    found_start = -1
    for brace in _BRACE.finditer(text):
        if brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append((brace.end(), len(brace[0]) > 1))
        elif brace[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            # An outer box ends after its inner one, but starts before it: keep the inner one.
            if is_box and start > found_start and (content := text[start : brace.start()].strip()):
                found, found_start = content, start
    return found
