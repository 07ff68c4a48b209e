"""The training loop: prompts, trajectories, rewards, advantages, update, refit."""

from contextlib import ExitStack
from functools import partial

from megarl.diagnostics import advantage_metrics, group_metrics, response_metrics
from megarl.process.phase import phase
from megarl.process.signals import asked_to_stop
from megarl.run.job import Job, is_finished, open_job
from megarl.schema import MegarlConfig
from megarl.stages.advantage import Prepared, advantage, comparable, ragged_batch
from megarl.stages.evaluate import evaluate
from megarl.stages.gather import Gathered, gather
from megarl.stages.predictions import with_predictions
from megarl.stages.reward import Scoring, reward_metrics
from megarl.stages.rollout import sampling_parameters
from megarl.stages.sample import Experience, sample, with_model_scores
from megarl.stages.update import update_critic, update_implicit_reward_model, update_policy
from megarl.tracking import MetricValue
from megarl.tracking.clock import Clock
from megarl.tracking.histogram import numbers


def train(config: MegarlConfig) -> None:
    """Run the main job to its last step.

    Everything it writes lies below `config.output_dir`: metrics, checkpoints, and the trained model in `huggingface`.
    """
    if is_finished(config):
        print(f"all {config.loop.steps} steps are done; raise loop.steps to go on from the last one", flush=True)
        return
    with ExitStack() as at_end, open_job(config) as job:
        with phase("first refit"):
            job.refit(job.state.step)
        print(f"refit: {job.refit.description}", flush=True)
        if job.state.step == 0 and config.loop.eval_at_start and job.task.eval_prompts:
            job.log(_evaluate(job))
        _take_steps(job)
        with phase("writing the trained model"):
            job.export()
        at_end.enter_context(phase("ending the processes"))


def _take_steps(job: Job) -> None:
    """Step after step to the last one, or to the one in which the run is told to end; saved where that is due."""
    config, clock = job.config, Clock()
    with asked_to_stop(waits=config.checkpoint.on_signal) as stop:
        while job.state.step < config.loop.steps:
            # Logged, then saved: a resumed run cuts off lines that are too many, but cannot write one that is missing.
            job.log(train_step(job, clock))
            is_last = bool(stop)
            if is_last or _due(job.state.step, config.checkpoint.every, config.loop.steps):
                with clock.stage("checkpoint"):
                    job.save()
            if is_last:
                break


def train_step(job: Job, clock: Clock) -> dict[str, MetricValue]:
    """Train on samples of the present version of the weights, which makes the next version."""
    config, state = job.config, job.state
    version = state.step

    gathered = gather(partial(_rollout_and_reward, job, clock), config)
    trajectories = comparable(gathered.trajectories, config.algorithm)
    with clock.stage("advantage"):
        batch = ragged_batch(trajectories, config.algorithm)
        batch = with_predictions(batch, trajectories, job.trainer, job.companions, job.objective, config)
        prepared = advantage(trajectories, batch, config, kl_coefficient=state.kl.coefficient)
    with clock.stage("update"):
        updated = _update(job, prepared)
    with clock.stage("refit"):
        state.step = version + 1
        refitted = job.refit(state.step)

    metrics = {**updated, **refitted, **_dynamics(gathered, prepared, version, config)}
    if job.task.eval_prompts and _due(state.step, config.loop.eval_every, config.loop.steps):
        with clock.stage("evaluate"):
            metrics |= _evaluate(job)
    return metrics | clock.end_step(tokens=len(batch.tokens))


def _rollout_and_reward(job: Job, clock: Clock, count: int, refill: int) -> Experience:
    """Scored responses to the next `count` prompts, for the first time in this step or again."""
    config, reward_model = job.config, job.companions.reward_model
    add_scores = None
    if reward_model is not None:
        add_scores = partial(with_model_scores, model=reward_model, weight=config.reward_model.weight)
    return sample(
        job.engines,
        Scoring(job.scorer, job.model.tokenizer, max_response_tokens=config.rollout.max_response_tokens),
        [job.task.prompts[index] for index in job.state.sampler.next(count)],
        sampling_parameters(config, job.model.stop_token_ids, job.state.step, count=count, refill=refill),
        clock,
        with_baselines=job.needs("baseline_rewards"),
        add_scores=add_scores,
    )


def _update(job: Job, prepared: Prepared) -> dict[str, MetricValue]:
    """The optimizer steps of all models that learn."""
    config, state, companions = job.config, job.state, job.companions
    metrics: dict[str, MetricValue] = {}
    if companions.critic:
        metrics |= update_critic(companions.critic, prepared.batches, config)
    if companions.implicit_reward_model:
        metrics |= update_implicit_reward_model(companions.implicit_reward_model, prepared.batches, config)
    if companions.critic and state.step < config.critic.warmup_steps:
        return metrics
    objective = job.objective.with_kl_coefficient(state.kl.coefficient)
    metrics |= update_policy(
        job.trainer,
        prepared.batches,
        objective,
        temperature=config.rollout.temperature,
        seed=(config.loop.seed, state.step),
    )
    if prepared.kl_to_teachers is not None:
        metrics["distillation/kl"] = prepared.kl_to_teachers
    if prepared.kl is not None:
        metrics["policy/kl_to_reference"] = prepared.kl
    if (kl := numbers(metrics).get("policy/kl_to_reference")) is not None:
        metrics["policy/kl_coefficient"] = state.kl.coefficient
        state.kl.update(kl, len(prepared.responses))
    refresh = config.algorithm.refresh_reference_every
    if refresh and (state.step + 1) % refresh == 0:
        job.trainer.refresh_reference()
    return metrics


def _dynamics(gathered: Gathered, prepared: Prepared, version: int, config: MegarlConfig) -> dict[str, MetricValue]:
    experience = gathered.experience
    rewards, groups = zip(*((t.reward, t.group) for t in experience.scored), strict=True)
    return {
        **response_metrics(experience.sampled, version, config.rollout.max_response_tokens),
        **reward_metrics(experience.scored, experience.failed + experience.timed_out, experience.timed_out),
        **group_metrics(rewards, groups),
        **advantage_metrics(prepared.advantages.numpy(), prepared.responses.lengths.numpy()),
        "groups/rollouts": float(gathered.rollouts),
        "groups/left_out": gathered.left_out,
    }


def _evaluate(job: Job) -> dict[str, float]:
    loop = job.config.loop
    return evaluate(
        job.engines,
        job.task.eval_prompts,
        job.scorer,
        job.model.tokenizer,
        max_tokens=job.config.rollout.max_response_tokens,
        stop_token_ids=job.model.stop_token_ids,
        samples=loop.eval_samples,
        temperature=loop.eval_temperature,
        seed=loop.seed,
    )


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
