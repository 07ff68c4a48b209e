"""Auxiliary models: critic, teachers, reward models. Each has its own ranks and parallel sizes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converters.architectures import Architecture, Head, read_architecture, with_head
from converters.copying import check_copies, check_structure
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from megarl.algorithms import ADVANTAGES, Source
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.config.megatron import ModelGroup, megatron_options
from megarl.data import Prompt
from megarl.data.tokenizer import read_tokenizer
from megarl.models.policy import Model, check_layout, check_not_in_fp8, check_prediction_layers
from megarl.schema import MegarlConfig, TeacherConfig
from megatron_ext.options.options import MegatronOptions


@dataclass(frozen=True)
class Teacher:
    """A model that the policy is distilled from."""

    group: TrainerGroup
    settings: TeacherConfig

    def teaches(self, prompt: Prompt) -> bool:
        """Whether this teacher is for the data source of `prompt`."""
        return self.settings.teaches(prompt.data_source)


@dataclass(frozen=True)
class AuxiliaryModels:
    """The auxiliary models that the algorithm needs; None for all others."""

    critic: TrainerGroup | None = None
    """Predicts a value per token; trained."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    reward_model: TrainerGroup | None = None
    """Scores whole responses; frozen."""
    implicit_reward_model: TrainerGroup | None = None
    """A language model whose log-ratio to its initial state rewards each token; trained."""

    @property
    def groups(self) -> list[TrainerGroup]:
        """All auxiliary models, teachers included."""
        others = (self.critic, self.reward_model, self.implicit_reward_model)
        return [group for group in (*others, *(each.group for each in self.teachers.values())) if group is not None]

    @property
    def trained(self) -> dict[str, TrainerGroup]:
        """The trained models by name, which a checkpoint must hold."""
        groups = {"critic": self.critic, "implicit_reward_model": self.implicit_reward_model}
        return {name: group for name, group in groups.items() if group is not None}


@dataclass(frozen=True)
class Wanted:
    """An auxiliary model that a configuration needs."""

    key: str
    """Configuration group, such as "critic"."""
    settings: ModelGroup
    path: Path
    """HuggingFace folder with the initial weights."""
    head: Head = "language_model"
    """With "value" the model predicts a value per token instead of log-probs."""
    keeps_reference: bool = False
    """Whether the ranks keep a copy of the initial weights."""
    is_trained: bool = False
    """Whether the model is trained beside the policy; if not, it is frozen."""

    def build(self, group: TrainerGroup, total_steps: int) -> None:
        """Build the model in started ranks, for `total_steps` optimizer steps."""
        if self.is_trained:
            group.build(self.path, None, total_steps, reference=self.keeps_reference, head=self.head)
        else:
            group.build_frozen(self.path, head=self.head)


def wanted_auxiliary(config: MegarlConfig) -> dict[str, Wanted]:
    """The auxiliary models that a configuration needs, by the names of their roles."""
    sources = ADVANTAGES[config.algorithm.advantage].sources
    own, critic, reward_model = Path(config.model.path), config.critic, config.reward_model
    implicit = config.implicit_reward_model
    wanted = {}
    if Source.CRITIC in sources:
        wanted["critic"] = Wanted("critic", critic, Path(critic.path or own), head="value", is_trained=True)
    if Source.IMPLICIT_REWARD_MODEL in sources:
        path = Path(implicit.path or own)
        wanted["implicit_reward_model"] = Wanted(
            "implicit_reward_model", implicit, path, keeps_reference=True, is_trained=True
        )
    if reward_model.path:
        wanted["reward_model"] = Wanted("reward_model", reward_model, Path(reward_model.path), head="value")
    for name, teacher in config.teachers.items() if wants_teachers(config) else ():
        wanted[_teacher(name)] = Wanted(f"teachers.{name}", teacher, Path(teacher.path))
    return wanted


def wants_teachers(config: MegarlConfig) -> bool:
    """Whether a configuration has teachers and the algorithm uses them."""
    asked = Source.TEACHERS in ADVANTAGES[config.algorithm.advantage].sources
    return bool(config.teachers) and (asked or config.algorithm.distillation_coefficient > 0)


def auxiliary_options(config: MegarlConfig) -> dict[str, MegatronOptions]:
    """Megatron options of each auxiliary model, by the names of their roles."""
    return {name: megatron_options(config, each.settings) for name, each in wanted_auxiliary(config).items()}


def trained_auxiliary(config: MegarlConfig) -> list[str]:
    """Names of the auxiliary models that are trained beside the policy."""
    return [name for name, each in wanted_auxiliary(config).items() if each.is_trained]


def check_auxiliary(config: MegarlConfig, model: Model, prompts: list[Prompt]) -> None:
    """Raise UserError for an auxiliary model that cannot work with this policy and these prompts.

    Prints a warning for a reward model that has another chat template.
    """
    for name, wanted in wanted_auxiliary(config).items():
        architecture = read_architecture(read_json(wanted.path / CONFIG))
        options = megatron_options(config, wanted.settings)
        check_layout(architecture, options)
        if wanted.is_trained:
            check_not_in_fp8(wanted.path)
            if wanted.head == "language_model":
                check_prediction_layers(architecture, options, beside=wanted.key)
        is_checked = wanted.path == model.folder and model.megatron_checkpoint is None
        if wanted.head == "value":
            _check_values(wanted, with_head(architecture, wanted.head))
        elif not is_checked:
            check_copies(HuggingFaceCheckpoint(wanted.path), architecture)
        if wanted.path == model.folder:
            continue
        tokenizer = read_tokenizer(wanted.path)
        if tokenizer.get_vocab() != model.tokenizer.get_vocab():
            raise UserError(
                f"{wanted.key}.path={wanted.path} has another vocabulary than model.path={model.folder}, so it cannot "
                f"read the policy's tokens: give a {name} with the policy's tokenizer"
            )
        if name == "reward_model" and tokenizer.chat_template not in (None, model.tokenizer.chat_template):
            print(
                f"warning: the chat template of reward_model.path={wanted.path} is not that of"
                f" model.path={model.folder}, by which prompts are written for both: if it was trained on chats that"
                " look different, its scores mean less",
                file=sys.stderr,
                flush=True,
            )
    _check_teachers(config, prompts)


def _check_values(wanted: Wanted, architecture: Architecture) -> None:
    """Raise UserError for weights that are not those of a value model; one that is not trained needs its head."""
    checkpoint = HuggingFaceCheckpoint(wanted.path)
    check_structure(checkpoint, architecture)
    if not wanted.is_trained and architecture.hf_zero_if_missing - checkpoint.shapes.keys():
        raise UserError(
            f"{wanted.key}.path={wanted.path} is a language model, without score.weight, and would score every response"
            " 0: give a sequence classifier of one label, as megarl reward-model writes it"
        )


def _check_teachers(config: MegarlConfig, prompts: list[Prompt]) -> None:
    for source in sorted({prompt.data_source for prompt in prompts}) if config.teachers else ():
        names = [name for name, each in config.teachers.items() if each.teaches(source)]
        if len(names) != 1:
            raise UserError(
                f"prompts with data_source={source!r} have {len(names)} teachers ({', '.join(names) or 'none'}): name "
                "each data source in the data_sources of exactly one teacher"
            )


def open_auxiliary(
    config: MegarlConfig,
    total_steps: int,
    place: Callable[[MegatronOptions, str], TrainerGroup],
    made: Callable[[TrainerGroup], None],
) -> AuxiliaryModels:
    """Start the ranks of all auxiliary models and build the models in them.

    `place` returns the ranks of a model, given its options and role name. `made` is called with the ranks of each model
    once it is built.
    """
    wanted = wanted_auxiliary(config)
    groups = {name: place(options, name) for name, options in auxiliary_options(config).items()}
    for name, group in groups.items():
        group.start()
        wanted[name].build(group, total_steps)
        made(group)
    return AuxiliaryModels(
        critic=groups.get("critic"),
        teachers={
            name: Teacher(groups[_teacher(name)], settings)
            for name, settings in config.teachers.items()
            if _teacher(name) in groups
        },
        reward_model=groups.get("reward_model"),
        implicit_reward_model=groups.get("implicit_reward_model"),
    )


def _teacher(name: str) -> str:
    return f"teacher_{name}"
