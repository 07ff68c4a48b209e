"""A recipe made from another program's settings, and what could not be translated."""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from megarl.config.origins import OPEN, compose_open
from megatron_ext.options.supported_options import DEEPEP, REFUSED, WITHOUT_DEEPEP

__all__ = ["OPEN", "SAMPLED_FROM_ALL", "WITHOUT_LIMIT", "TranslatedRecipe", "check", "steps_of_epochs"]

SAMPLED_FROM_ALL = "held-out responses are sampled from all tokens"
"""Why an evaluation has neither top_p nor top_k."""

WITHOUT_LIMIT = 1_000_000
"""Maximum of refills, where verl and slime continue to sample until a batch is full."""


@dataclass
class TranslatedRecipe:
    """Nested keys of megarl, and notes about all other settings."""

    values: dict[str, Any] = field(default_factory=dict)
    always: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> settings that always hold here."""
    absent: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> settings without a counterpart."""

    def set(self, key: str, value: Any) -> None:
        """Set a dotted key."""
        *groups, name = key.split(".")
        place = self.values
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value

    def set_option(self, key: str, value: Any, shown: str) -> None:
        """Set an option of Megatron, or note under `shown` why it cannot be set."""
        refusal = REFUSED.get(key.rpartition(".")[2])
        if refusal and refusal.covers(value):
            self.absent.setdefault(refusal.reason, []).append(shown)
        else:
            self.set(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key."""
        place: Any = self.values
        for name in key.split("."):
            if name not in place:
                return default
            place = place[name]
        return place

    def weigh_twice(self, reward: str, settings: list[str], where: str) -> None:
        """Double the weight of a 0-or-1 reward, so that right and wrong are as far apart as the 1 and -1 of `where`."""
        self.set(f"reward.functions.{reward}.function", reward)
        self.set(f"reward.functions.{reward}.weight", 2.0)
        why = f"right answers are worth 2 and wrong ones 0, as far apart as {where}'s 1 and -1, in eval/accuracy, too"
        self.always[why] = settings

    def evaluate_with(self, samples: int, temperature: float, settings: list[str]) -> None:
        """Set number and temperature of held-out samples; `settings` are those that ask for several greedy ones."""
        from megarl.rollout.sampling import COLDEST  # imports torch, for which a script with errors need not wait

        if temperature >= COLDEST:
            self.set("loop.eval_temperature", temperature)
        elif samples > 1:
            self.always["greedy responses to a prompt are all the same: one is enough"] = settings
            samples = 1
        self.set("loop.eval_samples", samples)

    def sample_ahead(self) -> None:
        """Let engines sample a batch while the trainer trains on the previous one; the schedule adds no correction."""
        self.set("schedule.max_staleness", 1)
        self.set("schedule.corrected", False)

    def decay_over_the_whole_run(self, warm_up: str) -> None:
        """Let the policy's decay end with the run, including steps that train only the critic, as in verl and slime.

        If the length of the run is open, that is noted under `warm_up`, the setting of these steps.
        """
        is_constant = self.get("megatron.lr_decay_style", "constant") == "constant"
        if not self.get("critic.warmup_steps") or is_constant or self.get("megatron.lr_decay_steps"):
            return
        steps, updates = self.get("loop.steps"), self.get("algorithm.updates_per_step", 1)
        if steps == OPEN:
            why = f"the policy's learning rate decays in it, too: megatron.lr_decay_steps is loop.steps times {updates}"
            self.absent.setdefault(why, []).append(warm_up)
        else:
            warm = self.get("megatron.lr_warmup_steps") or 0
            self.set("megatron.lr_decay_steps", max(steps * updates, warm + 1))

    def yaml(self, title: str) -> str:
        """The recipe as YAML, after comments on what could not be translated."""
        lines = [f"# {title}"]
        for heading, notes in (("No counterpart", self.absent), ("So in any case", self.always)):
            # A value such as a chat template may have several lines; a comment has one.
            said = {why: " ".join(" ".join(settings).split()) for why, settings in notes.items()}
            lines += [f"# {heading}: {settings}: {why}." for why, settings in sorted(said.items())]
        for name, refusal in WITHOUT_DEEPEP.items():
            if refusal.covers(value := self.get(f"megatron.{name}")):
                lines.append(f"# Only where ranks can import {DEEPEP}: megatron.{name}={value}: {refusal.reason}.")
        return "\n".join([*lines, yaml.safe_dump(self.values, sort_keys=False, width=110)])


def steps_of_epochs(files: Any, epochs: int, prompts: int) -> int | str:
    """Steps in `epochs` epochs, without the last, incomplete batch of each; open if the data is not available."""
    if not isinstance(files, list) or not all(Path(file).expanduser().is_file() for file in files):
        return OPEN
    import pyarrow.parquet as pq  # takes a second, for which a script with errors need not wait

    rows = sum(pq.read_metadata(Path(file).expanduser()).num_rows for file in files)
    return epochs * (rows // prompts)


def check(recipe: TranslatedRecipe) -> None:
    """Raise UserError if the recipe cannot run, whatever values its open keys get."""
    # Imported here, because some import torch, which takes seconds that a script with errors need not wait.
    from megarl.config.abilities import check_abilities
    from megarl.config.composition import check_composition
    from megarl.config.megatron import megatron_options
    from megarl.config.pools import check_pools
    from megarl.config.schedule import check_schedule

    with TemporaryDirectory() as folder:
        Path(folder, "translated.yaml").write_text(recipe.yaml("A recipe"))
        config, _ = compose_open("translated", (), folder)
    megatron_options(config)
    check_pools(config)
    check_composition(config)
    check_schedule(config)
    check_abilities(config)
