"""Direct preference optimization (DPO): from pairs of replies, the policy learns to prefer the chosen one."""

import sys
from dataclasses import fields
from functools import partial

from megarl.algorithms import PreferenceObjective
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.config.lora import without_adapter
from megarl.run.examples import with_ends_of
from megarl.run.opening import RunSetup
from megarl.run.preferences import digest_of_pairs, draw_pairs, held_out_metrics, pair_batch, read_pairs, with_reference
from megarl.run.supervised import Measurement, Training, open_training
from megarl.schema import MegarlConfig
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import RaggedBatch, pack


def dpo(config: MegarlConfig) -> None:
    """Train `config.model` on the pairs of `config.preference`; the reference is the model without any adapter.

    Writes a HuggingFace folder below `config.output_dir`.
    """
    settings = config.preference
    if (setup := RunSetup.unfinished(config, "dpo")) is None:
        return
    train, held_out = read_pairs(setup)
    setup = with_ends_of((reply for pair in train for reply in pair), setup)
    if sentence := without_adapter(config.lora):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    sampler = setup.sampler(len(train), digest_of_pairs(train))
    objective = PreferenceObjective(settings.beta, settings.label_smoothing)
    with open_training(setup) as training:
        batches = draw_pairs(setup, sampler, train, partial(_compared, training))
        training.build(reference=True)
        training.resume()
        measurement = None
        if held_out:
            compared = _compared(training, pair_batch(held_out))
            measurement = Measurement(partial(_measure, training.trainer, compared, objective), settings.eval_every)
        training.learn(batches, objective, measurement)
        training.export()


def _compared(training: Training, batch: RaggedBatch) -> RaggedBatch:
    with training.clock.stage("reference"):
        reference = training.trainer.log_probs(Batch.of(batch), temperature=1.0, reference=True)
    return with_reference(batch, fetch_tensor(reference))


def _measure(trainer: TrainerGroup, batch: RaggedBatch, objective: PreferenceObjective) -> dict[str, float]:
    names = [field.name for field in fields(LogProbs)]
    predictions = trainer.predictions(Batch.of(batch), names, temperature=1.0)
    # Predictions lie at the token they are about; `pack` moves them to the position that predicts it.
    fetched = {name: fetch_tensor(values) for name, values in predictions.items()}
    shifted = pack(batch.with_fields(**fetched), range(len(batch))).fields
    return held_out_metrics(objective, LogProbs(**{name: shifted[name] for name in names}), batch)
