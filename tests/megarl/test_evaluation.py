"""`megarl eval`: what it says is what transformers' own greedy answers are worth."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from digits import count_digits
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli.main import main
from megarl.data import load_prompts
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import DataConfig

pytestmark = pytest.mark.usefixtures("shared_cluster")

LENGTH = 12


def test_the_accuracy_is_that_of_greedy_answers(tmp_path, capsys):
    folder = write_tiny_model("qwen3", tmp_path / "model")
    file = write_arithmetic(tmp_path / "data", held_out=32).eval
    function = f"{Path(__file__).with_name('digits.py')}:count_digits"
    words = [
        "eval",
        "--model",
        str(folder),
        "--files",
        str(file),
        "--reward",
        function,
        "--max-response-tokens",
        str(LENGTH),
        "rollout.engine=transformers",
    ]
    assert main([*words, "--output-dir", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rewards = [count_digits("", text, "", {}) for text in greedy_answers(folder, file)]
    assert len(set(rewards)) > 1
    assert found["accuracy"] == pytest.approx(sum(rewards) / len(rewards))
    assert (found["dropped"], found["model"]) == (0, str(folder))


def test_prompts_that_are_left_out_are_told(tmp_path, capsys):
    folder = write_tiny_model("qwen3", tmp_path / "model")
    file = write_arithmetic(tmp_path / "data", held_out=32).eval
    prompts = load_prompts([str(file)], AutoTokenizer.from_pretrained(folder), DataConfig()).prompts
    limit = max(len(prompt.token_ids) for prompt in prompts)
    table = pq.read_table(file)
    rows = table.to_pylist()
    for row in rows[3:5]:
        row["prompt"][0]["content"] *= 2
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    words = ["eval", "--model", str(folder), "--files", str(file), "--output-dir", str(tmp_path / "out"), "--json"]
    words += [f"data.max_prompt_tokens={limit}", "data.overlong_prompts=drop", "rollout.engine=transformers"]
    # Seen before the engines start, which do not.
    assert main([*words, "--max-response-tokens", "100000000"]) == 2
    said = capsys.readouterr()
    assert f"2 prompts of {file} are longer than {limit} tokens and are left out\n" in said.err
    assert said.out == ""


def greedy_answers(folder, file):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    for prompt in load_prompts([str(file)], tokenizer, DataConfig()).prompts:
        tokens = torch.tensor([prompt.token_ids])
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=LENGTH, do_sample=False)
        yield tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True)
