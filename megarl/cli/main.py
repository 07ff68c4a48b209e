"""The `megarl` command; the options of each subcommand are declared in a file of its name, or in `training`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from converters.durable import is_disk_full
from converters.errors import UserError, did_you_mean
from megarl.cli.parser import CommandParser
from megarl.cli.standard_output import discard, open_closed_streams, watched_output
from megarl.cli.training import TRAINING_COMMANDS
from megarl.process.errors import RunFailed, exit_code_of
from megarl.process.own_programs import find_own_programs
from megarl.process.raised_limits import raise_limits
from megarl.process.signals import interruption

COMMANDS = {
    **{name: command.summary for name, command in TRAINING_COMMANDS.items()},
    "config": "the final configuration, and where each value comes from",
    "eval": "accuracy of a HuggingFace folder on held-out prompts",
    "chat": "talk to a HuggingFace folder in the terminal",
    "convert": "HuggingFace folder to Megatron checkpoint, in a stream",
    "export": "Megatron checkpoint to HuggingFace folder, in a stream",
    "inspect": "what a checkpoint is, and whether it is complete",
    "diff": "whether two checkpoints are the same model",
    "verify": "the checksums of a checkpoint",
    "plan": "whether a step fits, how long it takes and what its refit moves, from config.json alone",
    "rehearse": "whether every rank of a job fits into its GPU, without the GPUs",
    "quickstart": "the whole job on a tiny model, in minutes on a CPU",
    "doctor": "what is installed, which device and engine, what would not work and why",
}
EXIT_USER_ERROR = 2


def build_parser() -> CommandParser:
    """Build the parser of the command and all subcommands, without heavy imports."""
    parser = CommandParser(
        prog="megarl",
        description="Megatron-native reinforcement learning for large mixture-of-experts language models.",
        epilog="`megarl COMMAND --help` says what a command takes.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26),
    )
    parser.add_argument("--version", action="version", version=f"megarl {version('megarl')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        training = TRAINING_COMMANDS.get(name)
        module: Any = training or importlib.import_module(f"megarl.cli.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=training.description if training else module.__doc__,
            epilog=training.epilog if training else module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(interrupted="interrupted")
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=name, parser=command, takes_overrides=module.TAKES_OVERRIDES)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    The code is 0; 1 for a finding (see the command), a process that died, or a closed standard output; 2 for bad input;
    130, 143 or 129 after SIGINT (Ctrl-C), SIGTERM or SIGHUP.
    """
    open_closed_streams()
    options = argparse.Namespace(interrupted="interrupted")
    raise_limits()
    find_own_programs()
    with interruption() as ending:
        try:
            with watched_output():
                return _run(arguments, options)
        except KeyboardInterrupt:
            return _fail(options.interrupted, ending.exit_code)
        except Exception as error:
            # A signal may make the code that it interrupts fail with its own error, as the import of numpy does.
            if ending.has_come:
                return _fail(options.interrupted, ending.exit_code)
            if isinstance(error, UserError | RunFailed):
                return _fail(error.sentence, exit_code_of(error), error.details)
            if not is_disk_full(error):
                raise
            where = getattr(error, "filename", None) or "the output folder"
            return _fail(f"the disk is full at {where}: make room, then run again", EXIT_USER_ERROR)


def _run(arguments: Sequence[str] | None, options: argparse.Namespace) -> int:
    """Parse the command line into `options`, and run the command."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        advice = did_you_mean(words[0], COMMANDS) or "; megarl --help lists them"
        raise UserError(f"there is no command {words[0]}{advice}")
    _, rest = build_parser().parse_known_args(arguments, options)
    if rest and not options.takes_overrides:
        if rest[0].startswith("--"):
            raise options.parser.no_option(rest[0])
        raise UserError(f"megarl {options.command} does not take {rest[0]}; see megarl {options.command} --help")
    options.overrides = rest
    _check_current_folder()
    return options.run(options)


def _check_current_folder() -> None:
    """Raise UserError if the current folder is gone, to which paths and libraries refer."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the current folder is not there any more ({error.strerror}): change to one that is, and run again"
        ) from error


def _fail(sentence: str, code: int, details: str = "") -> int:
    try:
        print("\n".join(filter(None, (f"megarl: {' '.join(sentence.split())}", details))), file=sys.stderr, flush=True)
    except OSError:
        # Nobody reads it: the exit code still says what happened.
        discard(sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
