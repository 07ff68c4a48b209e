"""Self-play fine-tuning (SPIN, arXiv:2401.01335): the policy learns to tell the replies of people from its own.

An iteration has a policy that stays, the opponent: it answers the prompts of conversations, and for some optimizer
steps the policy learns to prefer the replies in the data to these, with the opponent as the reference. Then the policy
is the next opponent. It ends where the two replies are the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from converters.errors import UserError
from megarl.algorithms import PreferenceObjective
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.data import Conversation, PreferencePair, PromptSampler
from megarl.data.sampler import digest_of
from megarl.data.stretches import fetch
from megarl.models.context import check_context
from megarl.process.phase import phase
from megarl.refit.engine_start import EngineStart
from megarl.refit.refit import Refit
from megarl.rollout.protocol import Request
from megarl.run.batches import StepBatch
from megarl.run.examples import read_conversations, with_ends_of
from megarl.run.opening import RunSetup
from megarl.run.preferences import pair_batch, with_reference
from megarl.run.supervised import Measurement, Training, open_training
from megarl.schema import MegarlConfig
from megarl.stages.conversations import exact_match_share
from megarl.stages.rollout import sampling_parameters
from megatron_ext.packing.prefix_tree import SHORTEST_PREFIX


class Exchange(NamedTuple):
    """Prompt for an opponent, and the reply in the data: token ids, the reply with its end token."""

    prompt: list[int]
    reply: list[int]


def spin(config: MegarlConfig) -> None:
    """Train `config.model` on the conversations of `config.preference`, the last reply of each.

    The result is a HuggingFace folder below `config.output_dir`.
    """
    settings = config.preference
    if (setup := RunSetup.unfinished(config, "spin")) is None:
        return
    read = partial(read_conversations, setup, column=settings.messages_column, group="preference")
    train = read(settings.train_files)
    setup = with_ends_of(train, setup)
    exchanges = [last_exchange(conversation) for conversation in train]
    held_out = read(settings.eval_files) if settings.eval_files else []
    check_lengths(exchanges, config)
    check_context(config, (exchange.prompt for exchange in exchanges))
    sampler = setup.sampler(len(exchanges), digest_of(part for exchange in exchanges for part in exchange))
    objective = PreferenceObjective(settings.beta, settings.label_smoothing)
    with open_training(setup, engines=True) as training:
        engines = training.processes.engines()
        engine_start = EngineStart(
            training.trainer, engines, setup.model, config, [exchange.prompt for exchange in exchanges]
        )
        training.build()
        if setup.checkpoint is not None:
            engine_start.compare()
            training.resume()
        with phase("starting the engines"):
            refit = engine_start.finish()
        if setup.checkpoint is not None:
            refit(setup.step)  # the first one is another than those after it, and so are its metrics
        measurement = Measurement(
            lambda: {"spin/exact_match": exact_match_share(training.trainer, held_out)}, settings.eval_every
        )
        batches = setup.batches(sampler, partial(draw_iteration, training, engines, refit, exchanges))
        training.learn(batches, objective, measurement if held_out else None)
        training.export()


def last_exchange(conversation: Conversation) -> Exchange:
    """The last reply of a conversation, and all before it."""
    token_ids, mask = conversation
    end = len(mask) - mask[::-1].index(True)
    begin = end - mask[end - 1 :: -1].index(False)
    return Exchange(token_ids[:begin], token_ids[begin:end])


def pairs_against(exchanges: Sequence[Exchange], replies: Sequence[list[int]]) -> list[PreferencePair]:
    """The reply in the data against the opponent's, where they differ: nothing else can be learned."""
    return [
        PreferencePair(_conversation(exchange.prompt, exchange.reply), _conversation(exchange.prompt, reply))
        for exchange, reply in zip(exchanges, replies, strict=True)
        if exchange.reply != reply
    ]


def _conversation(prompt: list[int], reply: list[int]) -> Conversation:
    return Conversation([*prompt, *reply], [False] * len(prompt) + [True] * len(reply))


def check_lengths(exchanges: Sequence[Exchange], config: MegarlConfig) -> None:
    """Raise UserError if a reply with the longest answer of an opponent beside it has no place in a micro-batch."""
    longest_answer, limit = config.rollout.max_response_tokens, config.loop.max_tokens_per_micro_batch
    longest = max(_tokens_before_answer(exchange, config) for exchange in exchanges) + longest_answer
    if longest > limit:
        raise UserError(
            f"the longest pair of a conversation and an answer of rollout.max_response_tokens={longest_answer} has "
            f"{longest} tokens, more than loop.max_tokens_per_micro_batch={limit}: raise the latter to {longest}, or "
            f"shorten the conversations of preference.train_files"
        )


def _tokens_before_answer(exchange: Exchange, config: MegarlConfig) -> int:
    """Count the tokens that are computed of both replies but for the opponent's own."""
    is_once = config.loop.shared_prefixes and len(exchange.prompt) >= SHORTEST_PREFIX
    return (1 if is_once else 2) * len(exchange.prompt) + len(exchange.reply)


def draw_iteration(
    training: Training,
    engines: EngineGroup,
    refit: Refit,
    exchanges: Sequence[Exchange],
    sampler: PromptSampler,
    step: int,
) -> Iterator[StepBatch]:
    """The batches of pairs of the iteration that begins after `step`; none if the opponent's replies are the data's."""
    config, clock = training.setup.config, training.clock
    settings = config.preference
    with clock.stage("refit"):
        # The version `step` is what the engines of a run that continues there have got already.
        metrics = refit(step + 1)
    with clock.stage("rollout"):
        draws = sampler.draw(settings.pairs_per_step * settings.steps_per_generation)
        drawn, ordinals = [exchanges[index] for _, index in draws], [ordinal for ordinal, _ in draws]
        pairs = pairs_against(drawn, _replies(training, engines, drawn, ordinals))
    if not pairs:
        print(f"after step {step} all {len(drawn)} replies of the policy are those in the data: training ends")
        return
    metrics["spin/equal"] = 1 - len(pairs) / len(drawn)
    # The policy still is the opponent, so its log-probs are the reference's, and no second model is held.
    with clock.stage("reference"):
        batches = [
            with_reference(batch, fetch_tensor(training.trainer.log_probs(Batch.of(batch), temperature=1.0)))
            for batch in map(pair_batch, _shares(pairs, settings.steps_per_generation))
        ]
    for number, batch in enumerate(batches):
        yield StepBatch(batch, metrics if number == 0 else {})


def _shares(pairs: Sequence[PreferencePair], count: int) -> list[Sequence[PreferencePair]]:
    """The pairs in `count` shares of nearly the same size, or in fewer where there are fewer pairs."""
    count = min(count, len(pairs))
    return [pairs[len(pairs) * i // count : len(pairs) * (i + 1) // count] for i in range(count)]


def _replies(
    training: Training, engines: EngineGroup, exchanges: Sequence[Exchange], ordinals: Sequence[int]
) -> list[list[int]]:
    """Replies of the opponent, one to each prompt; `ordinals` are the numbers of their draws."""
    config, stop = training.setup.config, training.setup.model.stop_token_ids
    sampling = sampling_parameters(config, stop, ordinals)
    requests = [
        Request(exchange.prompt, replace(parameters, samples=1))
        for exchange, parameters in zip(exchanges, sampling, strict=True)
    ]
    return [fetch(samples[0].token_ids).tolist() for samples in engines.generate(requests)]
