"""The terms of the configuration, whose weighted sum is the reward of a response."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from converters.errors import UserError
from megarl.rewards.registry import Source
from megarl.rewards.scoring import Score

if TYPE_CHECKING:
    from megarl.schema import RewardConfig

SINGLE = "score"
"""Name of the only term of a single reward."""
OVERLONG = "overlong"
"""Name of the term that `reward.overlong_buffer_tokens` adds."""
REWARD_MODEL = "reward_model"
"""Name of the term that `reward_model.path` adds."""


@dataclass(frozen=True)
class Term:
    """One named reward: the function of `source` scores samples of `data_sources`, or all samples if that is empty."""

    name: str
    source: Source
    weight: float = 1.0
    data_sources: Sequence[str] = ()
    answer_after: str = ""
    """Built-in rewards read the text after the last occurrence of this; see `reward.answer_after`."""

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Arguments to call the function with; None if the response lacks the `answer_after` that precedes answers."""
        builtin = self.source.builtin
        if not self.answer_after or builtin is None or not builtin.reads_answer:
            return arguments
        _, marker, answer = arguments["solution_str"].rpartition(self.answer_after)
        return {**arguments, "solution_str": answer} if marker else None

    def applies_to(self, data_source: str) -> bool:
        """Whether the term scores samples of `data_source`."""
        return not self.data_sources or any(
            data_source.startswith(each[:-1]) if each.endswith("*") else data_source == each
            for each in self.data_sources
        )


def terms_of(config: "RewardConfig") -> list[Term]:
    """The terms of a configuration, from `functions` or else the single `function`, without loading anything.

    Raises `UserError` for `function` beside `functions`, and for an invalid name or weight.
    """
    if not config.functions:
        return [Term(SINGLE, Source(config.function), answer_after=config.answer_after)]
    if config.function != type(config)().function:
        raise UserError(
            f"reward.function={config.function} and reward.functions are both given: make the former one of the "
            "latter's terms, or leave it out"
        )
    terms = []
    for name, term in config.functions.items():
        where = f"reward.functions.{name}"
        if not name or "/" in name or name in (SINGLE, OVERLONG, REWARD_MODEL):
            raise UserError(f"{where}: a term cannot be named {name!r}; choose another name, without a slash")
        if not math.isfinite(term.weight):
            raise UserError(f"{where}.weight={term.weight} must be a finite number")
        source = Source(term.function, dict(term.options), f"{where}.function", f"{where}.options")
        terms.append(Term(name, source, term.weight, tuple(term.data_sources), config.answer_after))
    return terms


def check_data_source(terms: Sequence[Term], data_source: str) -> None:
    """Raise `UserError` if no term covers `data_source`."""
    if not any(term.applies_to(data_source) for term in terms):
        raise UserError(
            f"no term of reward.functions is for the data_source {data_source!r}: add it to data_sources of one of "
            f"{', '.join(term.name for term in terms)}, or give one none"
        )


class Question(Protocol):
    """The part of a prompt that scoring needs, and its origin for messages."""

    @property
    def where(self) -> str:
        """File and row."""
        ...

    @property
    def data_source(self) -> str:
        """Name that decides which terms score the prompt."""
        ...

    @property
    def ground_truth(self) -> Any:
        """Ground truth, as passed to the reward function."""
        ...


def check_ground_truths(terms: Sequence[Term], questions: Iterable[Question]) -> None:
    """Raise `UserError` for the first ground truth that a built-in reward would not accept."""
    checks = [(term, check) for term in terms if (check := term.source.truth_check()) is not None]
    right = set[tuple[str, str]]()
    for question in questions:
        truth = question.ground_truth
        for term, check in checks:
            if not term.applies_to(question.data_source) or (isinstance(truth, str) and (term.name, truth) in right):
                continue
            try:
                check(truth)
            except ValueError as error:
                raise UserError(
                    f"{question.where}: {error}; correct it, or set reward.on_error=drop to leave such samples out"
                ) from error
            if isinstance(truth, str):
                right.add((term.name, truth))


def combine(scored: Sequence[tuple[Term, Score]]) -> Score:
    """Sum the terms by their weights.

    A single reward keeps the names of its parts. With several, each weighted term is a part under its own name, and
    its parts are named term/part. Raises `ValueError` if the sum is not finite.
    """
    terms = {term.name: term.weight * score.value for term, score in scored}
    if set(terms) == {SINGLE}:
        ((_, score),) = scored
        return Score(score.value, score.parts, terms)
    parts = dict(terms)
    for term, score in scored:
        parts |= {f"{term.name}/{name}": value for name, value in score.parts.items()}
    total = sum(terms.values())
    if not math.isfinite(total):
        raise ValueError(f"the sum of its terms by their weights must be a finite number, found {total}: {terms}")
    return Score(total, parts, terms)
