"""Translates the settings of a verl command, one by one, into a recipe."""

from collections.abc import Mapping
from typing import Any

from converters.errors import UserError, did_you_mean
from megarl.config.foreign import verl_keys as verl
from megarl.config.foreign import verl_notes
from megarl.config.foreign.programs import Trainer
from megarl.config.foreign.recipe import OPEN, TranslatedRecipe
from megarl.config.foreign.verl_config import Unknown

ACTOR, ROLLOUT, ALGORITHM = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm."
CORRECTION = f"{ALGORITHM}rollout_correction."


class Translation:
    """Translates settings of verl, one by one, into a recipe."""

    def __init__(self, given: Mapping[str, Any], trainer: Trainer) -> None:
        self.given = given
        self.trainer = trainer
        self.recipe = TranslatedRecipe()
        self.schedule_length: int | str = OPEN
        """Number of rollouts that the learning rate is scheduled for, which may exceed the run's."""
        engine = given.get("model_engine")
        engine = engine.word.known() if isinstance(engine, Unknown) else engine
        self._defaults = {**verl.DEFAULTS, **verl.DEFAULTS_OF.get(str(engine), {})}
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Consume a key of verl and return its value, or else verl's own default; `default` also if the key is null."""
        self._taken.add(key)
        value = self.given.get(key, self._defaults.get(key))
        if value is None:
            return default
        return value.word.known() if isinstance(value, Unknown) else value

    def count(self, key: str) -> int:
        """The value of a key that is a count. Raises UserError for less than one, which would divide by zero."""
        value = self.take(key)
        if type(value) is not int or value < 1:
            raise UserError(f"{key}={value} is no number of at least 1: change it, then translate again")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is given, and not null or empty."""
        return self.given.get(key) is not None

    def choose(self, key: str, table: Mapping[str, str]) -> str:
        """The value of a key, translated by `table`. Raises UserError for a value that megarl does not have."""
        value = self.take(key)
        if value not in table:
            raise UserError(
                f"{key}={value} has no counterpart, there are {', '.join(table)}{did_you_mean(str(value), table)};"
                " change it, then translate again"
            )
        return table[value]

    def names_below(self, prefix: str) -> list[str]:
        """The given keys that begin with `prefix`, without it."""
        return [key.removeprefix(prefix) for key in self.given if key.startswith(prefix)]

    def below(self, prefix: str) -> dict[str, Any]:
        """The given settings below `prefix`, by the rest of their keys."""
        return {name: self.take(prefix + name) for name in self.names_below(prefix)}

    def absent(self, key: str, why: str) -> None:
        """Note that a given setting has no counterpart."""
        self._taken.add(key)
        self.recipe.absent.setdefault(why, []).append(f"{key}={self.given[key]}")

    def without_effect(self, key: str, why: str) -> None:
        """Note that a given setting has no effect."""
        self._taken.add(key)
        self.recipe.always.setdefault(why, []).append(f"{key}={self.given[key]}")

    def finish(self) -> TranslatedRecipe:
        """The recipe, after noting all remaining settings."""
        for key, name in verl.SAME.items():
            if self.has(key):
                self.recipe.set(name, self.take(key))
        for key in sorted(self.given.keys() - self._taken):
            if key.endswith("._target_"):  # a class of verl's
                continue
            if not self._is_alike(key):
                self.absent(key, verl_notes.reason(verl_notes.ABSENT, key))
            elif (why := self._nothing(key)) or (why := verl_notes.reason(verl_notes.ALWAYS, key)):
                is_otherwise = self.trainer.samples_ahead and why == verl_notes.TURNS
                self.without_effect(key, verl_notes.OWN_GPUS if is_otherwise else why)
            elif self.given[key] not in (None, False, "", [], {}):
                self.absent(key, verl_notes.reason(verl_notes.ABSENT, key) or "megarl has no such setting")
        return self.recipe

    def _is_alike(self, key: str) -> bool:
        """Whether a setting asks only for what is always done here, if that depends on its value."""
        value, alike = self.given[key], verl_notes.ALIKE.get(key)
        values = value if isinstance(value, list) else [value]
        return alike is None or value is None or all(each in alike for each in values)

    def _nothing(self, key: str) -> str:
        """Why a setting asks for nothing; empty if it asks for something."""
        switch = next((each for beginning, each in verl_notes.SWITCHED.items() if key.startswith(beginning)), "")
        if switch and not self.given.get(switch):
            return f"nothing comes of it without {switch}"
        return "nothing is asked so" if key in verl_notes.NEUTRAL and self.given[key] == verl_notes.NEUTRAL[key] else ""
