"""vLLM drafts with the policy's layers for multi-token prediction, and a refit writes them with the policy."""

import math
import re

import pytest
import torch
from engine_host import vllm_pool
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from converters.layouts.traced_layout import traced_layout
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.vllm.arguments import make_engine_config

pytestmark = pytest.mark.long

PROMPTS = [[5 + index, 9, 12, 20 + index, 7] for index in range(4)]
LENGTH = 8
ARGUMENTS = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**26,
    "load_format": "dummy",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
}


def draft_after_refits(folder):
    """The tensors of a worker that differ after two refits through its loader, and the tokens that it then samples."""
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from megarl.rollout.vllm import tracing

    engine = LLMEngine.from_vllm_config(make_engine_config(folder, ARGUMENTS))
    worker = engine.model_executor.driver_worker.worker
    architecture, weights = read_architecture(read_json(folder / CONFIG)), load_file(folder / "model.safetensors")
    trace = worker.trace_layout(architecture.hf_shapes, architecture.hf_dtypes(torch.float32)).unpacked()
    # It raises where a tensor is on no worker, and where a parameter is filled by nothing or twice.
    traced_layout([trace.shard], architecture.hf_shapes)
    names = list(architecture.hf_shapes)
    for factor in (0.5, 1.0):
        worker.begin_weight_update()
        for start in range(0, len(names), 7):
            bucket = [(name, factor * weights[name]) for name in names[start : start + 7]]
            worker.weight_transfer_engine.model.load_weights(bucket)
        worker.finish_weight_update()
    parameters = tracing.loaded_parameters(worker._loaded())
    differing = []
    for placement in trace.shard.placements:
        name, *places = re.split(r"[\[\]]+", placement.local_name)
        local = parameters[name][tuple(int(place) for place in places if place)]
        held, given = local[placement.local_box.slices()], weights[placement.hf_name][placement.hf_box.slices()]
        if not torch.equal(held, given):
            differing.append(placement.hf_name)
    answers = {}
    for temperature in (0.0, 1.0):
        for index, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(
                temperature=temperature, seed=index, max_tokens=LENGTH, ignore_eos=True, detokenize=False, logprobs=0
            )
            engine.add_request(f"{temperature} {index}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for each in engine.step():
                if each.finished:
                    (output,) = each.outputs
                    pairs = zip(output.token_ids, output.logprobs, strict=True)
                    log_probs = [table[token].logprob for token, table in pairs]
                    answers[each.request_id] = list(output.token_ids), log_probs
    return trace.untraced, differing, answers


def test_the_draft_is_refitted_and_changes_no_token(tmp_path):
    folder = write_tiny_model("deepseek_v3", tmp_path, fields={"num_nextn_predict_layers": 1})
    with vllm_pool() as process:
        untraced, differing, answers = process.apply(draft_after_refits, (folder,))
    assert untraced == {}
    assert differing == []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for key, (tokens, log_probs) in answers.items():
        prompt = PROMPTS[int(key.split()[1])]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        if key.startswith("0.0"):
            assert tokens == logits.argmax(-1).tolist()
        else:
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(log_probs, expected, strict=True))
