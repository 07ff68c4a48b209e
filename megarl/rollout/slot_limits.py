"""Limits of engines with an adapter slot: the models and arguments that were verified against transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.rollout.kind import Arguments

if TYPE_CHECKING:
    from converters.architectures import Architecture


@dataclass(frozen=True)
class SlotLimits:
    """Limits of the LoRA slot of one kind of engine; `title` is its name in messages."""

    title: str
    model_types: Sequence[str]
    arguments: Mapping[str, Sequence[str | int | None]]
    """Argument -> its supported values."""

    @property
    def alone(self) -> str:
        """The beginning of a refusal's message."""
        return f"lora.merge=false, where the adapter goes into a LoRA slot of {self.title},"

    def check_model(self, adapter: "Architecture") -> None:
        """Raise UserError for an adapter of an unsupported model family."""
        if adapter.model_type not in self.model_types:
            raise UserError(
                f"{self.alone} has been compared for {', '.join(self.model_types)}, and this is a {adapter.model_type}"
                " model: set lora.merge=true"
            )

    def check_arguments(self, given: Arguments) -> None:
        """Raise UserError for an argument with an unsupported value."""
        for name, allowed in self.arguments.items():
            if (value := given.get(name)) not in allowed:
                raise UserError(
                    f"{self.alone} is for engines of tensor-parallel workers that read model.path as it is, and"
                    f" rollout.engine_args.{name}={value}: leave it out, or set lora.merge=true"
                )
