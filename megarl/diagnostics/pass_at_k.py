"""Quality of several responses per prompt: pass@k, mean@k, majority@k and best@k, from n samples each."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

import numpy as np

from megarl.diagnostics.step import RIGHT_ABOVE


@dataclass(frozen=True)
class Answers:
    """The scored responses to one prompt in sampling order; at least one."""

    data_source: str
    texts: Sequence[str]
    """The extracted answer of each response; equal texts are votes for the same answer."""
    rewards: Sequence[float]


def pass_at(answers: Answers, k: int) -> float:
    """The probability that at least one of k responses is right.

    Unbiased, from n >= k samples of which c have a reward above RIGHT_ABOVE: 1 - C(n - c, k) / C(n, k)
    (arXiv:2107.03374, eq. 1).
    """
    wrong = sum(reward <= RIGHT_ABOVE for reward in answers.rewards)
    return 1 - comb(wrong, k) / comb(len(answers.rewards), k)


def best_at(answers: Answers, k: int) -> float:
    """The expected reward of the best of k responses (best-of-n with a perfect judge).

    Unbiased, from n >= k samples with the rewards r_1 <= ... <= r_n: sum_i r_i C(i - 1, k - 1) / C(n, k), because r_i
    is the largest reward in C(i - 1, k - 1) of the subsets of size k.
    """
    rewards = sorted(answers.rewards)
    choices = comb(len(rewards), k)
    return sum(reward * (comb(place, k - 1) / choices) for place, reward in enumerate(rewards))


def majority_at(answers: Answers, k: int) -> float:
    """The expected reward of the most frequent answer among k responses.

    Unbiased: the mean over the n // k blocks of k consecutive samples. An answer's reward is the mean over its
    responses; tied answers count by their mean.
    """
    blocks = range(0, len(answers.rewards) - k + 1, k)
    return float(np.mean([_winner(answers.texts[i : i + k], answers.rewards[i : i + k]) for i in blocks]))


def _winner(texts: Sequence[str], rewards: Sequence[float]) -> float:
    votes = Counter(texts)
    most = max(votes.values())
    means = [
        np.mean([reward for text, reward in zip(texts, rewards, strict=True) if text == answer])
        for answer, count in votes.items()
        if count == most
    ]
    return float(np.mean(means))


ESTIMATES: Mapping[str, Callable[[Answers, int], float]] = {
    "pass": pass_at,
    "majority": majority_at,
    "best": best_at,
}
"""Name -> estimator for a given k."""


def validation_metrics(answers: Sequence[Answers], samples: int) -> dict[str, float]:
    """The mean over prompts of each estimate, as "<estimate>_at_<k>", for each k of `powers_of_two`.

    The mean reward does not depend on k, so it appears once, as "mean_at_<samples>" and "accuracy". Prompts with fewer
    than k scored responses are left out of the estimates for k, which are omitted if no prompt has enough.
    """
    accuracy = _accuracy(answers)
    means = {f"mean_at_{samples}": accuracy}
    for k in powers_of_two(samples):
        enough = [each for each in answers if len(each.rewards) >= k]
        if enough:
            means |= {
                f"{name}_at_{k}": float(np.mean([f(each, k) for each in enough])) for name, f in ESTIMATES.items()
            }
    return means | {"accuracy": accuracy}


def _accuracy(answers: Sequence[Answers]) -> float:
    """The mean over prompts of the mean reward of their responses."""
    return fmean(fmean(each.rewards) for each in answers)


def by_source(answers: Sequence[Answers], samples: int) -> dict[str, float]:
    """`validation_metrics` overall and per source, as in `for_each_source`."""
    return for_each_source(answers, lambda found: validation_metrics(found, samples))


def accuracy_by_source(answers: Sequence[Answers]) -> dict[str, float]:
    """Only the accuracy of `validation_metrics`, overall and per source, as in `for_each_source`."""
    return for_each_source(answers, lambda found: {"accuracy": _accuracy(found)})


def for_each_source(
    answers: Sequence[Answers], measure: Callable[[Sequence[Answers]], dict[str, float]]
) -> dict[str, float]:
    """Metrics of all answers and, if there are several data sources, of each as "source/<data_source>/...".

    `answers` must not be empty.
    """
    sources: dict[str, list[Answers]] = defaultdict(list)
    for each in answers:
        sources[each.data_source].append(each)
    metrics = measure(answers)
    if len(sources) > 1:
        for source, found in sources.items():
            metrics |= {f"source/{source}/{name}": value for name, value in measure(found).items()}
    return metrics


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... and `last` itself."""
    return [2**power for power in range(last.bit_length()) if 2**power < last] + [last]
