"""The weights that the models of a run begin with, which it must find again when it resumes."""

from collections.abc import Mapping
from typing import NamedTuple

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.examine import weights_digest
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.torch_dist import TorchDistCheckpoint
from megarl.cluster.placement.roles import POLICY
from megarl.config.commands import COMMAND_FACTS
from megarl.models.auxiliary import wanted_auxiliary
from megarl.models.policy import Model
from megarl.run.checkpoints import Checkpoint
from megarl.schema import MegarlConfig

INITIAL_WEIGHTS_STATE = "initial_weights"
"""Key of the digests in the state of a checkpoint."""


class InitialWeights(NamedTuple):
    """The weights that a model begins with, and that are read again at every start."""

    key: str
    """Configuration key of their folder."""
    place: str
    digest: str


def read_initial_weights(config: MegarlConfig, command: str, model: Model) -> dict[str, InitialWeights]:
    """The initial weights of the policy and of a model that keeps its own as a reference, by role."""
    if model.megatron_checkpoint is None:
        key, folder, checkpoint = "model.path", model.folder, HuggingFaceCheckpoint(model.folder)
        policy = InitialWeights(key, str(folder), weights_digest(checkpoint, model.architecture))
    else:
        folder = model.megatron_checkpoint
        digest = weights_digest(TorchDistCheckpoint(folder), model.architecture)
        policy = InitialWeights("model.megatron_checkpoint", str(folder), digest)
    found = {POLICY: policy}
    for role, each in wanted_auxiliary(config).items() if COMMAND_FACTS[command].trains_auxiliary else ():
        if each.keeps_reference:
            digest = weights_digest(HuggingFaceCheckpoint(each.path), read_architecture(read_json(each.path / CONFIG)))
            found[role] = InitialWeights(f"{each.key}.path", str(each.path), digest)
    return found


def check_began_alike(checkpoint: Checkpoint, own: Mapping[str, InitialWeights]) -> None:
    """Raise UserError if the run of the checkpoint began with other weights than this one reads.

    Otherwise its reference, or the model under its adapter, would be another one from here on.
    """
    began = checkpoint.state.get(INITIAL_WEIGHTS_STATE, {})  # checkpoints of earlier versions do not say it
    for role, each in own.items():
        if began.get(role, each.digest) != each.digest:
            raise UserError(
                f"{checkpoint.folder} is of a run that began with other weights than those in {each.key}={each.place}:"
                " set it as it was, or choose another output_dir"
            )
