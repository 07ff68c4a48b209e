"""Advantages from per-token signals: implicit process rewards, a teacher's log-probs."""

import torch
from torch import Tensor

from megarl.algorithms.advantages.group_rewards import leave_one_out
from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.parts import ZeroToOne
from megarl.algorithms.ragged import Ragged, empty
from megarl.algorithms.recurrence import suffix_sums


def prime(
    scores: Tensor, process_rewards: Tensor, prompts: Groups, responses: Ragged, *, gamma: ZeroToOne = 1.0
) -> Tensor:
    """Leave-one-out advantage of the outcome plus that of the remaining implicit process rewards.

    A_t = sum_(s >= t) gamma^(s-t) (p_s - b_i) + r_i - sum_(j != i) r_j / (n - 1), where p_s = beta log(pi_rm / pi_ref)
    is the process reward of a token and b_i the mean, over the other responses to the prompt, of their mean process
    reward (PRIME, arXiv:2502.01456, equation 5). Responses without trained tokens have no process reward and do not
    enter b_i. This follows the paper; its published code scales p_s by n / (n - 1), includes response i in b_i and
    whitens the sum.
    """
    means, present = responses.mean(process_rewards).double(), (responses.lengths > 0).double()
    others = prompts.spread(prompts.sum(present)) - present
    baselines = (prompts.spread(prompts.sum(means)) - means) / others.clamp(min=1)
    baselines = baselines.to(process_rewards.dtype)

    def centred(tokens: slice) -> Tensor:
        return responses.spread_part(baselines, tokens).neg_().add_(process_rewards[tokens])

    outcomes = leave_one_out(scores, prompts).to(process_rewards.dtype)
    return responses.add_(suffix_sums(centred, responses, gamma), outcomes)


def distillation(teacher_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Advantages from a teacher: A_t = log pi_teacher - log pi_old, the negative k1 estimate of the reverse KL.

    On-policy distillation (arXiv:2306.13649 with the reverse KL and a discount of 0: each token is credited for itself
    alone). Rewards do not enter: they are not in nats, so adding them would hide a coefficient. They are still logged,
    as the measure of what the student learns.
    """
    return torch.sub(teacher_log_probs, old_log_probs, out=empty(len(old_log_probs), old_log_probs))
