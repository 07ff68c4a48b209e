import functools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from asked_engine import AskedEngine
from engine_host import END_ID, Engines, Served, running_engines, vllm_pool, with_vllm
from trainer_ranks import Trainer
from transformers import AutoModelForCausalLM
from vllm_ranks import VOCABULARY, running_ranks, write_config

from megarl.data.stretches import fetch_concatenated
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.protocol import EngineDiedError, Request, SamplingParameters
from megarl.rollout.sglang import installation
from megarl.rollout.sglang.engine import SglangEngine
from megarl.rollout.transformers.engine import TransformersEngine
from megatron_ext.routing.routed_experts import Records


@pytest.fixture(scope="session")
def engines():
    with running_engines() as engines:
        yield engines


@pytest.fixture(scope="session")
def transformers_engines():
    engines = Engines(TransformersEngine, max_model_len=512)
    yield engines
    engines.close()


_OF_SGLANG = {"context_length": 512, "max_total_tokens": 16384}


@pytest.fixture(scope="session")
def sglang_engines():
    engines = Engines(SglangEngine, **_OF_SGLANG)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def over_stand_in(tmp_path_factory):
    """SGLang's engine over a server that has the rules of SGLang's: a class."""
    program = tmp_path_factory.mktemp("stand_in") / "python"
    stand_in = Path(__file__).with_name("sglang_stand_in.py")
    # It imports what lies beside it.
    program.write_text(f'#!/bin/sh\nPYTHONSAFEPATH= exec {sys.executable} {stand_in} "$3"\n')
    program.chmod(0o755)

    class OverStandIn(SglangEngine):
        def start(self):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(installation.PYTHON_VARIABLE, str(program))
                super().start()

    return OverStandIn


@pytest.fixture(scope="session")
def stand_in_engines(over_stand_in):
    engines = Engines(over_stand_in, **_OF_SGLANG)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def start_stand_in(over_stand_in):
    """Starts such an engine of a folder with the arguments given, beside all others."""
    engines = []

    def begin(folder, **arguments):
        engines.append(engine := over_stand_in(folder, {**_OF_SGLANG, **arguments}))
        engine.start()
        return engine

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture
def sglang_served(_shared, sglang_engines, folders):
    """An engine over SGLang's own server, the one that other tests use, too."""
    if "sglang" not in _shared or _shared["sglang"].engine is not sglang_engines.running:
        _shared["sglang"] = Served(sglang_engines.start(folders[0], **_SMALL_BATCHES["sglang"]), folders)
    return _shared["sglang"]


@pytest.fixture(scope="session")
def vllm_process():
    """Calls a function in a process that has vLLM and never an engine: nothing is corrected but by the function."""
    with vllm_pool() as process:
        yield lambda function, *arguments: process.apply(function, arguments)


@pytest.fixture(scope="session")
def with_queueing(folders, endless_prompt):
    """Calls a function of `folders` and `endless_prompt` in a process for the engine that `queueing` makes of them."""
    with vllm_pool() as process:
        yield lambda function: process.apply(function, (folders, endless_prompt))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    @functools.cache
    def make(name, seed, tied=False):
        fields = {"tie_word_embeddings": True} if tied else None
        return write_tiny_model(name, tmp_path_factory.mktemp(f"{name}_{seed}_{tied}"), seed=seed, fields=fields)

    return make


@pytest.fixture(scope="session")
def folders(model_folder):
    return model_folder("qwen3_moe", 0), model_folder("qwen3_moe", 1)


@contextmanager
def _without_leftovers(served):
    """Also after a test that failed, no thread may wait for an engine that is paused or fenced."""
    yield served
    # A call that a failed test made last may be on its way.
    time.sleep(0.2)
    with suppress(EngineDiedError):
        served.engine.pause("abort")
        served.engine.resume()


# So that many requests, or many samples of one, need several.
_SMALL_BATCHES = {
    "vllm": {"max_num_batched_tokens": 512},
    "sglang": {"max_running_requests": 30},
    "stand-in": {"max_running_requests": 30},
    "transformers": {"max_num_seqs": 30},
}


@pytest.fixture
def kind():
    """The kind of engine that `host`, `fresh` and `served` have; tests of the protocol ask for others, too.

    "stand-in" is SGLang's over a server that has the rules of SGLang's.
    """
    return "vllm"


@pytest.fixture
def host(kind, request):
    """Starts engines of this kind, one at a time."""
    engines = {"vllm": "engines", "stand-in": "stand_in_engines"}
    return request.getfixturevalue(engines.get(kind, f"{kind}_engines"))


@pytest.fixture
def fresh(pool, host, folders):
    """An engine of this test's own."""
    with _without_leftovers(Served(host.start(folders[0]), folders)) as served:
        yield served


@pytest.fixture(scope="session")
def _shared():
    return {}


@pytest.fixture
def served(_shared, pool, kind, host, folders):
    """An engine that tests use one after the other; it has the weights of the first folder, of whatever version."""
    if kind not in _shared or _shared[kind].engine is not host.running:
        _shared[kind] = Served(host.start(folders[0], **_SMALL_BATCHES[kind]), folders)
    served = _shared[kind]
    version = served.engine.version()
    if version > 0:
        served.update(served.first, version + 1)
    with _without_leftovers(served):
        yield served


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture(scope="session")
def reference_log_probs():
    """log_softmax of HuggingFace's logits for all tokens of a sequence: [tokens, vocabulary]."""

    @functools.cache
    def load(folder):
        # Only its eager attention soft-caps.
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    @torch.no_grad()
    def log_probs(folder, token_ids, temperature=1.0):
        return (load(folder)(torch.tensor([token_ids])).logits[0] / temperature).log_softmax(-1)

    return log_probs


@pytest.fixture(scope="session")
def check_experts():
    """Check the routed experts of a turn against the routers of a HuggingFace folder, in a plain forward."""

    @functools.cache
    def load(folder):
        model, chosen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
        for name, module in model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        return model, chosen

    @torch.no_grad()
    def check(folder, turn, routing):
        model, chosen = load(folder)
        chosen.clear()
        token_ids = [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]
        model(torch.tensor([token_ids[:-1]]))
        records = Records([fetch_concatenated([turn.routed_experts])], torch.arange(len(token_ids)))
        found = routing.experts_of(records, range(routing.layers)).long()
        assert torch.equal(found[:-1].sort(-1).values, torch.stack(chosen, 1).sort(-1).values)
        # Nobody fed the last token.
        assert found[-1].unique().tolist() == [-1]

    return check


@pytest.fixture(scope="session")
def assert_greedy(reference_log_probs):
    """Check tokens start..stop of a greedy generation, and their log-probabilities, against a HuggingFace folder."""

    def check(folder, prompt, generation, start=0, stop=None):
        expected = reference_log_probs(folder, prompt + generation.token_ids.tolist())[len(prompt) - 1 : -1]
        best = expected.max(-1)
        assert generation.token_ids[start:stop].tolist() == best.indices[start:stop].tolist()
        assert torch.allclose(torch.tensor(generation.log_probs)[start:stop], best.values[start:stop], atol=1e-5)

    return check


@pytest.fixture(scope="session")
def endless_prompt(folders, reference_log_probs):
    """A prompt that neither model answers with an end-of-sequence token soon."""

    def runs_on(prompt, folder):
        token_ids = list(prompt)
        for _ in range(60):
            token_ids.append(int(reference_log_probs(folder, token_ids)[-1].argmax()))
        return END_ID not in token_ids

    return next([a, 9] for a in range(4, 60) if all(runs_on([a, 9], folder) for folder in folders))


@pytest.fixture
def asked(pool):
    """An engine as one whose requests are known to have come, or begun: `asked(engine)`."""
    return functools.cache(lambda engine: AskedEngine(engine, pool))


@pytest.fixture
def half_generated(asked, endless_prompt):
    """Pauses an engine when it has sampled some tokens, and not all, of a greedy answer to `endless_prompt`."""

    def generate(engine):
        request = Request(endless_prompt, SamplingParameters(temperature=0, max_tokens=400))
        # On a busy machine an answer may be whole before this process asks for the pause.
        for _ in range(5):
            engine.resume()
            generating = asked(engine).begin(request)
            engine.pause("keep")
            if not generating.done():
                return generating
        raise AssertionError("each answer was whole before the engine paused")

    return generate


@pytest.fixture
def make_trainer(pool):
    with_vllm()
    made = []
    yield lambda *arguments: made.append(Trainer(*arguments[:2], pool, *arguments[2:])) or made[-1]
    for trainer in made:
        trainer.end()


@pytest.fixture(scope="session")
def ranks():
    """Two processes, each with a tensor-parallel rank's model of vLLM."""
    with running_ranks() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory):
    """Makes a folder with the config.json of a tiny model, and gives both."""

    def make(name, **fields):
        folder = tmp_path_factory.mktemp(name)
        return folder, write_config(folder, name, **{"vocab_size": VOCABULARY.get(name, 128), **fields})

    return make
