"""An advantage estimator: its possible inputs, where a run gets them from, and its requirements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from megarl.algorithms.parts import Option, check_inputs, inputs_of, options_of


class Source(Enum):
    """Where a run gets an input from, for inputs that not every run has."""

    CRITIC = "the values of a critic"
    GREEDY_RESPONSES = "the rewards of greedy responses"
    NAMED_REWARDS = "several named rewards (reward.functions)"
    IMPLICIT_REWARD_MODEL = "an implicit reward model (implicit_reward_model.path)"
    TEACHERS = "the log-probs of a teacher (teachers)"
    OLD_POLICY = "predictions of the policy before the update"


class Rewards(Enum):
    """The rewards that an estimator accepts, in the words of messages."""

    ANY = "any rewards"
    NOT_NEGATIVE = "rewards of at least 0"
    """Still at least 0 after per-token terms, such as a KL, are subtracted."""
    OUTCOMES = "outcomes from 0 to 1"


class Input(NamedTuple):
    """An input of estimators, about N responses with T trained tokens; `INPUTS` names it.

    Example: Input("float[T]: of the critic", "value", per_token=True, source=Source.CRITIC, batch_field="old_values")
    """

    what: str
    """Type and meaning."""
    word: str | None = None
    """How the message about a value that is not finite calls it; None: values are not checked."""
    per_token: bool = False
    source: Source | None = None
    """None: every run has the input, or no estimator requires it."""
    batch_field: str | None = None
    """The field of the step's batch that it is read from, at the trained tokens."""


INPUTS: Mapping[str, Input] = {
    "responses": Input("Ragged: the lengths in trained tokens"),
    "groups": Input("long[N]: responses to the same prompt share one; any integers, in any order"),
    "prompts": Input("Groups: the responses by prompt, made of `groups`"),
    "rewards": Input("float[N]: the whole reward of a response, which falls due at its last trained token", "reward"),
    "scores": Input("float64[N]: `rewards` with the `token_rewards` of all tokens of a response"),
    "baseline_rewards": Input(
        "float[N]: the reward of the greedy response to the same prompt",
        "reward of the greedy response",
        source=Source.GREEDY_RESPONSES,
    ),
    "parts": Input(
        "name -> float[N]: the weighted rewards that `rewards` is the sum of, but for `penalties`",
        "reward",
        source=Source.NAMED_REWARDS,
    ),
    "part_weights": Input("name -> float: the weights that are in `parts`; 1 without"),
    "penalties": Input("float[N]: what is in `rewards` beside `parts`, on a scale of its own: of long responses"),
    "token_rewards": Input("float[T]: of single tokens, beyond `rewards`: the KL", "reward", per_token=True),
    "values": Input(
        "float[T]: the critic's value before each token",
        "value",
        per_token=True,
        source=Source.CRITIC,
        batch_field="old_values",
    ),
    "old_log_probs": Input(
        "float[T]: of the policy before the update",
        "log-prob",
        per_token=True,
        source=Source.OLD_POLICY,
        batch_field="old_log_probs",
    ),
    "probability_squares": Input(
        "float[T]: the squared probabilities of the whole vocabulary, summed",
        "sum of squared probabilities",
        per_token=True,
        source=Source.OLD_POLICY,
        batch_field="probability_squares",
    ),
    "importance_weights": Input(
        "float[T]: of the correction for the sampler's log-probs", "importance weight", per_token=True
    ),
    "process_rewards": Input(
        "float[T]: implicit process rewards, their beta already in",
        "process reward",
        per_token=True,
        source=Source.IMPLICIT_REWARD_MODEL,
        batch_field="process_rewards",
    ),
    "teacher_log_probs": Input(
        "float[T]: of the sampled tokens under the teacher",
        "teacher's log-prob",
        per_token=True,
        source=Source.TEACHERS,
        batch_field="teacher_log_probs",
    ),
}
"""Possible inputs. An estimator reads one by naming it as a parameter; their values are checked in this order."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator and its requirements.

    Raises TypeError for a function with an input that is not in `INPUTS`.
    """

    function: Callable[..., Tensor]
    """From `INPUTS` to advantages: a new float[T], or float[N]. Options are keyword-only, with defaults."""
    smallest_group: int = 1
    """Fewest responses to a prompt: 2 if they are compared with each other."""
    of_response: bool = False
    """Whether the function returns one advantage per response, float[N], for all of its tokens."""
    whitened: bool = False
    """Whether the advantages are then whitened: mean 0 and variance 1 over the tokens of the batch."""
    rewards: Rewards = Rewards.ANY
    """The rewards it accepts. Any other ends the run; configurations that can yield one are refused at the start."""

    def __post_init__(self) -> None:
        check_inputs(self.function, INPUTS)

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that the estimator requires and that not every run has."""
        inputs = inputs_of(self.function).items()
        return frozenset(name for name, is_needed in inputs if is_needed and INPUTS[name].source)

    @property
    def sources(self) -> frozenset[Source]:
        """The sources that a run must have for the estimator."""
        return frozenset(source for name in self.needs if (source := INPUTS[name].source))

    @property
    def reads_rewards(self) -> bool:
        """Whether the rewards of responses change the advantages."""
        return bool({"rewards", "scores", "parts"} & inputs_of(self.function).keys())

    @property
    def reads_token_rewards(self) -> bool:
        """Whether per-token rewards, such as a KL in the reward, change the advantages."""
        return bool({"scores", "token_rewards"} & inputs_of(self.function).keys())

    @property
    def options(self) -> Mapping[str, Option]:
        """Options of the function, by name."""
        return options_of(self.function)
