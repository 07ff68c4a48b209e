"""The error that a user can act on, and the name that a wrong one was probably meant to be."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager


class UserError(Exception):
    """Bad input: one clear sentence that says what is wrong, where, and what to do.

    A command prints it without a traceback and ends with exit code 2. The `details` stand below it as they are: the
    end of a log, the input that something failed on.
    """

    def __init__(self, sentence: str, details: str = "") -> None:
        super().__init__(sentence, details) if details else super().__init__(sentence)
        self.sentence, self.details = sentence, details

    def __str__(self) -> str:
        return f"{self.sentence}\n{self.details}" if self.details else self.sentence


@contextmanager
def names_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Replace internal names in a UserError by the names under which the user gave the values.

    A longer name that contains an internal name stays as it is.

    Example: with names_as_given({"pipeline_model_parallel_size": "--pp"}): ...
    """
    try:
        yield
    except UserError as error:
        words = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?![\w.])" if names else "(?!)")
        error.sentence = words.sub(lambda found: names[found[0]], error.sentence)
        raise


def nearest_names(name: str, known: Iterable[str], *, count: int = 1, at_least: float = 0.6) -> list[str]:
    """The names of `known` most similar to `name`, the nearest first; their similarity (0 to 1) is `at_least` that."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=at_least)


def did_you_mean(name: str, known: Iterable[str], shown_as: str = "{}") -> str:
    """End of a sentence about the unknown `name`: "; did you mean NEAREST?", or empty if no known name is similar."""
    nearest = nearest_names(name, known)
    return f"; did you mean {shown_as.format(nearest[0])}?" if nearest else ""


def nearest_sizes(size: int, fits: Callable[[int], bool], largest: int) -> str:
    """The next smaller and the next larger number that `fits`, from 1 to `largest`, in words.

    Example: nearest_sizes(3, lambda size: 8 % size == 0, 8) is "2 or 4"
    """
    smaller = next((each for each in range(min(size - 1, largest), 0, -1) if fits(each)), None)
    larger = next((each for each in range(size + 1, largest + 1) if fits(each)), None)
    return " or ".join(str(each) for each in (smaller, larger) if each is not None)
