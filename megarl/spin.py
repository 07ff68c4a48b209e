"""Self-play fine-tuning (SPIN, arXiv:2401.01335): the policy learns to tell human replies from its own.

Each iteration freezes the current policy as the opponent. The opponent answers the prompts of the conversations, and
for `steps_per_generation` optimizer steps the policy learns to prefer the replies in the data to the opponent's, with
the opponent as the reference. The updated policy is the next opponent. Training ends early once all replies of the
opponent are those in the data.
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
from megarl.stages.conversations import held_out_metrics
from megarl.stages.rollout import sampling_parameters
from megatron_ext.packing.prefix_tree import SHORTEST_PREFIX


class Exchange(NamedTuple):
    """A prompt for the opponent and the reply in the data, as token ids; the reply includes its end token."""

    prompt: list[int]
    reply: list[int]


def spin(config: MegarlConfig) -> None:
    """Train `config.model` on the last reply of each conversation of `config.preference`.

    Writes a HuggingFace folder below `config.output_dir`.
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
            # The first refit of a process has other metrics than later ones, which an uninterrupted run would log next.
            refit(setup.step)
        measurement = Measurement(
            lambda: {"spin/exact_match": held_out_metrics(training.trainer, held_out)["exact_match"]},
            settings.eval_every,
        )
        batches = setup.batches(sampler, partial(draw_iteration, training, engines, refit, exchanges))
        training.learn(batches, objective, measurement if held_out else None)
        training.export()


def last_exchange(conversation: Conversation) -> Exchange:
    """Split a conversation into its last reply and everything before it."""
    token_ids, mask = conversation
    end = len(mask) - mask[::-1].index(True)
    begin = end - mask[end - 1 :: -1].index(False)
    return Exchange([*token_ids[:begin]], [*token_ids[begin:end]])


def pairs_against(exchanges: Sequence[Exchange], replies: Sequence[list[int]]) -> list[PreferencePair]:
    """Pair each reply in the data with the opponent's; equal replies are skipped, since they teach nothing."""
    return [
        PreferencePair(_conversation(exchange.prompt, exchange.reply), _conversation(exchange.prompt, reply))
        for exchange, reply in zip(exchanges, replies, strict=True)
        if exchange.reply != reply
    ]


def _conversation(prompt: list[int], reply: list[int]) -> Conversation:
    return Conversation([*prompt, *reply], [False] * len(prompt) + [True] * len(reply))


def check_lengths(exchanges: Sequence[Exchange], config: MegarlConfig) -> None:
    """Raise UserError if the longest pair, a reply in the data and an answer, may not fit into a micro-batch."""
    longest_answer, limit = config.rollout.max_response_tokens, config.loop.max_tokens_per_micro_batch
    longest = max(_tokens_before_answer(exchange, config) for exchange in exchanges) + longest_answer
    if longest > limit:
        raise UserError(
            f"the longest pair of a conversation and an answer of rollout.max_response_tokens={longest_answer} has "
            f"{longest} tokens, more than loop.max_tokens_per_micro_batch={limit}: raise the latter to {longest}, or "
            f"shorten the conversations of preference.train_files"
        )


def _tokens_before_answer(exchange: Exchange, config: MegarlConfig) -> int:
    """Count the tokens a pair costs, without the opponent's answer: a shared prompt is computed once, else twice."""
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
    """Yield the batches of the iteration that begins after `step`; none if all replies of the opponent are the data's.

    The first batch carries the metrics of the iteration.
    """
    config, clock = training.setup.config, training.clock
    settings = config.preference
    with clock.stage("refit"):
        # The engines of a resumed run already hold the weights as version `step`.
        metrics = refit(step + 1)
    with clock.stage("rollout"):
        draws = sampler.draw(settings.pairs_per_step * settings.steps_per_generation)
        drawn, ordinals = [exchanges[index] for _, index in draws], [ordinal for ordinal, _ in draws]
        pairs = pairs_against(drawn, _replies(training, engines, drawn, ordinals))
    if not pairs:
        print(f"after step {step} all {len(drawn)} replies of the policy are those in the data: training ends")
        return
    metrics["spin/equal"] = 1 - len(pairs) / len(drawn)
    # The policy still is the opponent, so its own log-probs are the reference's: no second model is needed.
    with clock.stage("reference"):
        batches = [
            with_reference(batch, fetch_tensor(training.trainer.log_probs(Batch.of(batch), temperature=1.0)))
            for batch in map(pair_batch, _shares(pairs, settings.steps_per_generation))
        ]
    for number, batch in enumerate(batches):
        yield StepBatch(batch, metrics if number == 0 else {})


def _shares(pairs: Sequence[PreferencePair], count: int) -> list[Sequence[PreferencePair]]:
    """Split the pairs into `count` shares of nearly equal size, or into one per pair if there are fewer pairs."""
    count = min(count, len(pairs))
    return [pairs[len(pairs) * i // count : len(pairs) * (i + 1) // count] for i in range(count)]


def _replies(
    training: Training, engines: EngineGroup, exchanges: Sequence[Exchange], ordinals: Sequence[int]
) -> list[list[int]]:
    """Sample one reply of the opponent to each prompt; `ordinals` are the numbers of their draws."""
    config, stop = training.setup.config, training.setup.model.stop_token_ids
    sampling = sampling_parameters(config, stop, ordinals)
    requests = [
        Request(exchange.prompt, replace(parameters, samples=1))
        for exchange, parameters in zip(exchanges, sampling, strict=True)
    ]
    return [fetch(samples[0].token_ids).tolist() for samples in engines.generate(requests)]
