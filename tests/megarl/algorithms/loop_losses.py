"""Policy losses token by token, in Python, as the papers write them: what the composed ones are compared with.

Every function takes one response, lists of scalars (the log-probs differentiable, float64), and gives its tokens'
losses; options are those of the algorithm's configuration.
"""

import math

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    return 0 * x + low if x < low else 0 * x + high if x > high else x


def ppo(ratio: Tensor, advantage: float, o: dict) -> Tensor:
    objective = min(ratio * advantage, bounded(ratio, 1 - o["clip_low"], 1 + o["clip_high"]) * advantage)
    if o["dual_clip"] is not None and advantage < 0:
        objective = max(objective, 0 * ratio + o["dual_clip"] * advantage)
    return -objective


def clip(new, old, advantages, reference, chosen, o):
    return [ppo(torch.exp(n - q), a, o) for n, q, a in zip(new, old, advantages, strict=True)]


def gspo(new, old, advantages, reference, chosen, o):
    s = math.exp(sum(n.item() - q for n, q in zip(new, old, strict=True)) / len(new))
    return [ppo(s * n.exp() / math.exp(n.item()), a, o) for n, a in zip(new, advantages, strict=True)]


def cispo(new, old, advantages, reference, chosen, o):
    weights = [
        min(max(math.exp(n.item() - q), 1 - o["clip_low"]), 1 + o["clip_high"]) for n, q in zip(new, old, strict=True)
    ]
    return [-w * a * n for w, a, n in zip(weights, advantages, new, strict=True)]


def gmpo(new, old, advantages, reference, chosen, o):
    logs = []
    for n, q, a in zip(new, old, advantages, strict=True):
        log_ratio, clamped = n - q, bounded(n - q, -o["clip_low"], o["clip_high"])
        logs.append(0 * n if a == 0 else min(log_ratio, clamped) if a > 0 else max(log_ratio, clamped))
    product = torch.exp(sum(logs) / len(logs))
    return [-a * product for a in advantages]


def sapo(new, old, advantages, reference, chosen, o):
    losses = []
    for n, q, a in zip(new, old, advantages, strict=True):
        tau = o["temperature_positive"] if a > 0 else o["temperature_negative"]
        losses.append(-a * sigmoid(tau * (torch.exp(n - q) - 1)) * 4 / tau)
    return losses


def dppo(divergence):
    def loss(new, old, advantages, reference, chosen, o):
        losses = []
        for n, q, a in zip(new, old, advantages, strict=True):
            p, p_old = math.exp(n.item()), math.exp(q)
            far = divergence(p, p_old) > (o["clip_high"] if a > 0 else o["clip_low"])
            outside = far and (p > p_old if a > 0 else p < p_old)
            losses.append(0 * n if outside else -a * min(p / p_old, o["ratio_cap"]) * n)
        return losses

    return loss


def total_variation(p: float, old: float) -> float:
    return abs(p - old)


def binary_kl(p: float, old: float) -> float:
    return old * math.log(old / p) + (1 - old) * math.log((1 - old + 1e-8) / (1 - p + 1e-8))


def clip_cov(new, old, advantages, reference, chosen, o):
    plain = clip(new, old, advantages, reference, chosen, o)
    return [0 * n if c else loss for n, c, loss in zip(new, chosen, plain, strict=True)]


def kl_cov(new, old, advantages, reference, chosen, o):
    losses = []
    for n, q, a, c in zip(new, old, advantages, chosen, strict=True):
        losses.append(-a * torch.exp(n - q) + (o["covariance_kl_coefficient"] * abs(n - q) if c else 0))
    return losses


def policy_gradient(new, old, advantages, reference, chosen, o):
    return [-a * n for n, a in zip(new, advantages, strict=True)]


def dro(new, old, advantages, reference, chosen, o):
    return [-a * n + o["beta"] / 2 * (n - q) ** 2 for n, q, a in zip(new, old, advantages, strict=True)]


def sppo(new, old, advantages, reference, chosen, o):
    moved = sum(n - r for n, r in zip(new, reference, strict=True))
    return [(moved - o["eta"] * a) ** 2 for a in advantages]


LOOPS = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo(total_variation),
    "dppo_kl": dppo(binary_kl),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "policy_gradient": policy_gradient,
    "dro": dro,
    "sppo": sppo,
}
