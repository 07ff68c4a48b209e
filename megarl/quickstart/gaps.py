"""Log-prob gaps between fresh engines and the trainer on the exported weights, by the engines' weight format."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megarl.cluster.placement.roles import POLICY
from megarl.config.megatron import megatron_options
from megarl.data import Turn
from megarl.refit.log_prob_check import log_prob_differences
from megarl.run.opening import open_processes
from megarl.schema import MegarlConfig


def log_prob_gaps(
    job: MegarlConfig, export: Path, sampled: Mapping[str, Sequence[tuple[list[int], Turn]]]
) -> dict[str, float]:
    """Mean |engine - trainer| of the log-probs of sampled tokens, in nats, by the engine's weight format.

    The trainer has the parallel layout of `job` and the weights of `export`, as the engines had that `sampled`.
    """
    options = megatron_options(job)
    with open_processes(job, {POLICY: options}, engines=False) as processes:
        trainer = processes.trainer(options)
        trainer.start()
        trainer.build_frozen(export)
        differences = {
            held_in: log_prob_differences(trainer, answered, temperature=job.rollout.temperature)
            for held_in, answered in sampled.items()
        }
    return {held_in: torch.cat(each).mean().item() for held_in, each in differences.items()}
