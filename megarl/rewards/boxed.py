"""Finding what a response puts into a box: \\boxed{...}."""

import re

_BRACE = re.compile(r"\\boxed\s{0,9}\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are balanced and hold something; None without one.

    One pass over the text. Where boxes are nested, it is the content of the inner one.
    """
    open_braces: list[tuple[int, bool]] = []
    found: str | None = None
    found_start = -1
    for brace in _BRACE.finditer(text):
        if brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append((brace.end(), len(brace[0]) > 1))
        elif brace[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            # An outer box ends behind its inner one, and begins before it.
            if is_box and start > found_start and (content := text[start : brace.start()].strip()):
                found, found_start = content, start
    return found
