"""The training loop: prompts, trajectories, rewards, advantages, update, refit."""

from megarl.clock import Clock
from megarl.config.schema import MegarlConfig
from megarl.job import Job, open_job
from megarl.stages.advantage import advantage
from megarl.stages.evaluate import evaluate
from megarl.stages.reward import reward, reward_metrics
from megarl.stages.rollout import response_metrics, rollout, sampling_parameters
from megarl.stages.update import update


def train(config: MegarlConfig) -> None:
    """Run the main job to its last step.

    Everything it writes lies below `config.output_dir`: metrics, checkpoints, and the trained model in `huggingface`.
    """
    with open_job(config) as job:
        job.refit(job.state.step)
        print(f"refit: {job.refit.description}", flush=True)
        if job.state.step == 0 and config.loop.eval_at_start and job.task.eval_prompts:
            job.log(_evaluate(job))
        clock = Clock()
        while job.state.step < config.loop.steps:
            # Logged, then saved: a resumed run cuts off lines that are too many, but cannot write one that is missing.
            job.log(train_step(job, clock))
            if _due(job.state.step, config.checkpoint.every, config.loop.steps):
                with clock.stage("checkpoint"):
                    job.save()
        job.export()


def train_step(job: Job, clock: Clock) -> dict[str, float]:
    """What the present version of the weights samples makes the next version."""
    config, task, state = job.config, job.task, job.state
    temperature, version = config.rollout.temperature, state.step

    with clock.stage("rollout"):
        prompts = [task.prompts[index] for index in state.sampler.next(config.loop.prompts_per_step)]
        sampling = sampling_parameters(config, job.model.stop_token_ids, version, count=len(prompts))
        trajectories = rollout(job.engines, prompts, sampling)
    with clock.stage("reward"):
        scored = reward(task.reward, trajectories, job.model.tokenizer, config.reward)
    with clock.stage("advantage"):
        batches = advantage(scored, job.trainer, config.algorithm, temperature=temperature)
    with clock.stage("update"):
        metrics = update(job.trainer, batches, job.objective, temperature=temperature)
    with clock.stage("refit"):
        state.step = version + 1
        metrics |= job.refit(state.step)

    metrics |= response_metrics(trajectories, version)
    metrics |= reward_metrics(scored, dropped=len(trajectories) - len(scored))
    if task.eval_prompts and _due(state.step, config.loop.eval_every, config.loop.steps):
        with clock.stage("evaluate"):
            metrics |= _evaluate(job)
    return metrics | clock.end_step(tokens=sum(len(batch.tokens) for batch in batches))


def _evaluate(job: Job) -> dict[str, float]:
    return evaluate(
        job.engines,
        job.task.eval_prompts,
        job.task.reward,
        job.model.tokenizer,
        job.config.reward,
        max_tokens=job.config.rollout.max_response_tokens,
        stop_token_ids=job.model.stop_token_ids,
    )


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
