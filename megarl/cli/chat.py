"""Chat with a model in the terminal: an engine loads a HuggingFace folder and answers token by token.

Answers are greedy unless --temperature is given. Ctrl-C stops an answer; /reset clears the conversation; /quit or
Ctrl-D ends. If stdin is not a terminal, all of it is one question, and only the answer goes to stdout. A model whose
tokenizer has no chat template continues the text that is typed. Other configuration keys are given as KEY=VALUE.
"""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from converters.errors import UserError, names_as_given
from megarl.cli import recipe
from megarl.cli.model_folder import refuse_checkpoint

if TYPE_CHECKING:
    from megarl.chat import Chat

EXAMPLES = """examples:
  megarl chat --model runs/quickstart_qwen3_moe/huggingface
  echo '12+34=' | megarl chat --model runs/quickstart_qwen3_moe/huggingface
  megarl chat --model Qwen3-30B-A3B --temperature 0.6 rollout.top_p=0.95 rollout.engine_args.tensor_parallel_size=4
"""
TAKES_OVERRIDES = True
LOGS_HELP = "where the engine's log goes (default: runs/chat; runs/chat-2 while that is in use)"

_KEYS = {"--model": "model.path", "--max-tokens": "rollout.max_response_tokens", "--output-dir": "output_dir"}
"""Option -> the configuration key that it sets."""
_COMMANDS = {"/reset": "forget what was said", "/quit": "end"}
_HINT = "Ctrl-C stops an answer; " + "; ".join(f"{name}: {does}" for name, does in _COMMANDS.items())
_BREAKS = {ord(character): character for character in "\n\t"}
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | _BREAKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "megarl chat --model DIR [options] [KEY=VALUE ...]"
    parser.add_argument("--model", required=True, metavar="DIR", help="HuggingFace folder")
    parser.add_argument("--system", metavar="TEXT", help="system message, which stands before all that is said")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: 1024)")
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        help=LOGS_HELP,
    )


def overrides_of(options: argparse.Namespace) -> list[str]:
    """The command line as overrides of the recipe `chat`."""
    return [*recipe.named_overrides(options, _KEYS), *options.overrides, "rollout.replicas=1"]


def run(options: argparse.Namespace) -> int:
    """Answer what is typed, or what is on stdin."""
    with names_as_given({key: option for option, key in _KEYS.items()}):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from megarl.config.compose import compose
    from megarl.config.input_paths import check_input_paths

    recipe.refuse_flags(options)
    if not 0 <= options.temperature < math.inf:
        raise UserError(f"--temperature {options.temperature} must be a number of at least 0")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UserError(f"--max-tokens {options.max_tokens} is too small: it must be at least 1")
    refuse_checkpoint(Path(options.model))
    config = compose("chat", overrides_of(options))
    check_input_paths(config, "chat")
    from megarl.config.validate import validate

    validate(config, "chat")
    # Read first: loading a large model takes minutes.
    question = None if sys.stdin.isatty() and sys.stdout.isatty() else question_on_stdin()
    if sys.stderr.isatty():
        print(f"loading {options.model}", file=sys.stderr, flush=True)
    from megarl.chat import open_chat

    with (
        recipe.folder_of_its_own(config, options) as folder,
        open_chat(replace(config, output_dir=str(folder)), options.system, options.temperature) as chat,
    ):
        if not chat.conversation.has_template:
            print(f"megarl: {options.model} has no chat template: it continues what it is given", file=sys.stderr)
        if question is None:
            talk(chat)
        else:
            reply(chat, question)
    return 0


def question_on_stdin() -> str:
    """Read all of stdin. Raises UserError if there is nothing, or no text."""
    try:
        question = sys.stdin.read().removesuffix("\n")
        question.encode()  # in some locales, bytes that are no text are read as halves of characters
    except UnicodeError as error:
        raise UserError("what is on stdin is not text in UTF-8: pipe a question to megarl chat") from error
    if not question:
        raise UserError("there is no question on stdin: pipe one to megarl chat, or start it in a terminal")
    return question


def reply(chat: "Chat", question: str) -> None:
    """Answer one question."""
    for piece in chat.answer(question):
        _show(piece)
    print()


def talk(chat: "Chat") -> None:
    """Answer what is typed, until the end of input."""
    print(_HINT)
    while True:
        question = _ask()
        if question is None or question == "/quit":
            return
        if question == "/reset":
            chat.conversation.reset()
        elif question.startswith("/") and " " not in question:
            print(f"{question} is no command: {', '.join(_COMMANDS)}")
        elif question:
            _answer(chat, question)


def _ask() -> str | None:
    """Read a line from the user; None at the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history
    while True:
        try:
            with _handled(_raise):
                return input("> ")
        except EOFError:
            print()
            return None
        except _CtrlC:
            print(f"\n{_HINT}")


def _answer(chat: "Chat", question: str) -> None:
    with _ctrl_c() as pressed:
        try:
            for piece in chat.answer(question, pressed.is_set):
                _show(piece)
        except UserError as error:
            print(f"megarl: {error}; /reset forgets what was said", end="", file=sys.stderr)
    print(" [stopped]" if pressed.is_set() else "")


def _show(piece: str) -> None:
    # A model must not be able to control the terminal with escape sequences.
    print(piece.translate(_SHOWN) if sys.stdout.isatty() else piece, end="", flush=True)


@contextmanager
def _ctrl_c() -> Iterator[Event]:
    """Within the context, Ctrl-C sets the event and interrupts nothing."""
    pressed = Event()
    with _handled(lambda *_: pressed.set()):
        yield pressed


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _CtrlC(Exception):  # noqa: N818 - no error
    """Only Ctrl-C: other signals end the program as usual."""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise _CtrlC
