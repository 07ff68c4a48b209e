"""Tokenizers are files: code beside a model is not run, and words are not cut by the rules of another one."""

import base64
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from converters.errors import UserError
from megarl.data.tokenizer import read_tokenizer
from megarl.rollout.text import Texts

PAGE = Path(__file__).resolve().parents[3] / "docs/data.md"
# Kimi-K2's own, which has what tokenizers might read otherwise: intersections of classes of letters.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
TEXT = "Hello WORLD it's 1234567 你好hello世界 don't\r\n\n  x  Ünïcode ß ÀÉ  1+1=2"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
RULES = {
    "words": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
PLAIN = "Hello world,\n\nhow  are you? 12345 jumps cafe\u0301"
MODEL_TYPES = ("kimi_k2", "deepseek_v3")
"""The type of Kimi-K2, which transformers does not know, and that of Moonlight."""


def vocabulary() -> list[bytes]:
    """All bytes, and pieces of TEXT, each of two that come before it."""
    tokens = [bytes([number]) for number in range(256)]
    text = [bytes([each]) for each in TEXT.encode()]
    draw = random.Random(3)
    while len(text) > 10:
        pair = draw.choice(list(pairwise(text)))
        tokens.append(b"".join(pair))
        merged: list[bytes] = []
        for each in text:
            if merged and (merged[-1], each) == pair:
                merged[-1] = tokens[-1]
            else:
                merged.append(each)
        text = merged
    return list(dict.fromkeys(tokens))


@pytest.fixture(params=MODEL_TYPES)
def folder(request, tmp_path, monkeypatch):
    """A model as Kimi-K2 was released, of another vocabulary."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Kimi-K2-Instruct"
    folder.mkdir()
    tokens = vocabulary()
    lines = [f"{base64.b64encode(token).decode()} {number}\n" for number, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_kimi.py").write_text("open('executed', 'w')\nclass TikTokenTokenizer: pass\n")
    added = {
        str(len(tokens) + number): {"content": name, "special": name != "<think>"}
        for number, name in ((0, "[BOS]"), (1, "[EOS]"), (3, "<think>"), (4, "[PAD]"))
    }
    settings = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "chat_template": "{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": request.param}))
    return folder


def follow_the_page() -> None:
    """Run what docs/data.md gives."""
    (code,) = re.findall(r"## Tokenizers that are code\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code.count('"..."') == 1
    exec(code.replace('"..."', repr(PATTERN)), {})


def test_a_tokenizer_that_is_code_is_refused_and_not_run(folder):
    with pytest.raises(UserError, match=r"has no tokenizer\.json, and its tokenizer is code of its author"):
        read_tokenizer(folder)
    assert not Path("executed").exists()


def test_followed_the_page_makes_one_that_cuts_as_the_authors_does(folder):
    tiktoken = pytest.importorskip("tiktoken")
    tokens = vocabulary()
    special = {"[BOS]": len(tokens), "[EOS]": len(tokens) + 1, "<think>": len(tokens) + 3, "[PAD]": len(tokens) + 4}
    theirs = tiktoken.Encoding(
        "theirs",
        pat_str=PATTERN,
        mergeable_ranks={token: number for number, token in enumerate(tokens)},
        special_tokens=special,
    )
    follow_the_page()
    ours = read_tokenizer(folder)
    assert {name: ours.convert_tokens_to_ids(name) for name in special} == special
    assert (ours.eos_token_id, ours.pad_token_id) == (special["[EOS]"], special["[PAD]"])
    assert ours.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
    text = ours.encode(f"<think>Hi<|reserved_token_{len(tokens) + 2}|>[EOS]", add_special_tokens=False)
    assert ours.decode(text, skip_special_tokens=True) == "<think>Hi"
    draw = random.Random(1)
    letters = [*TEXT, "'s", "\t ", "[EOS]", "<think>", *re.findall(r"\S+", TEXT)]
    lengths = 0
    for _ in range(500):
        text = "".join(draw.choices(letters, k=draw.randint(1, 60)))
        expected = theirs.encode(text, allowed_special="all")
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.decode(expected) == text
        lengths += len(text.encode()) - len(expected)
    assert lengths > 1000
    assert not Path("executed").exists()


def test_a_tokenizer_file_beside_the_code_is_taken(folder):
    settings = (folder / "tokenizer_config.json").read_bytes()
    follow_the_page()
    expected = read_tokenizer(folder).encode(TEXT)
    (folder / "tokenizer_config.json").write_bytes(settings)
    assert read_tokenizer(folder).encode(TEXT) == expected
    assert not Path("executed").exists()


@pytest.mark.parametrize("read", [read_tokenizer, lambda folder: Texts(folder)._tokenizer])
def test_nobody_is_asked_whether_to_run_code(read, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **options: given.append(options) or 1 / 0)
    with pytest.raises((UserError, ZeroDivisionError)):
        read(tmp_path)
    assert given == [{"trust_remote_code": False}]


def write_byte_level(folder: Path, model_type: str, named: str, rules: str) -> Tokenizer:
    """Write a byte-level tokenizer, to which whole numbers are words, to the folder of a model; return the file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    training = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<begin>", "<end>"])
    tokenizer.train_from_iterator([PLAIN] * 50, training)
    tokenizer.pre_tokenizer = RULES[rules]
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    names = {"tokenizer_class": named, "bos_token": "<begin>", "eos_token": "<end>", "chat_template": template}
    settings = {**names, "add_bos_token": True, "add_eos_token": False, "legacy": True, "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return tokenizer


@pytest.mark.parametrize("read", [read_tokenizer, lambda folder: Texts(folder)._tokenizer])
@pytest.mark.parametrize(
    ("model_type", "named", "rules"),
    [
        ("llama", "LlamaTokenizerFast", "words"),  # DeepSeek-R1-Distill-Llama
        ("qwen3", "LlamaTokenizerFast", "words"),  # DeepSeek-R1-0528-Qwen3-8B
        ("qwen2", "LlamaTokenizerFast", "words"),
        ("llama", "GPT2Tokenizer", "digits"),  # SmolLM2
    ],
)
def test_words_are_cut_and_joined_by_the_rules_of_their_file(model_type, named, rules, read, tmp_path):
    file = write_byte_level(tmp_path, model_type, named, rules)
    tokenizer = read(tmp_path)
    token_ids = file.encode(PLAIN).ids
    assert tokenizer.encode(PLAIN, add_special_tokens=False) == token_ids
    assert tokenizer.decode(np.array(token_ids), skip_special_tokens=True) == PLAIN
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<begin>", "<end>")
    assert tokenizer.eos_token_id == file.token_to_id("<end>")
    message = {"role": "user", "content": PLAIN}
    assert tokenizer.apply_chat_template([message], tokenize=False) == f"<begin>{PLAIN}"
