"""The RL training loop: rollout, rewards, advantages, policy update, refit."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from megarl.cluster.trainer.batch import Batch
from megarl.process.phase import phase
from megarl.run.job import Job, open_job
from megarl.run.opening import RunSetup
from megarl.run.steps import run_steps
from megarl.schema import MegarlConfig
from megarl.stages.advantage import kl_in_reward, with_advantages
from megarl.stages.batch import mini_batches, to_batch
from megarl.stages.evaluate import EvalSettings, evaluate, evaluates_after
from megarl.stages.filtering import without_small_groups
from megarl.stages.metrics import step_metrics
from megarl.stages.model_outputs import with_model_outputs
from megarl.stages.router_replay import replay_gaps
from megarl.stages.staleness import with_staleness
from megarl.stages.update import update_critic, update_implicit_reward_model, update_policy
from megarl.tracking import MetricValue
from megarl.tracking.clock import Clock
from megarl.tracking.progress_lines import progress_lines

_LONG_S = 60.0
"""Longer steps print a progress line at this interval."""


def train(config: MegarlConfig) -> None:
    """Train the policy of `config` to its last step, resuming from the newest checkpoint if there is one.

    Writes everything below `config.output_dir`: metrics, checkpoints, and the trained model in `huggingface`.
    """
    if (setup := RunSetup.unfinished(config, "train")) is None:
        return
    with ExitStack() as at_end, open_job(setup) as job:
        with phase("first refit"):
            job.refit(job.state.step)
        print(f"refit: {job.refit.description}", flush=True)
        if job.state.step == 0 and config.loop.eval_at_start and job.data.eval_prompts:
            job.log(_evaluate(job))
        job.begin_steps()
        clock = Clock()
        with progress_lines(partial(_status_line, job, clock), _LONG_S):
            run_steps(job, clock, take_step=partial(train_step, job, clock), save=job.save)
        with phase("writing the trained model"):
            job.export()
        # Closed after `open_job`, so that it times how long the processes take to end.
        at_end.enter_context(phase("ending the processes"))


def _status_line(job: Job, clock: Clock) -> str:
    """Describe the running step, or return "" if it has taken less than `_LONG_S`."""
    present = clock.status_line(longer_than_s=_LONG_S)
    return present and f"step {job.state.step + 1}: {present}; {job.rollouts.status_line()}"


def train_step(job: Job, clock: Clock) -> dict[str, MetricValue]:
    """Train version v of the weights on one step of rollouts and refit the engines with version v + 1.

    Rollout and reward run concurrently in threads of `job.rollouts` (`run/rollouts.py`), which hands over scored
    groups. Returns the metrics of the step.
    """
    config, algorithm, state = job.config, job.config.algorithm, job.state
    version = state.step

    taken = job.rollouts.take(clock)

    job.gpus.switch_to(job.trainer)
    with clock.stage("log_probs"):
        groups = without_small_groups(taken.groups, algorithm)
        batch = job.trainer.place(to_batch(groups, algorithm))
        gaps = replay_gaps(batch, groups, job.trainer, version=version, temperature=config.rollout.temperature)
        batch = with_model_outputs(batch, groups, job.trainer, job.auxiliary, job.objective, config)

    with clock.stage("advantage"):
        kl = kl_in_reward(batch, job.objective)
        batch = with_advantages(batch, groups, config, kl=kl, kl_coefficient=state.kl.coefficient)
        batch = with_staleness(batch, groups, version, config)
        batches = mini_batches(batch, groups, config)

    with clock.stage("update"):
        job.refit.mark_outdated()
        metrics = _update_auxiliary(job, batches)
        if _policy_learns(job):
            metrics |= _update_policy(job, batches, len(batch), kl)

    with clock.stage("rollout"):
        job.rollouts.drain()
    with clock.stage("refit"):
        state.step = version + 1
        metrics |= job.refit(state.step)
    job.rollouts.note_refit()

    metrics |= job.rollouts.metrics() | gaps
    metrics |= step_metrics(taken.sampled, groups, batch, version, config)
    if job.data.eval_prompts and evaluates_after(state.step, config.loop):
        with clock.stage("evaluate"):
            metrics |= _evaluate(job)
    return metrics | _end_step(job, clock, batch.total_tokens)


def _end_step(job: Job, clock: Clock, tokens: int) -> dict[str, MetricValue]:
    """End the step and return the metrics of its processes and times; it trained on `tokens` tokens."""
    of_processes = job.gpus.end_step() | job.engines.end_step() | job.checkpoints.take_metrics()
    return {**of_processes, **job.throughput.end_step(clock.end_step(tokens=tokens))}


def _update_auxiliary(job: Job, batches: Sequence[Batch]) -> dict[str, MetricValue]:
    """Run the optimizer steps of the critic and of the implicit reward model, if there are any."""
    metrics: dict[str, MetricValue] = {}
    if job.auxiliary.critic:
        metrics |= update_critic(job.auxiliary.critic, batches, job.config)
    if job.auxiliary.implicit_reward_model:
        metrics |= update_implicit_reward_model(job.auxiliary.implicit_reward_model, batches, job.config)
    return metrics


def _policy_learns(job: Job) -> bool:
    """Whether the policy is trained in this step: it is not while the critic warms up."""
    return not job.auxiliary.critic or job.state.step >= job.config.critic.warmup_steps


def _update_policy(job: Job, batches: Sequence[Batch], responses: int, kl: Tensor | None) -> dict[str, MetricValue]:
    """Run the optimizer steps of the policy, then adapt the KL coefficient and refresh the reference when due.

    `kl` is the KL to the reference at each trained token if it is part of the reward, else None.
    """
    config, state = job.config, job.state
    objective = job.objective.with_kl_coefficient(state.kl.coefficient)
    seed = (config.loop.seed, state.step)
    metrics, kl_in_loss = update_policy(
        job.trainer, batches, objective, temperature=config.rollout.temperature, seed=seed
    )
    metrics |= _control_kl(job, kl_in_loss if kl is None else float(kl.mean()), responses)
    refresh = config.algorithm.refresh_reference_every
    if refresh and (state.step + 1) % refresh == 0:
        job.trainer.refresh_reference()
    return metrics


def _control_kl(job: Job, kl: float | None, responses: int) -> dict[str, MetricValue]:
    """Adapt the KL coefficient to `kl`, the mean of the step, and return both; {} if the run has no KL."""
    if kl is None:
        return {}
    coefficient = job.state.kl.coefficient
    job.state.kl.update(kl, responses)
    return {"policy/kl_to_reference": kl, "policy/kl_coefficient": coefficient}


def _evaluate(job: Job) -> dict[str, float]:
    settings = EvalSettings.of(job.config, job.model.stop_token_ids)
    job.gpus.switch_to(job.engines)
    return evaluate(job.engines, job.data.eval_prompts, job.scorer, job.model.tokenizer, settings)
