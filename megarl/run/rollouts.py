"""Rollouts: prompts are drawn, sampled and scored in the background, and handed to the trainer in batches."""

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from pathlib import Path
from threading import Condition
from typing import Any, Concatenate, NamedTuple, ParamSpec

from transformers import PreTrainedTokenizerBase

from megarl.algorithms import ADVANTAGES, Source
from megarl.cluster.colocation import GpuSharing
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.engines.engine_heartbeats import INTERVAL_S
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.idle_ranks import IdleRanks
from megarl.data import Prompt, PromptGroup, PromptSampler
from megarl.rewards import PendingScores, Scorer
from megarl.run.ages import check_ages
from megarl.run.checkpoint_files import WriteFile
from megarl.run.dropped import Dropped
from megarl.run.in_flight_groups import InFlightGroups
from megarl.run.saved_rollouts import Lengths, SavedRollouts, read_rollouts, save_rollouts
from megarl.run.schedule import Schedule
from megarl.schema import MegarlConfig
from megarl.stages.filtering import check_refills, groups_to_train_on
from megarl.stages.reward import begin_scoring, check_any_scored, with_model_scores, with_outcomes
from megarl.stages.rollout import requests_for, sampling_parameters, with_answers
from megarl.tracking.clock import Clock

P = ParamSpec("P")


class RolloutBatch(NamedTuple):
    """All groups that were sampled for a batch, dropped ones included, and the groups to train on."""

    sampled: list[PromptGroup]
    groups: list[PromptGroup]


@dataclass(frozen=True)
class RolloutWorkers:
    """The engines, reward functions and reward model that turn prompts into scored groups."""

    engines: EngineGroup
    scorer: Scorer
    reward_model: TrainerGroup | None
    gpus: GpuSharing
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    ranks: IdleRanks = field(default_factory=IdleRanks)
    """Trainer ranks that idle meanwhile, watched for deaths."""


def _callback(
    method: Callable[Concatenate["Rollouts", P], None],
) -> Callable[Concatenate["Rollouts", P], None]:
    """Make a method a callback for the threads of engines and rewards: it holds the lock, and `take` raises its error.

    The first of several exceptions is kept.
    """

    @functools.wraps(method)
    def call(self: "Rollouts", *arguments: P.args, **options: P.kwargs) -> None:
        with self._changed:
            try:
                method(self, *arguments, **options)
            except BaseException as failure:  # noqa: BLE001 - `take` raises it
                self._failure = self._failure or failure
            # Waking the waiter at each group, only for it to wait again, would double the cost of a callback.
            if self._failure is not None or self._awaited():
                self._changed.notify_all()

    return call


class Rollouts:
    """Draws prompts as the schedule admits them, has them sampled and scored, and returns batches in schedule order.

    Engines and rewards work on admitted prompts in threads of their own. A schedule without staleness admits prompts
    only in `take`, so nothing is in flight except while the run waits for it.
    """

    def __init__(
        self,
        config: MegarlConfig,
        prompts: Sequence[Prompt],
        sampler: PromptSampler,
        schedule: Schedule,
        workers: RolloutWorkers,
    ) -> None:
        self._config, self._prompts, self._sampler = config, prompts, sampler
        self._schedule, self._workers = schedule, workers
        self._is_ahead = schedule.slots > config.loop.prompts_per_step
        self._changed = Condition()
        self._awaited: Callable[[], bool] = lambda: False
        """The condition that `_wait` waits for."""
        self._failure: BaseException | None = None
        self._in_flight = InFlightGroups(workers.engines)
        """Groups that the reward functions have not scored yet."""
        self._sampled: set[int] = set()
        """Ordinals of groups that are sampled, and neither finished nor dropped yet."""
        self._awaiting_reward_model: dict[int, PromptGroup] = {}
        """Groups that the functions have scored, and the reward model has not."""
        self._finished: dict[int, PromptGroup] = {}
        self._dropped = Dropped()
        self._most_dropped = config.algorithm.max_refills * config.loop.prompts_per_step
        """Limit of dropped groups for one batch."""
        self._taken_metrics: dict[str, float] = {}
        self._lengths = {"sampled": Lengths(), "trained": Lengths()}
        self._resumed: list[int] = []
        """Ordinals of the draws that were being sampled when the state was saved."""

    def take(self, clock: Clock) -> RolloutBatch:
        """Wait for the next batch and return it, with the groups that were dropped for it.

        Raises the error of an engine, a reward or the filter, UserError if too many prompts teach nothing, and
        RuntimeError for a token that is older than the schedule allows.
        """
        with self._changed:
            self._admit()
        while not self._batch_is_ready():
            with self._changed:
                are_sampled = self._next_batch_is_within(self._sampled)
            if not are_sampled:
                self._workers.gpus.switch_to(self._workers.engines)
            with clock.stage("rollout"):
                self._wait(lambda: self._batch_is_ready() or self._next_batch_is_within(self._sampled))
            with clock.stage("reward"):
                self._wait(lambda: self._batch_is_ready() or self._functions_are_done())
                self._score_with_reward_model()
        batch = self._collect_batch()
        if self._workers.gpus.are_shared:
            # No response would make progress while the trainer has the GPUs.
            with clock.stage("rollout"):
                self._drain(self._nothing_in_flight)
        return batch

    def drain(self) -> None:
        """With `schedule.in_flight=wait`, wait until no response of the old weights is in flight.

        On shared GPUs `take` has already waited. If every engine with the old weights has died, the remaining responses
        are sampled with the new weights.
        """
        self._drain(lambda: self._nothing_in_flight() or not self._workers.engines.any_serving)

    def _drain(self, reached: Callable[[], bool]) -> None:
        if self._config.schedule.in_flight == "wait" and not self._nothing_in_flight():
            self._workers.gpus.switch_to(self._workers.engines)
            self._wait(reached)

    def note_refit(self) -> None:
        """Note that the engines have new weights: frees the slots of the batch that was trained on."""
        with self._changed:
            self._schedule.release()
            if self._is_ahead:
                self._admit()

    def save(self, write: WriteFile) -> dict[str, Any]:
        """Pass scored groups and partial samples of the others to `write`; returns the rest of the state.

        Does not wait for anything: a run that resumes from here recomputes rewards that are still being computed.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            finished, awaiting_reward_model = self._finished.copy(), self._awaiting_reward_model.copy()
            dropped, lengths = self._dropped.all, copy.deepcopy(self._lengths)
            # With `wait`, unfinished responses are not saved: the same weights sample the same responses again.
            begun = self._sampled if self._config.schedule.in_flight == "wait" else None
            in_flight = self._in_flight.copy(begun)
            sampler, schedule = self._sampler.state_dict(), self._schedule.state_dict()
        # Outside of the lock: merging responses and a slow disk must not block the threads of rewards and engines.
        rollouts = SavedRollouts(finished, awaiting_reward_model, dropped, in_flight.partials(), lengths)
        return save_rollouts(rollouts, write, self._config, sampler, schedule)

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, under the current schedule, which may differ from the saved one.

        Raises UserError if the schedule has too few slots, or would train on tokens that are older than it allows.
        """
        saved = read_rollouts(folder, state, self._config, self._schedule, self._prompt_of)
        self._lengths |= saved.lengths
        self._finished, self._awaiting_reward_model = dict(saved.finished), dict(saved.awaiting_reward_model)
        self._dropped = Dropped(saved.dropped)
        self._sampled = set(self._awaiting_reward_model)
        self._resumed = [ordinal for ordinal in self._schedule.unfinished if ordinal not in self._sampled]
        self._in_flight.load(saved.partials)

    def metrics(self) -> dict[str, float]:
        """Metrics of the groups in flight, of the groups dropped for the last batch, and of response lengths."""
        with self._changed:
            unfinished, waiting = len(self._schedule.unfinished), len(self._schedule.waiting)
            lengths = {f"schedule/length_{name}": each.mean for name, each in self._lengths.items() if each.responses}
        return {
            "schedule/groups_in_flight": float(unfinished),
            "schedule/groups_waiting": float(waiting),
            **self._taken_metrics,
            **lengths,
        }

    def status_line(self) -> str:
        """Describe how many groups wait for the trainer, and how many are on their way."""
        with self._changed:
            ready, underway = len(self._schedule.waiting), len(self._schedule.unfinished)
        return f"{ready} groups are scored, {underway} on their way"

    def _prompt_of(self, ordinal: int) -> Prompt:
        return self._prompts[self._sampler.index_of(ordinal)]

    def _wait(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached`, restarting dead engines meanwhile; raises failures of callbacks, engines and ranks."""
        while True:
            with self._changed:
                self._awaited = reached
                is_reached = self._changed.wait_for(lambda: self._failure is not None or reached(), timeout=INTERVAL_S)
                if self._failure is not None:
                    raise self._failure
            if is_reached:
                return
            self._workers.engines.recover()
            self._workers.ranks.raise_if_dead()

    def _batch_is_ready(self) -> bool:
        """Whether the next batch is finished, or too many were dropped for it."""
        with self._changed:
            if self._schedule.takeable() is not None:
                return True
            return len(self._dropped) > self._most_dropped and len(self._next()[1]) > self._most_dropped

    def _collect_batch(self) -> RolloutBatch:
        """Take the groups of the ready batch, and the groups that were dropped for it."""
        with self._changed:
            self._check_refills()
            kept = [self._finished.pop(ordinal) for ordinal in self._schedule.take()]
            check_ages(kept, self._schedule.version, self._schedule.staleness_bound)
            dropped = self._dropped.take_before(kept[-1].ordinal)
            for group in kept:
                self._lengths["trained"].count(group)
            unscored = sum(not group.only_scored().trajectories for group in dropped)
            rounds = ceil((len(kept) + len(dropped)) / self._config.loop.prompts_per_step)
            self._taken_metrics = {
                "groups/rounds": float(rounds),
                "schedule/dropped_unscored": float(unscored),
                "schedule/dropped_equal": float(len(dropped) - unscored),
            }
        sampled = sorted([*kept, *dropped], key=lambda group: group.ordinal)
        check_any_scored(sampled)
        return RolloutBatch(sampled, groups_to_train_on(kept, self._config.algorithm))

    def _next(self) -> tuple[list[int], list[PromptGroup]]:
        """Ordinals of the next batch (if it is not ready, the first untaken draws), and its dropped groups so far."""
        wanted = self._config.loop.prompts_per_step
        batch = self._schedule.takeable() or list(islice(self._schedule.untaken, wanted))
        # With fewer untaken draws than a batch, it ends after every draw so far: all dropped groups count for it.
        return batch, self._dropped.before(batch[-1]) if len(batch) == wanted else self._dropped.all

    def _check_refills(self) -> None:
        """Raise UserError if too many groups were dropped for the next batch; counts up to the first over the limit."""
        batch, dropped = self._next()
        if len(dropped) > self._most_dropped:
            dropped = dropped[: self._most_dropped + 1]
            kept = [self._finished[each] for each in batch if each in self._finished and each < dropped[-1].ordinal]
            check_refills(kept, dropped, self._config)

    def _nothing_in_flight(self) -> bool:
        """Whether nothing is in flight, nor can be before the next refit."""
        # With dynamic sampling, a group that is not scored yet may still be dropped and replaced by another draw.
        with self._changed:
            done = self._awaiting_reward_model if self._config.algorithm.dynamic_sampling else self._sampled
            return all(ordinal in done for ordinal in self._schedule.unfinished)

    def _next_batch_is_within(self, ordinals: Collection[int]) -> bool:
        """Whether every group of the next batch is finished or among `ordinals`."""
        return self._schedule.takeable(ordinals) is not None

    def _functions_are_done(self) -> bool:
        """Whether the functions have scored all groups of the next batch, or one of them is not sampled yet."""
        return self._next_batch_is_within(self._awaiting_reward_model) or not self._next_batch_is_within(self._sampled)

    def _admit(self) -> None:
        """Draw prompts for all free slots, but no more than the rest of the run needs, and begin sampling them."""
        schedule, loop = self._schedule, self._config.loop
        resumed, self._resumed = self._resumed, []
        if resumed:
            self._begin([(ordinal, self._sampler.index_of(ordinal)) for ordinal in resumed])
        if len(self._dropped) > self._most_dropped < self._dropped.most_between(schedule.untaken):
            return  # the run ends with the batch that reports them
        held = schedule.slots - schedule.admissible
        needed = (loop.steps - schedule.version) * loop.prompts_per_step - held
        count = min(schedule.admissible, needed)
        if count > 0:
            draws = self._sampler.draw(count)
            schedule.admit([ordinal for ordinal, _ in draws])
            self._begin(draws)

    def _begin(self, draws: Sequence[tuple[int, int]]) -> None:
        """Begin sampling draws, given as pairs of ordinal and prompt index."""
        workers, config = self._workers, self._config
        groups = [PromptGroup(self._prompts[index], ordinal) for ordinal, index in draws]
        sampling = sampling_parameters(config, workers.stop_token_ids, [group.ordinal for group in groups])
        with_baselines = Source.GREEDY_RESPONSES in ADVANTAGES[config.algorithm.advantage].sources
        requests = requests_for(groups, sampling, with_baselines=with_baselines)
        self._in_flight.begin(groups, requests, self._sampled_one)

    @_callback
    def _sampled_one(self, group: PromptGroup, answers: Sequence[Future]) -> None:
        """Begin scoring a group that is sampled."""
        self._sampled.add(group.ordinal)
        complete = with_answers(group, [answer.result() for answer in answers])
        pending = self._workers.scorer.begin()
        begin_scoring(pending, complete, self._workers.tokenizer)
        pending.when_finished(lambda: self._scored_one(complete, pending))

    @_callback
    def _scored_one(self, group: PromptGroup, pending: PendingScores) -> None:
        """Accept or drop a group that the functions have scored, or queue it for the reward model if there is one."""
        self._in_flight.end(group.ordinal)
        self._lengths["sampled"].count(group)
        limit = self._config.rollout.max_response_tokens
        scored = with_outcomes(group, pending.finish(), self._config.reward, limit)
        if self._workers.reward_model is None:
            self._accept_or_drop(scored)
        else:
            self._awaiting_reward_model[group.ordinal] = scored

    def _score_with_reward_model(self) -> None:
        """Add the scores of the reward model, if there is one, and accept or drop the groups."""
        with self._changed:
            groups = [self._awaiting_reward_model.pop(each) for each in self._for_reward_model()]
        # A run resumed without its reward model still has groups that wait for one.
        if groups and self._workers.reward_model is not None:
            self._workers.gpus.switch_to(self._workers.reward_model)
            groups = with_model_scores(groups, self._workers.reward_model, self._config.reward_model.weight)
        with self._changed:
            for group in groups:
                self._accept_or_drop(group)

    def _for_reward_model(self) -> list[int]:
        """Ordinals of the groups that the reward model scores now, in the order of their draws."""
        # How far ahead the engines are depends on timing. With `wait`, results must not: neither which version samples
        # the replacement of a dropped group, nor which groups are scored together, which changes rounding.
        is_one_batch = self._config.schedule.in_flight == "wait"
        scored = self._schedule.takeable(self._awaiting_reward_model) if is_one_batch else self._schedule.untaken
        return [each for each in scored or () if each in self._awaiting_reward_model]

    def _accept_or_drop(self, group: PromptGroup) -> None:
        """Keep a group for a batch, or drop it and admit another draw if it teaches nothing (dynamic sampling)."""
        self._sampled.discard(group.ordinal)
        algorithm, schedule = self._config.algorithm, self._schedule
        if not algorithm.dynamic_sampling or groups_to_train_on([group], algorithm):
            self._finished[group.ordinal] = group
            schedule.finish(group.ordinal)
            return
        self._dropped.add(group)
        schedule.drop(group.ordinal)
        self._admit()
