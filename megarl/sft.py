"""Supervised fine-tuning on the same Megatron engine: packed conversations, loss on what the assistant says."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from converters.errors import UserError
from megarl.algorithms import AGGREGATIONS, exact_matches, sft_objective
from megarl.clock import Clock
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.megatron import megatron_options
from megarl.config.schema import MegarlConfig
from megarl.data import Conversation, PromptSampler, load_conversations
from megarl.job import EXPORT, LOGS, open_tracker_of
from megarl.model import check_layout, read_model
from megarl.stages.update import update
from megatron_ext.packing import RaggedBatch


def sft(config: MegarlConfig) -> None:
    """Fine-tune `config.model` on `config.sft`; the result is a HuggingFace folder below `config.output_dir`."""
    settings = config.sft
    model = read_model(config.model, [])
    options = megatron_options(config)
    check_layout(model.architecture, options)
    max_tokens = config.loop.max_tokens_per_micro_batch
    train = load_conversations(settings.train_files, model.tokenizer, settings.messages_column, max_tokens)
    held_out = (
        load_conversations(settings.eval_files, model.tokenizer, settings.messages_column, max_tokens)
        if settings.eval_files
        else []
    )
    if settings.stop_at_exact_match is not None and not held_out:
        raise UserError("sft.stop_at_exact_match needs held-out conversations: set sft.eval_files")
    export = Path(config.output_dir) / EXPORT
    if export.exists():
        raise UserError(f"{export} exists: remove it or choose another output_dir")
    sampler = PromptSampler(len(train), config.data.shuffle, config.loop.seed)
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        tracker = stack.enter_context(open_tracker_of(config, step=0, last_step=settings.steps))
        logs = Path(config.output_dir) / LOGS
        trainer = stack.enter_context(TrainerGroup(options, config.cluster, logs, max_tokens))
        trainer.start()
        trainer.build(model.folder, model.megatron_checkpoint, settings.steps, reference=False)
        clock = Clock()
        for step in range(1, settings.steps + 1):
            with clock.stage("update"):
                batch = conversation_batch([train[i] for i in sampler.next(settings.sequences_per_step)])
                metrics = update(trainer, [batch], sft_objective, temperature=1.0)
            if held_out and (step % settings.eval_every == 0 or step == settings.steps):
                with clock.stage("evaluate"):
                    metrics["sft/exact_match"] = exact_match_share(trainer, held_out)
            tracker.log(step, metrics | clock.end_step(tokens=len(batch.tokens)))
            if metrics.get("sft/exact_match", 0.0) >= (settings.stop_at_exact_match or 1.1):
                break
        trainer.export(export, model.folder)


def conversation_batch(conversations: Sequence[Conversation]) -> RaggedBatch:
    """Conversations end to end; the field `weights` is that of a mean over all tokens the assistant says."""
    mask = torch.tensor([said for conversation in conversations for said in conversation.mask])
    lengths = torch.tensor([sum(conversation.mask) for conversation in conversations])
    return RaggedBatch(
        tokens=torch.tensor([token for conversation in conversations for token in conversation.token_ids]),
        lengths=torch.tensor([len(conversation.token_ids) for conversation in conversations]),
        fields={"weights": torch.zeros(len(mask)).masked_scatter(mask, AGGREGATIONS["token_mean"](lengths))},
    )


def exact_match_share(trainer: TrainerGroup, conversations: Sequence[Conversation]) -> float:
    """The share of conversations whose assistant tokens greedy decoding would give, one after the other."""
    batch = conversation_batch(conversations)
    predictions = trainer.log_probs(batch, temperature=1.0)
    return float(exact_matches(predictions.greedy, batch.fields["weights"] > 0, batch.lengths).float().mean())
