"""`megarl eval`: what it says is what transformers' own greedy answers are worth."""

import json
from pathlib import Path

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


def greedy_answers(folder, file):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    for prompt in load_prompts([str(file)], tokenizer, DataConfig()).prompts:
        tokens = torch.tensor([prompt.token_ids])
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=LENGTH, do_sample=False)
        yield tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True)
