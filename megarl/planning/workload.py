"""The work of one step: how many responses, how long they are, and the batches in which they are trained on."""

import math
from dataclasses import dataclass

from converters.errors import UserError
from megarl.planning.lengths import exponential_rate, mean_so_far, mean_square


@dataclass(frozen=True)
class Workload:
    """One step of a run. Lengths are in tokens; those of prompts and responses are means.

    Raises UserError for a number below 1, and for a mean response longer than the longest.

    Example: Workload(prompts=512, samples=16, prompt_tokens=200, response_tokens=3000, max_response_tokens=8192)
    """

    prompts: int = 64
    samples: int = 8
    """Responses per prompt."""
    prompt_tokens: float = 512
    response_tokens: float = 256
    max_response_tokens: int = 512
    max_tokens_per_micro_batch: int = 16384
    """Per data-parallel rank; context-parallel ranks share them."""
    updates: int = 1
    """Optimizer steps."""
    log_prob_passes: int = 1
    """Forward passes over all tokens before the update: of the policy, and of a reference."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            smallest = 0 if name == "log_prob_passes" else 1
            if not (math.isfinite(value) and value >= smallest):
                raise UserError(f"the step's {name} is {value}; it must be at least {smallest}")
        if self.response_tokens > self.max_response_tokens:
            raise UserError(
                f"the mean response of {self.response_tokens:g} tokens is longer than the longest,"
                f" {self.max_response_tokens}; lower --response-tokens or raise --max-response-tokens"
            )

    @property
    def responses(self) -> int:
        """Number of responses to all prompts."""
        return self.prompts * self.samples

    @property
    def sequence_tokens(self) -> float:
        """Mean length of a prompt with its response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def length_rate(self) -> float:
        """Rate of the distribution of response lengths, relative to the longest (`lengths.py`)."""
        return exponential_rate(self.response_tokens / self.max_response_tokens)

    @property
    def attention_length(self) -> float:
        """Mean length of a token's sequence. It exceeds the mean over sequences, because long ones have more tokens."""
        square = self.max_response_tokens**2 * mean_square(self.length_rate)
        prompt = self.prompt_tokens
        return (prompt**2 + 2 * prompt * self.response_tokens + square) / self.sequence_tokens

    @property
    def decoding_context(self) -> float:
        """Mean length of the sequence that an engine decodes a token for, as far as it is."""
        return self.prompt_tokens + self.max_response_tokens * mean_so_far(self.length_rate)

    @property
    def tokens(self) -> float:
        """Tokens of all prompts and responses."""
        return self.responses * self.sequence_tokens

    def micro_batches(self, data_parallel: int) -> int:
        """Number of micro-batches of a rank in one update, filled as far as sequences of the mean length allow."""
        sequences = math.ceil(self.responses / self.updates / data_parallel)
        return math.ceil(sequences * self.sequence_tokens / self.micro_batch_tokens(data_parallel))

    def micro_batch_tokens(self, data_parallel: int) -> float:
        """Tokens per micro-batch: the maximum, or fewer if there are not as many."""
        sequences = math.ceil(self.responses / self.updates / data_parallel)
        return min(max(self.max_tokens_per_micro_batch, self.sequence_tokens), sequences * self.sequence_tokens)
