"""Supervised fine-tuning on the ranks of `megarl train`: packed conversations, loss on the assistant's tokens only."""

from collections.abc import Sequence
from functools import partial

from converters.errors import UserError
from megarl.algorithms import SftObjective
from megarl.data import Conversation, PromptSampler
from megarl.data.sampler import digest_of
from megarl.run.batches import StepBatch
from megarl.run.examples import read_conversations, with_ends_of
from megarl.run.opening import RunSetup
from megarl.run.supervised import Measurement, open_training
from megarl.schema import MegarlConfig
from megarl.stages.conversations import conversation_batch, held_out_metrics


def sft(config: MegarlConfig) -> None:
    """Fine-tune `config.model` on `config.sft` and write a HuggingFace folder below `config.output_dir`."""
    settings = config.sft
    if (setup := RunSetup.unfinished(config, "sft")) is None:
        return
    read = partial(read_conversations, setup, column=settings.messages_column, group="sft")
    train = read(settings.train_files)
    setup = with_ends_of(train, setup)
    held_out = read(settings.eval_files) if settings.eval_files else []
    enough = settings.stop_at_exact_match
    if enough is not None and not held_out:
        raise UserError("sft.stop_at_exact_match needs held-out conversations: set sft.eval_files")
    sampler = setup.sampler(len(train), digest_of(conversation.token_ids for conversation in train))
    batches = setup.batches(sampler, lambda sampler, _: [_draw(sampler, train, config)])
    with open_training(setup) as training:
        training.build()
        training.resume()
        measurement = Measurement(
            lambda: {f"sft/{name}": value for name, value in held_out_metrics(training.trainer, held_out).items()},
            settings.eval_every,
            lambda metrics: enough is not None and metrics.get("sft/exact_match", -1.0) >= enough,
        )
        training.learn(batches, SftObjective(), measurement if held_out else None)
        training.export()


def _draw(sampler: PromptSampler, train: Sequence[Conversation], config: MegarlConfig) -> StepBatch:
    drawn = sampler.next(config.sft.sequences_per_step)
    return StepBatch(conversation_batch([train[index] for index in drawn], "token_mean"))
