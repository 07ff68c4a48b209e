"""Programs of verl and slime that scripts start, and what training is theirs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.errors import UserError
from megarl.config.foreign.shell_words import Word


@dataclass(frozen=True)
class Trainer:
    """A program whose training is that of a recipe."""

    samples_ahead: bool = False
    """Whether engines with GPUs of their own sample a batch while the trainer learns from the one before it."""
    draws_batches: bool = True
    """Whether prompts are drawn in batches of data.gen_batch_size, all of which are trained on without a filter."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> the program's own default, where it is another than verl's."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Reason -> what the program does besides, without a counterpart."""


_SPLIT = "a critic that has GPUs of its own is a pool of cluster.pools; here it takes turns with the others"

OF_VERL: Mapping[str, Trainer] = {
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
"""The last two parts of a module's or a file's name, or the one part that it has."""
OF_SLIME: Mapping[str, Trainer] = {"train": Trainer(), "train_async": Trainer(samples_ahead=True)}
"""The last part."""

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
"""The last part of the name of another program -> what is said of it."""


def counts(name: Word, table: Mapping[str, Trainer], parts: int) -> bool:
    """Whether a program by this name may train: not one that merges, copies or measures."""
    found = _parts(name)
    other = OTHERS.get(found[-1] if found else "", _SAMPLES)
    return name.is_unknown or ".".join(found[-parts:]) in table or other != _SAMPLES


def _parts(name: Word) -> list[str]:
    return [each for each in re.split(r"[./]", name.text.removesuffix(".py")) if each]


def trainer_of(name: Word, table: Mapping[str, Trainer], parts: int, usual: str) -> Trainer:
    """The trainer by this name. Raises UserError for a program that is none of the `table`, by its last `parts`.

    `usual` is the program whose training can be translated.
    """
    found = _parts(name)
    if (key := ".".join(found[-parts:])) in table:
        return table[key]
    why = OTHERS.get(found[-1] if found else "") or (
        f"is another trainer than {usual}: a recipe would train otherwise than it does; where it trains alike, name"
        f" {usual} in its place"
    )
    raise UserError(f"{name.where}: {name.unknown or name.text} {why}")
