"""Every advantage estimator as its formula reads: loops over Python's own floats, one response and token at a time.

Nothing here is shared with the estimators, and nothing is fast.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Response:
    """One response, as far as it is known; lists have one element per trained token."""

    group: int
    reward: float
    baseline_reward: float
    parts: dict[str, float]
    token_rewards: list[float]
    values: list[float]
    old_log_probs: list[float]
    probability_squares: list[float]
    importance_weights: list[float]
    process_rewards: list[float]
    teacher_log_probs: list[float]
    penalty: float = 0.0

    @property
    def length(self) -> int:
        return len(self.values)

    @property
    def score(self) -> float:
        return math.fsum([self.reward, *self.token_rewards])

    @property
    def rewards(self) -> list[float]:
        """Rewards of every token; that of the response is the last one's."""
        return [r + (self.reward if t == self.length - 1 else 0.0) for t, r in enumerate(self.token_rewards)]


@dataclass
class Options:
    normalize_by_std: bool = True
    gamma: float = 1.0
    gae_lambda: float = 1.0
    part_weights: dict[str, float] = field(default_factory=dict)


Tokens = list[list[float]]


def peers(responses: Sequence[Response], i: int) -> list[Response]:
    return [other for other in responses if other.group == responses[i].group]


def same_for_all_tokens(responses: Sequence[Response], values: Sequence[float]) -> Tokens:
    return [[value] * response.length for response, value in zip(responses, values, strict=True)]


def whiten(tokens: Tokens) -> Tokens:
    flat = [value for row in tokens for value in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((value - mean) ** 2 for value in flat) / max(len(flat) - 1, 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in tokens]


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    result: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        result.append(following)
    return result[::-1]


def standardised(value: float, others: Sequence[float], normalize: bool) -> float:
    return (value - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6 if normalize else 1.0)


def grpo(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        scores = [other.score for other in peers(responses, i)]
        of_response.append(standardised(response.score, scores, options.normalize_by_std))
    return same_for_all_tokens(responses, of_response)


def rloo(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        others = [other.score for other in peers(responses, i) if other is not response]
        of_response.append(response.score - math.fsum(others) / len(others))
    return same_for_all_tokens(responses, of_response)


def reinforce_plus_plus(responses: Sequence[Response], options: Options) -> Tokens:
    return whiten([discounted(response.rewards, options.gamma) for response in responses])


def reinforce_plus_plus_baseline(responses: Sequence[Response], options: Options) -> Tokens:
    return whiten(grpo(responses, Options(normalize_by_std=False)))


def remax(responses: Sequence[Response], options: Options) -> Tokens:
    return [[r - response.baseline_reward for r in discounted(response.rewards, 1.0)] for response in responses]


def opo(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        group = peers(responses, i)
        weight = sum(other.length for other in group)
        baseline = math.fsum(other.length * other.score for other in group) / weight if weight else 0.0
        of_response.append(response.score - baseline)
    return same_for_all_tokens(responses, of_response)


def gpg(responses: Sequence[Response], options: Options) -> Tokens:
    teaching = sum(len({other.score for other in peers(responses, i)}) > 1 for i in range(len(responses)))
    alpha = len(responses) / max(teaching, 1)
    centred = grpo(responses, Options(normalize_by_std=False))
    return [[alpha * value for value in row] for row in centred]


def max_rl(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        mean = statistics.fmean(other.score for other in peers(responses, i))
        of_response.append((response.score - mean) / mean if mean > 0 else 0.0)
    return same_for_all_tokens(responses, of_response)


def grpo_pass_k(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        others = [other.score for other in peers(responses, i) if other is not response]
        lead = max(0.0, response.score - max(others))
        std = statistics.stdev([*others, response.score])
        of_response.append(lead / (std + 1e-6) if options.normalize_by_std else lead)
    return same_for_all_tokens(responses, of_response)


def gdpo(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        total = 0.0
        for name, value in response.parts.items():
            weight = options.part_weights.get(name, 1.0)
            values = [other.parts[name] / weight for other in peers(responses, i)]
            total += weight * standardised(value / weight, values, options.normalize_by_std)
        total += response.penalty - statistics.fmean(other.penalty for other in peers(responses, i))
        of_response.append(total)
    return whiten(same_for_all_tokens(responses, of_response))


def win_rate(responses: Sequence[Response], options: Options) -> Tokens:
    of_response = []
    for i, response in enumerate(responses):
        group = peers(responses, i)
        wins = sum(1.0 if response.score > o.score else 0.5 if response.score == o.score else 0.0 for o in group)
        of_response.append(wins / len(group) - 0.5)
    return same_for_all_tokens(responses, of_response)


def gae_unwhitened(responses: Sequence[Response], options: Options) -> Tokens:
    result = []
    for response in responses:
        errors = []
        for t, reward in enumerate(response.rewards):
            following = response.values[t + 1] if t + 1 < response.length else 0.0
            errors.append(reward + options.gamma * following - response.values[t])
        result.append(discounted(errors, options.gamma * options.gae_lambda))
    return result


def gae(responses: Sequence[Response], options: Options) -> Tokens:
    return whiten(gae_unwhitened(responses, options))


def gae_returns(responses: Sequence[Response], options: Options) -> Tokens:
    """Targets that the critic learns."""
    advantages = gae_unwhitened(responses, options)
    return [[a + v for a, v in zip(row, r.values, strict=True)] for row, r in zip(advantages, responses, strict=True)]


def prime(responses: Sequence[Response], options: Options) -> Tokens:
    outcome, result = rloo(responses, options), []
    for i, response in enumerate(responses):
        others = [other for other in peers(responses, i) if other is not response and other.length]
        baseline = statistics.fmean(statistics.fmean(o.process_rewards) for o in others) if others else 0.0
        process = discounted([p - baseline for p in response.process_rewards], options.gamma)
        result.append([p + o for p, o in zip(process, outcome[i], strict=True)])
    return result


def _doubts(response: Response) -> list[float]:
    """W_t: the squared gradients up to each token."""
    total, result = 0.0, []
    for t in range(response.length):
        square = 1 - 2 * math.exp(response.old_log_probs[t]) + response.probability_squares[t]
        total += square * response.importance_weights[t] ** 2
        result.append(total)
    return result


def optimal_token_baseline(responses: Sequence[Response], options: Options) -> Tokens:
    returns = [discounted(response.rewards, 1.0) for response in responses]
    weights = [_doubts(response) for response in responses]
    result = []
    for i, response in enumerate(responses):
        row = []
        for t in range(response.length):
            long = [j for j, r in enumerate(responses) if r.group == response.group and r.length > t]
            baseline = sum(returns[j][t] * weights[j][t] for j in long) / (sum(weights[j][t] for j in long) + 1e-8)
            row.append(returns[i][t] - (baseline if len(long) > 1 else 0.0))
        result.append(row)
    return result


def distillation(responses: Sequence[Response], options: Options) -> Tokens:
    return [[a - b for a, b in zip(r.teacher_log_probs, r.old_log_probs, strict=True)] for r in responses]


LOOPS: Mapping[str, Callable[[Sequence[Response], Options], Tokens]] = {
    function.__name__: function
    for function in (
        gae,
        grpo,
        rloo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        opo,
        gpg,
        grpo_pass_k,
        gdpo,
        max_rl,
        prime,
        optimal_token_baseline,
        win_rate,
        distillation,
    )
}
