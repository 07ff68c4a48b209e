"""HuggingFace folders with files that are missing, damaged, absurd or evil."""

import json
import os
import random
import shutil

import pytest
from safetensors.torch import load_file, save_file

from megarl.models.policy import read_model
from megarl.schema import ModelConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def config(**fields):
    def change(folder):
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def overwrite(name, offset, content):
    def change(folder):
        with (folder / name).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    return change


def truncate(name, size):
    return lambda folder: os.truncate(folder / name, size)


def in_the_place_of_a_file(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def header(edit):
    def change(folder):
        content = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        names = [name for name in entries if name != "__metadata__"]
        edit(entries, entries[names[0]], entries[names[1]])
        text = json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return change


def tensors(edit):
    def change(folder):
        loaded = load_file(folder / WEIGHTS)
        edit(loaded, next(name for name in loaded if "q_proj" in name))
        save_file(loaded, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def index(content):
    def change(folder):
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return change


REFUSED = {
    "no config": remove(CONFIG),
    "empty config": write(CONFIG, b""),
    "list for a config": write(CONFIG, b"[]"),
    "config of no text": write(CONFIG, b"\xff\xfe{"),
    "config of a depth": write(CONFIG, b"[" * 100_000),
    "text for a size": config(hidden_size="64"),
    "no size": config(hidden_size=None),
    "no layers": config(num_hidden_layers=-1),
    "absurd layers": config(num_hidden_layers=10**9),
    "absurd experts": config(num_experts=10**9),
    "no heads": config(num_attention_heads=0),
    "huge vocabulary": config(vocab_size=10**12),
    "unknown type": config(model_type="gpt-unknown"),
    "text for an epsilon": config(rms_norm_eps="x"),
    "NaN for an epsilon": config(rms_norm_eps=float("nan")),
    "NaN for theta": config(rope_theta=float("nan"), rope_parameters=None),
    "no weights": remove(WEIGHTS),
    "weights are a folder": in_the_place_of_a_file(WEIGHTS),
    "config is a folder": in_the_place_of_a_file(CONFIG),
    "short weights": truncate(WEIGHTS, 1000),
    "empty weights": truncate(WEIGHTS, 0),
    "five bytes of weights": truncate(WEIGHTS, 5),
    "huge header": overwrite(WEIGHTS, 0, (2**62).to_bytes(8, "little")),
    "no header": overwrite(WEIGHTS, 0, bytes(8)),
    "header of no text": overwrite(WEIGHTS, 8, b"\xff" * 50),
    "overlapping tensors": header(lambda all_, first, second: second.update(data_offsets=first["data_offsets"])),
    "negative offsets": header(lambda all_, first, second: first.update(data_offsets=[-10, -5])),
    "offsets past the end": header(lambda all_, first, second: first.update(data_offsets=[10**12, 10**12 + 5])),
    "negative shape": header(lambda all_, first, second: first.update(shape=[-1, -64])),
    "text for a shape": header(lambda all_, first, second: first.update(shape="x")),
    "unknown type of numbers": header(lambda all_, first, second: first.update(dtype="Q4")),
    "missing tensor": tensors(lambda all_, name: all_.pop(name)),
    "misshapen tensor": tensors(lambda all_, name: all_.update({name: all_[name][:-1].clone()})),
    "index out of the folder": index('{"weight_map": {"a": "../../../../etc/passwd"}}'),
    "index of numbers": index('{"weight_map": {"a": 5}}'),
    "index of nothing": index("{}"),
    "index of no text": index("{"),
    "no tokenizer": remove("tokenizer.json", "tokenizer_config.json"),
    "damaged tokenizer": write("tokenizer.json", b"{]"),
    "damaged settings of the tokenizer": write("tokenizer_config.json", b"{]"),
    "damaged generation config": write("generation_config.json", b"{"),
    "list for a generation config": write("generation_config.json", b"[]"),
    "text for an end token": write("generation_config.json", b'{"eos_token_id": "x"}'),
    "list of an end token": write("generation_config.json", b'{"eos_token_id": [[1]]}'),
}
CODE = b"open('executed', 'w')\nclass T: pass\n"
EVIL = {
    "auto_map": {"AutoConfig": "evil.T", "AutoModelForCausalLM": "evil.T", "AutoTokenizer": ["evil.T", None]},
    "tokenizer_class": "T",
}


@pytest.fixture
def judge(hostile_model, refusal, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(hostile_model, folder)

    def change_and_read(change):
        change(folder)
        return refusal(read_model, ModelConfig(path=str(folder)), [])

    return change_and_read


@pytest.mark.parametrize("damage", REFUSED)
def test_what_cannot_be_trained_is_refused(judge, damage):
    sentence = judge(REFUSED[damage])
    assert sentence
    assert len(sentence) < 1000


def test_code_beside_the_model_is_not_run(judge):
    def add_code(folder):
        (folder / "evil.py").write_bytes(CODE)
        config(auto_map=EVIL["auto_map"])(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **EVIL}))

    judge(add_code)


@pytest.mark.parametrize("seed", range(40))
def test_a_folder_with_any_wrong_byte_is_taken_or_refused(judge, seed):
    draw = random.Random(seed)

    def change(folder):
        name = draw.choice([CONFIG, WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
        # Beginning of the weights, which describes them.
        size = min((folder / name).stat().st_size, 3000)
        overwrite(name, draw.randrange(size), bytes([draw.randrange(256)]))(folder)

    judge(change)
