"""As much of a job as sampling asks for: engines that answer what a test says, a reward model, ten prompts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import torch

from converters.layouts.megatron import ParallelSizes
from megarl.cluster.colocation import OwnGpus
from megarl.cluster.engines.pending_request import PartialTurns
from megarl.cluster.trainer.batch import fetch_tensor
from megarl.cluster.trainer.cuts import cut_batch, share_of
from megarl.data import Prompt, PromptSampler, Turn
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rollout.protocol import Request
from megarl.run.rollouts import Rollouts, RolloutWorkers
from megarl.run.schedule import Schedule
from megarl.schema import AlgorithmConfig, LoopConfig, MegarlConfig, ScheduleConfig
from megatron_ext.options.options import MegatronOptions

TOKENIZER = make_tokenizer()
# An async one: no process has to start.
NUMBER, WHEN_ALLOWED = (
    f"{Path(__file__).parent / 'reward_functions.py'}:{name}" for name in ("as_number_later", "when_allowed")
)

ON_ONE_RANK = MegatronOptions(ParallelSizes(), torch.float32)


class Answers:
    """Answers the prompt [n] with the texts of place n, the last request first; with 2 where it is greedy."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.calls: list[list[Request]] = []
        self.version: Callable[[], int] = lambda: 0
        self.any_serving = True
        self.answering = Event()
        self.answering.set()

    def begin_generate(
        self, requests: Sequence[Request], partial_turns: Sequence[PartialTurns]
    ) -> list[SimpleNamespace]:
        self.calls.append([request for request, there in zip(requests, partial_turns, strict=True) if not there])
        asked = [SimpleNamespace(request=request, answer=Future()) for request in requests]
        for each, there in zip(asked, partial_turns, strict=True):
            if there:
                each.answer.set_result(list(there.values()))
        left = [each for each in asked if not each.answer.done()]
        answers = reversed(list(zip(left, self.turns([each.request for each in left]), strict=True)))
        Thread(target=self.answer, args=(list(answers),)).start()
        return asked

    def answer(self, answers: Sequence[tuple[SimpleNamespace, list[Turn]]]) -> None:
        assert self.answering.wait(60)
        for each, turns in answers:
            each.answer.set_result(turns)

    def partial_turns(self, asked: Sequence[SimpleNamespace]) -> list[PartialTurns]:
        return [dict(enumerate(each.answer.result())) if each.answer.done() else {} for each in asked]

    def recover(self) -> None:
        pass

    def turns(self, requests: Sequence[Request]) -> Iterator[list[Turn]]:
        for request in requests:
            greedy = request.sampling.temperature == 0
            digits = "2" if greedy else self.texts[request.prompt_token_ids[0]]
            assert len(digits) == request.sampling.samples
            tokens = [TOKENIZER(digit).input_ids for digit in digits]
            yield [Turn.of(request.prompt_token_ids, (one,), (-0.1,), (self.version(),), "stop") for (one,) in tokens]


class Holding(Answers):
    """Answers some prompts only when it may."""

    def __init__(self, *texts: str, held: Sequence[int]) -> None:
        super().__init__(*texts)
        self.held = held
        self.released = Event()

    def answer(self, answers: Sequence[tuple[SimpleNamespace, list[Turn]]]) -> None:
        late = [each for each in answers if each[0].request.prompt_token_ids[0] in self.held]
        super().answer([each for each in answers if each not in late])
        assert self.released.wait(60)
        super().answer(late)


class OfLengths(Answers):
    """Answers the prompt [n] with n tokens more than one."""

    def turns(self, requests: Sequence[Request]) -> Iterator[list[Turn]]:
        for request, turns in zip(requests, super().turns(requests), strict=True):
            (place,) = request.prompt_token_ids
            zeros = TOKENIZER("0").input_ids * place
            yield [
                Turn.of([place], [*zeros, *turn.token_ids.tolist()], [-0.1] * (place + 1), [0] * (place + 1), "stop")
                for turn in turns
            ]


class TenTimesTheToken:
    """A reward model: ten times the digit that a response is."""

    def __init__(self) -> None:
        self.together: list[list[int]] = []

    def scores(self, batch):
        # The controller does this for every call: a batch that cannot be cut reaches no model.
        ((batch, _),) = [share_of(batch, each) for each in cut_batch(batch, ON_ONE_RANK, max_tokens=100)]
        self.together.append(fetch_tensor(batch.tokens).tolist())
        last = fetch_tensor(batch.tokens)[batch.lengths.cumsum() - 1].tolist()
        return torch.tensor([10.0 * float(TOKENIZER.decode(token)) for token in last])


class RecordedGpus(OwnGpus):
    """Notes who is given a turn."""

    are_shared = True

    def __init__(self):
        self.given = []

    def switch_to(self, group):
        self.given.append(group)


def job_of(
    scorer, engines, *, reward_model=None, prompts_per_step=3, schedule=None, gpus=None, extra_info=None, **algorithm
):
    """As much of a job as sampling asks for: ten prompts, drawn in their order."""
    config = MegarlConfig(
        algorithm=AlgorithmConfig(**algorithm),
        loop=LoopConfig(prompts_per_step=prompts_per_step, samples_per_prompt=2),
        schedule=schedule or ScheduleConfig(),
    )
    sampler = PromptSampler(10, shuffle=False, seed=0)
    prompts = [Prompt(index, "any", [index], "truth", extra_info or {}) for index in range(10)]
    schedule = Schedule(prompts_per_step, config.schedule.max_staleness, config.schedule.window)
    engines.version = lambda: schedule.version
    by = RolloutWorkers(engines, scorer, reward_model, gpus or OwnGpus(), TOKENIZER, ())
    rollouts = Rollouts(config, prompts, sampler, schedule, by)
    return SimpleNamespace(config=config, engines=engines, rollouts=rollouts, sampler=sampler)


def sample(job, clock):
    """Batch of a step, which then is trained on."""
    taken = job.rollouts.take(clock)
    job.rollouts.drain()
    job.rollouts.note_refit()
    return taken
