"""The names of the metrics: the table that docs/ is made from.

A logger takes any name. A name with <angle brackets> stands for one metric per stage, phase, part or data source.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, logged once per step unless it says otherwise."""

    name: str
    unit: str
    meaning: str

    def covers(self, name: str) -> bool:
        """Whether `name` is this metric's, or one that its <angle brackets> stand for."""
        parts = re.split(r"<\w+>", self.name)
        return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "", "mean reward of the step's responses"),
    Metric("reward/std", "", "standard deviation of the rewards over the step's responses"),
    Metric("reward/max", "", "largest reward"),
    Metric("reward/min", "", "smallest reward"),
    Metric("reward/source/<name>/mean", "", "mean reward of the responses to the prompts of one data source"),
    Metric("reward/dropped", "responses", "left out because the reward function failed (reward.on_error=drop)"),
    Metric("reward/part/<name>", "", "mean of a number that the reward function gave beside its score"),
    Metric("response_length/mean", "tokens", "mean length of a response, its end token included"),
    Metric("response_length/max", "tokens", "longest response"),
    Metric("response_length/min", "tokens", "shortest response"),
    Metric("response_length/median", "tokens", "half of the responses are no longer"),
    Metric("response_length/p90", "tokens", "nine of ten responses are no longer"),
    Metric("response_length/p99", "tokens", "99 of 100 responses are no longer"),
    Metric("response_length/histogram", "tokens", "all lengths, in equal bins up to rollout.max_response_tokens"),
    Metric("response_length/cut_fraction", "", "share of responses that ran into rollout.max_response_tokens"),
    Metric("groups/no_signal", "", "share of groups whose rewards are all equal: they give no advantage"),
    Metric("groups/all_right", "", "share of groups whose rewards are all above 0.5"),
    Metric("groups/all_wrong", "", "share of groups without a reward above 0.5"),
    Metric("advantage/mean", "", "mean advantage of the trained tokens"),
    Metric("advantage/std", "", "standard deviation of the advantages over the trained tokens"),
    Metric("advantage/max", "", "largest advantage"),
    Metric("advantage/min", "", "smallest advantage"),
    Metric("advantage/positive_fraction", "", "share of trained tokens with an advantage above 0"),
    Metric("advantage/zero_fraction", "", "share of trained tokens whose advantage is exactly 0"),
    Metric("policy/loss", "", "what the optimizer minimises, all terms and coefficients included"),
    Metric("policy/entropy", "nats", "mean entropy of the policy over the response tokens"),
    Metric("policy/kl_to_reference", "nats", "estimated KL of the policy to the reference model, mean over tokens"),
    Metric("policy/kl_to_old", "nats", "estimated KL of the policy to the one that sampled, mean over tokens"),
    Metric("policy/clip_fraction", "", "share of response tokens whose probability ratio was clipped"),
    Metric("policy/clip_fraction_low", "", "share clipped at 1 - clip_low"),
    Metric("policy/clip_fraction_high", "", "share clipped at 1 + clip_high"),
    Metric("policy/ratio_mean", "", "mean probability ratio of the policy to the one that sampled"),
    Metric("policy/ratio_max", "", "largest such ratio of the step"),
    Metric("policy/ratio_histogram", "", "all such ratios, in bins that are finer towards 1"),
    Metric("policy/gradient_norm", "", "norm of the whole gradient before it is clipped"),
    Metric("policy/learning_rate", "", "learning rate of the step's last optimizer step"),
    Metric("log_prob_difference/mean", "nats", "mean |engine - trainer| log-probability of the sampled tokens"),
    Metric("log_prob_difference/max", "nats", "largest such difference of the step"),
    Metric("throughput/tokens_per_s", "tokens/s", "prompt and response tokens of the step by its wall time"),
    Metric("seconds/step", "s", "wall time of the step"),
    Metric(
        "seconds/<stage>",
        "s",
        "wall time of one stage: rollout, reward, advantage, update, refit, evaluate, checkpoint",
    ),
    Metric("seconds/overhead", "s", "wall time of the step outside all stages, logging included"),
    Metric("refit/planned", "", "1 if the step's weights went to the engines by plan, 0 if by name"),
    Metric("refit/bytes", "bytes", "what the refit moved from the ranks to the engines"),
    Metric("refit/repeated", "", "1 if the transfer failed and was made again"),
    Metric("refit/log_prob_difference", "nats", "largest mean of a response in the check of refit.verify=logprobs"),
    Metric("staleness/mean", "versions", "how many versions behind the newest weights a response's oldest token is"),
    Metric("staleness/max", "versions", "the same of the oldest response"),
    Metric(
        "eval/accuracy",
        "",
        "mean reward of the responses to the held-out prompts (one greedy, or loop.eval_samples); only where evaluated",
    ),
    Metric("eval/dropped", "responses", "held-out responses whose reward function failed (reward.on_error=drop)"),
    Metric("eval/cut_fraction", "", "share of held-out responses that ran into rollout.max_response_tokens"),
    Metric("eval/response_length", "tokens", "mean length of a held-out response"),
    Metric("eval/mean_at_<k>", "", "mean@k: mean reward of k = loop.eval_samples responses"),
    Metric("eval/pass_at_<k>", "", "pass@k: chance that at least one of k responses has a reward above 0.5"),
    Metric("eval/majority_at_<k>", "", "majority@k: expected reward of the answer that most of k responses give"),
    Metric("eval/best_at_<k>", "", "best@k: expected reward of the best of k responses"),
    Metric(
        "eval/source/<name>/<metric>", "", "accuracy, or the four above, of one data source where there are several"
    ),
    Metric("warning/<symptom>", "", "1 while the run is warned of it, else 0: see below"),
    Metric("sft/loss", "nats", "mean cross entropy per assistant token (`megarl sft`)"),
    Metric("sft/token_accuracy", "", "share of assistant tokens that are the most likely ones (`megarl sft`)"),
    Metric("sft/exact_match", "", "share of held-out responses that greedy decoding reproduces (`megarl sft`)"),
)


def is_known(name: str) -> bool:
    """Whether a metric of this name is in the table."""
    return any(metric.covers(name) for metric in METRICS)
