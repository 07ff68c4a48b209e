"""Train a reward model: a value head learns to score the better of two replies higher."""

from functools import partial

from megarl.algorithms import RewardModelObjective
from megarl.algorithms.ragged import Ragged
from megarl.cluster.trainer.batch import Batch
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.run.opening import RunSetup
from megarl.run.preferences import digest_of_pairs, draw_pairs, held_out_metrics, pair_batch, read_pairs
from megarl.run.supervised import Measurement, open_training
from megarl.schema import MegarlConfig
from megatron_ext.packing.packing import RaggedBatch


def train_reward_model(config: MegarlConfig) -> None:
    """Train `config.model` with a scalar value head on the pairs of `config.preference`.

    Writes a HuggingFace folder below `config.output_dir`: a sequence classifier with one label.
    """
    settings = config.preference
    if (setup := RunSetup.unfinished(config, "reward-model")) is None:
        return
    train, held_out = read_pairs(setup)
    batches = draw_pairs(setup, setup.sampler(len(train), digest_of_pairs(train)), train)
    with open_training(setup) as training:
        training.build(head="value")
        training.resume()
        measurement = None
        if held_out:
            measurement = Measurement(partial(_measure, training.trainer, pair_batch(held_out)), settings.eval_every)
        training.learn(batches, RewardModelObjective(), measurement)
        training.export()


def _measure(trainer: TrainerGroup, batch: RaggedBatch) -> dict[str, float]:
    values = Ragged(batch.lengths).at_last_token(trainer.scores(Batch.of(batch)))
    return held_out_metrics(RewardModelObjective(), values, batch)
