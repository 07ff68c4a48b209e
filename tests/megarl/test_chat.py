"""Talking to a model on a real engine: what is streamed is what transformers generates greedily."""

import io
import signal
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from converters.errors import UserError
from megarl.chat import Conversation, open_chat
from megarl.cli import chat as command
from megarl.config.compose import compose
from megarl.data.detokenizer import Detokenizer
from megarl.process.signals import interruption
from megarl.quickstart.tiny_models import make_tokenizer, write_tiny_model

LENGTH, LONGEST = 24, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def greedy(folder):
    """The answer of transformers to messages."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def answer(*contents):
        roles = ("user", "assistant") * len(contents)
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LENGTH, do_sample=False)
        return tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True)

    return answer


@pytest.mark.long
@pytest.mark.usefixtures("shared_cluster")
def test_a_conversation(folder, greedy, tmp_path, monkeypatch, capsys):
    words = [f"model.path='{folder}'", f"output_dir='{tmp_path}'", f"rollout.max_response_tokens={LONGEST}"]
    # Streaming by vLLM is tested with it.
    words.append("rollout.engine=transformers")
    with open_chat(compose("chat", words), None, 0.0) as chat:
        pieces = list(chat.answer("1+2="))
        first = "".join(pieces)
        assert len(pieces) > LONGEST // 2
        assert first.startswith(greedy("1+2="))
        second = "".join(chat.answer("3+4="))
        assert second.startswith(greedy("1+2=", first, "3+4="))
        assert not second.startswith(greedy("3+4="))

        chat.conversation.reset()
        stopped = "".join(chat.answer("1+2=", lambda: True))
        assert first.startswith(stopped)
        assert len(stopped) < len(first)

        chat.conversation.reset()
        typed = iter(["1+2=", "", "/nonsense", "/reset", "1+2=", "7" * 1000, "/quit", "never"])
        monkeypatch.setattr("builtins.input", lambda _: next(typed))
        capsys.readouterr()
        command.talk(chat)
        said = capsys.readouterr()
        assert said.out.splitlines()[1:] == [first, "/nonsense is no command: /reset, /quit", first, ""]
        assert "and the model takes 512; /reset forgets" in said.err
        assert next(typed) == "never"

        chat.conversation.reset()
        monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\n"))
        command.reply(chat, command.question_on_stdin())
        assert capsys.readouterr().out == first + "\n"


def test_without_a_chat_template_the_text_goes_on():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    conversation = Conversation(tokenizer)
    conversation.add("1+2", "=3")
    assert conversation.prompt(";") == tokenizer("1+2=3;")["input_ids"]
    with pytest.raises(UserError, match="--system needs a chat template"):
        Conversation(tokenizer, "be brief")


@pytest.fixture(scope="module")
def byte_level():
    """A tokenizer whose tokens end within characters, as those of large models do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator(["übergrößen häufig, 漢字 and 😀 emoji"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@given(st.data())
def test_the_pieces_of_a_stream_are_the_whole_text(byte_level, data):
    text = data.draw(st.text(alphabet="aü漢😀é .\n"))
    token_ids = byte_level(text)["input_ids"]
    ends = sorted(data.draw(st.lists(st.integers(0, len(token_ids)))))
    # The end may lie within a character.
    token_ids = token_ids[: ends[-1]] if ends else token_ids
    detokenizer, start, pieces = Detokenizer(byte_level), 0, []
    for end in [*ends, len(token_ids)]:
        pieces.append(detokenizer.add(token_ids[start:end]))
        start = end
    pieces.append(detokenizer.end())
    assert "".join(pieces) == byte_level.decode(token_ids, clean_up_tokenization_spaces=False)


def test_at_the_prompt_ctrl_c_gives_a_hint_and_sigterm_ends(monkeypatch, capsys):
    came = iter([signal.SIGINT, signal.SIGINT, signal.SIGTERM])
    monkeypatch.setattr("builtins.input", lambda _: signal.raise_signal(next(came)))
    with interruption() as ending, pytest.raises(KeyboardInterrupt):
        command.talk(None)
    assert ending.exit_code == 143
    assert capsys.readouterr().out.count("Ctrl-C stops an answer") == 3
    assert next(came, None) is None


class Mischief:
    def answer(self, _question, _is_stopped=None):
        yield "\x1b]0;owned\x07\n\tend\x9b"


def test_a_model_cannot_command_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command._answer(Mischief(), "x")
    command.reply(Mischief(), "a question of a pipe")
    assert capsys.readouterr().out == 2 * "\\x1b]0;owned\\x07\n\tend\\x9b\n"


def test_a_pipe_gets_what_the_model_wrote(capsys):
    command.reply(Mischief(), "a question of a pipe")
    assert capsys.readouterr().out == "\x1b]0;owned\x07\n\tend\x9b\n"


@pytest.mark.parametrize(
    ("piped", "encoding_errors", "says"),
    [
        (b"", "strict", "there is no question on stdin"),
        (b"\n", "strict", "there is no question on stdin"),
        (b"1\xff+2", "strict", "not text in UTF-8"),
        (b"1\xff+2", "surrogateescape", "not text in UTF-8"),
    ],
)
def test_a_bad_question_is_refused_before_the_model_is_loaded(
    piped, encoding_errors, says, folder, monkeypatch, capsys
):
    from megarl.cli.main import main

    stdin = io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8", errors=encoding_errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["chat", "--model", str(folder), "rollout.engine=transformers"]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert "Ray" not in said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model m", "--model=m is not a HuggingFace folder"),
        ("--model megatron", "megarl export --megatron megatron --out DIR"),
        ("--model m --temperature -1", "must be a number of at least 0"),
        ("--model m --temperature nan", "must be a number of at least 0"),
        ("--model m rollout.tempertur=1", "did you mean rollout.temperature?"),
        ("--model m --max-tokens 0", "--max-tokens 0 is too small"),
    ],
)
def test_bad_input_is_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    from megarl.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / ".metadata").touch()
    assert main(["chat", *words.split()]) == 2
    assert says in capsys.readouterr().err
