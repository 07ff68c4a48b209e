"""The names of the metrics: the table that docs/ is made from.

A logger takes any name. A name with <angle brackets> stands for one metric per stage, phase or part.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, logged once per step unless it says otherwise."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "", "mean reward of the step's responses"),
    Metric("reward/std", "", "standard deviation of the rewards over the step's responses"),
    Metric("reward/max", "", "largest reward"),
    Metric("reward/min", "", "smallest reward"),
    Metric("reward/dropped", "responses", "left out because the reward function failed (reward.on_error=drop)"),
    Metric("reward/part/<name>", "", "mean of a number that the reward function gave beside its score"),
    Metric("response_length/mean", "tokens", "mean length of a response, its end token included"),
    Metric("response_length/max", "tokens", "longest response"),
    Metric("response_length/min", "tokens", "shortest response"),
    Metric("response_length/cut_fraction", "", "share of responses that ran into rollout.max_response_tokens"),
    Metric("policy/loss", "", "what the optimizer minimises, all terms and coefficients included"),
    Metric("policy/entropy", "nats", "mean entropy of the policy over the response tokens"),
    Metric("policy/kl_to_reference", "nats", "estimated KL of the policy to the reference model, mean over tokens"),
    Metric("policy/kl_to_old", "nats", "estimated KL of the policy to the one that sampled, mean over tokens"),
    Metric("policy/clip_fraction", "", "share of response tokens whose probability ratio was clipped"),
    Metric("policy/clip_fraction_low", "", "share clipped at 1 - clip_low"),
    Metric("policy/clip_fraction_high", "", "share clipped at 1 + clip_high"),
    Metric("policy/ratio_mean", "", "mean probability ratio of the policy to the one that sampled"),
    Metric("policy/ratio_max", "", "largest such ratio of the step"),
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
    Metric("eval/accuracy", "", "mean score of the greedy responses to the held-out prompts; only where evaluated"),
    Metric("sft/loss", "nats", "mean cross entropy per assistant token (`megarl sft`)"),
    Metric("eval/dropped", "responses", "held-out responses whose reward function failed (reward.on_error=drop)"),
    Metric("sft/token_accuracy", "", "share of assistant tokens that are the most likely ones (`megarl sft`)"),
    Metric("sft/exact_match", "", "share of held-out responses that greedy decoding reproduces (`megarl sft`)"),
)
