"""The training commands: one table of what each does, and how all of them are run."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.cli.outcome import table
from megarl.cli.recipe import add_megatron_args, base_of, is_scaled, print_config, read_config
from megarl.output.lock import sole_writer
from megarl.output.places import CHECKPOINTS, EXPORT, LOGS, TRAINED_AUXILIARY, models_of
from megarl.process.loading import load
from megarl.process.phase import phase

_SFT_KEYS = "those of the group `sft` are about the data and the length of the run"
_PREFERENCE_KEYS = "those of the group `preference` are about the data and the length of the run"


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains."""

    name: str
    summary: str
    """A few words for the list of commands."""
    does: str
    """One sentence for --help."""
    keys: str
    """The configuration keys that it reads, in words."""
    program: str
    """Module and function that take the configuration; imported once the configuration has been checked."""
    examples: tuple[str, ...]
    """Command lines, without `megarl NAME --config-name`."""
    TAKES_OVERRIDES = True

    @property
    def description(self) -> str:
        """The text of --help before the options."""
        return (
            f"{self.does}\n\n"
            f"Keys of the configuration are given as KEY=VALUE\n({self.keys}).\n"
            "Options of Megatron may also be given as Megatron's own flags: `--tensor-model-parallel-size 8` is\n"
            "`megatron.tensor_model_parallel_size=8`.\n"
        )

    @property
    def epilog(self) -> str:
        """The text of --help after the options."""
        return "".join(["examples:\n", *(f"  megarl {self.name} --config-name {each}\n" for each in self.examples)])

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options; overrides and Megatron's flags are left over."""
        parser.usage = f"megarl {self.name} --config-name NAME [KEY=VALUE ...] [--MEGATRON-FLAG [VALUE] ...]"
        name_help = "recipe: a file of configs/ without .yaml"
        parser.add_argument("--config-name", required=True, metavar="NAME", help=name_help)
        parser.add_argument("--config-dir", metavar="DIR", help="folder of your own recipes, looked in first")
        add_megatron_args(parser)
        parser.add_argument(
            "--print-config", action="store_true", help="print the whole configuration as YAML and stop"
        )

    def run(self, options: argparse.Namespace) -> int:
        """Check the configuration of a command line and run the program with it, or print it."""
        if options.print_config:
            print_config(read_config(options))
            return 0
        with phase("reading the configuration"):
            config = read_config(options)
            if is_scaled(options):
                from megarl.quickstart.scale import family_of, write_inputs

                write_inputs(config, family_of(base_of(options)))
            from megarl.config.input_paths import check_input_paths

            check_input_paths(config, self.name)
            from megarl.config.validate import validate

            validate(config, self.name)
        with sole_writer(Path(config.output_dir)):
            with phase("loading the program"):
                module, _, function = self.program.partition(":")
                program = load(module, function)
                from megarl.doctor.cluster_check import require_sound_nodes
                from megarl.run.resumption import machines_were_fit_with_a_checkpoint, run_with_restarts
            models = [path for _, path in models_of(config)]
            with machines_were_fit_with_a_checkpoint(config):
                require_sound_nodes(config.cluster, [Path(config.output_dir)], models)
                run_with_restarts(program, config)
        print_places(Path(config.output_dir))
        return 0


TRAINING_COMMANDS: Mapping[str, TrainingCommand] = {
    each.name: each
    for each in (
        TrainingCommand(
            "train",
            "reinforcement learning: prompts, rollouts, rewards, updates",
            "Train a policy: rollouts by an inference engine, rewards, advantages, updates by Megatron-core.",
            "Hydra overrides; all of them are in docs/configuration.md",
            "megarl.train:train",
            (
                "grpo_qwen3_moe model.path=/models/Qwen3-30B-A3B data.train_files=[gsm8k.parquet]",
                "grpo_qwen3_moe loop.steps=200 --tensor-model-parallel-size 4 --sequence-parallel",
                "mine --config-dir ~/recipes reward.function=rewards.py:score --lr 1e-6",
                "quickstart model.path=runs/quickstart_qwen3_moe/model --print-config",
            ),
        ),
        TrainingCommand(
            "sft",
            "supervised fine-tuning",
            "Fine-tune a policy on conversations, on the ranks that `megarl train` uses.",
            _SFT_KEYS,
            "megarl.sft:sft",
            (
                "quickstart_sft model.path=model sft.train_files=[a.parquet] \\\n      sft.stop_at_exact_match=null",
                "quickstart_sft model.path=model sft.train_files=[a.parquet] \\\n"
                "      sft.eval_files=[b.parquet] --lr 2e-5",
            ),
        ),
        TrainingCommand(
            "dpo",
            "preferences: the better of two replies (DPO)",
            "Train a policy to prefer the better of two replies (DPO); the weights it begins with are the reference.",
            _PREFERENCE_KEYS,
            "megarl.dpo:dpo",
            (
                "quickstart_dpo model.path=model preference.train_files=[a.parquet] output_dir=runs/dpo",
                "quickstart_dpo model.path=model preference.train_files=[a.parquet] \\\n"
                "      preference.eval_files=[b.parquet] preference.beta=0.05 --lr 5e-7",
            ),
        ),
        TrainingCommand(
            "reward-model",
            "a model that scores replies, from preferences",
            "Train a reward model: the model's layers with a head that gives the better of two replies the higher "
            "score.",
            _PREFERENCE_KEYS,
            "megarl.reward_model:train_reward_model",
            (
                "quickstart_reward_model model.path=model \\\n"
                "      preference.train_files=[a.parquet] output_dir=runs/reward_model",
                "quickstart_reward_model model.path=model \\\n"
                "      preference.train_files=[a.parquet] preference.eval_files=[b.parquet] --lr 1e-5",
            ),
        ),
        TrainingCommand(
            "spin",
            "self-play fine-tuning: replies of people against the policy's own",
            "Fine-tune a policy by self-play (SPIN): it learns to prefer the replies in the data to those of its "
            "earlier self.",
            _PREFERENCE_KEYS,
            "megarl.spin:spin",
            (
                "quickstart_spin model.path=model preference.train_files=[a.parquet] output_dir=runs/spin",
                "quickstart_spin model.path=model preference.train_files=[a.parquet] \\\n"
                "      preference.eval_files=[b.parquet] preference.steps_per_generation=20 --lr 1e-6",
            ),
        ),
    )
}


def print_places(output_dir: Path) -> None:
    """Print the paths of everything that a run wrote."""
    from megarl.tracking.jsonl import FILE_NAME
    from megarl.tracking.services import TensorBoardLogger

    checkpoints = sorted(output_dir.glob(f"{CHECKPOINTS}/iter_???????"))
    places = {
        "model": output_dir / EXPORT,
        **{name: output_dir / name for name in TRAINED_AUXILIARY},
        "checkpoint": checkpoints[-1] if checkpoints else output_dir / CHECKPOINTS,
        "metrics": output_dir / FILE_NAME,
        "tensorboard": output_dir / TensorBoardLogger.FOLDER,
        "logs": output_dir / LOGS,
    }
    print("\n".join(table((name, str(path)) for name, path in places.items() if path.exists())), flush=True)
