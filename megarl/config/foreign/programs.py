"""Programs of verl and slime that scripts start, and how they train."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.errors import UserError
from megarl.config.foreign.shell_words import Word


@dataclass(frozen=True)
class Trainer:
    """A program whose training can be translated into a recipe."""

    samples_ahead: bool = False
    """Whether engines with their own GPUs sample a batch while the trainer trains on the previous one."""
    draws_batches: bool = True
    """Whether prompts are drawn in batches of data.gen_batch_size, all of which are trained on unless filtered."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> the program's own default if it differs from verl's."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Reason -> what else the program does, which has no counterpart."""


_SPLIT = "a critic that has GPUs of its own is a pool of cluster.pools; here it takes turns with the others"

_VERL: Mapping[str, Trainer] = {
    **dict.fromkeys(
        (
            *("main_ppo", "trainer.main_ppo", "trainer.main_ppo_v0", "trainer.main_ppo_sync", "r1_ascend.main_ppo"),
            "transfer_queue.main_ppo",
        ),
        Trainer(draws_batches=False),
    ),
    **dict.fromkeys(
        (
            *("main_dapo", "dapo.main_dapo", "dapo_transfer_queue.main_dapo"),
            *("main_entropy", "entropy.main_entropy"),
        ),
        Trainer(),
    ),
    **dict.fromkeys(("main_ppo_split", "split_placement.main_ppo_split"), Trainer(notes={_SPLIT: "main_ppo_split.py"})),
    "one_step_off_policy.main_ppo": Trainer(
        samples_ahead=True, defaults={"algorithm.rollout_correction.bypass_mode": True}
    ),
}

_SFT = "is supervised fine-tuning, which is megarl sft here: only RL is translated"
_SAMPLES = "samples and trains nothing: only RL is translated"
OTHERS: Mapping[str, str] = {
    **dict.fromkeys(("sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer"), _SFT),
    **dict.fromkeys(("main_generation", "main_generation_server", "main_eval"), _SAMPLES),
    "fully_async_main": (
        "trains on batches of async_training.require_batches x ppo_mini_batch_size prompts, and weights move every"
        " trigger_parameter_sync_step of them: write a recipe with schedule.max_staleness and schedule.in_flight, as in"
        " docs/schedules.md"
    ),
    "main_gkd": "is distillation: write a recipe with teachers.NAME.path, as in quickstart_distillation",
    "main_prime": "is PRIME, the preset algorithm=prime: write a recipe with it, as in quickstart_prime",
    "main_spin": "is self-play, which is megarl spin here: only RL is translated",
    "main_sppo": "is SPPO, the preset algorithm=sppo: write a recipe with it, as in quickstart_sppo",
}
"""Last part of the name of another program -> what is said about it."""


@dataclass(frozen=True)
class Programs:
    """The trainers of a framework, by name."""

    trainers: Mapping[str, Trainer]
    """The last `parts` components of a module or file name (or all, if it has fewer) -> the trainer."""
    parts: int
    usual: str
    """The program whose training can be translated."""

    def counts(self, name: Word) -> bool:
        """Whether a program with this name may train, rather than merge, copy or measure."""
        other = OTHERS.get(_last(name), _SAMPLES)
        return name.is_unknown or self._key(name) in self.trainers or other != _SAMPLES

    def trainer(self, name: Word | None) -> Trainer:
        """The trainer with this name, or the usual one without a name. Raises UserError for any other program."""
        if name is None:
            return Trainer()
        if (key := self._key(name)) in self.trainers:
            return self.trainers[key]
        why = OTHERS.get(_last(name)) or (
            f"is another trainer than {self.usual}: a recipe would train otherwise than it does; where it trains alike,"
            f" name {self.usual} in its place"
        )
        raise UserError(f"{name.where}: {name.unknown or name.text} {why}")

    def _key(self, name: Word) -> str:
        return ".".join(_parts(name)[-self.parts :])


def _parts(name: Word) -> list[str]:
    return [each for each in re.split(r"[./]", name.text.removesuffix(".py")) if each]


def _last(name: Word) -> str:
    return _parts(name)[-1] if _parts(name) else ""


VERL = Programs(_VERL, parts=2, usual="verl.trainer.main_ppo")
SLIME = Programs({"train": Trainer(), "train_async": Trainer(samples_ahead=True)}, parts=1, usual="train.py")
