import pytest
from engine_host import GREEDY, PROMPTS, Served

from megarl.data.stretches import fetch
from megarl.rollout.protocol import Request, UpdateError


@pytest.mark.parametrize(("kind", "load_format"), [("vllm", "auto"), ("vllm", "dummy"), ("transformers", "dummy")])
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param("qwen3", False, marks=pytest.mark.long),
        ("qwen3", True),
        ("qwen3_moe", False),
        # With soft caps that scores and logits come near to.
        ("gemma2", True),
        ("deepseek_v3", False),
    ],
)
def test_greedy_equals_huggingface_before_and_after_updates(host, model_folder, assert_greedy, name, tied, load_format):
    folders = [model_folder(name, seed, tied) for seed in (0, 1)]
    served = Served(host.start(folders[0], load_format=load_format), folders)
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]

    def check(folder, version):
        assert served.engine.version() == version
        for prompt, (generation,) in zip(PROMPTS, served.engine.generate(requests), strict=True):
            assert_greedy(folder, prompt, generation)
            assert fetch(generation.versions).tolist() == [version] * len(generation.token_ids)

    if load_format == "dummy":
        assert served.engine.version() == -1
        with pytest.raises(UpdateError, match="dummy weights"):
            served.engine.generate(requests)
    else:
        check(folders[0], 0)
    assert len(served.second.buckets) > 1
    served.update(served.second, 1)
    check(folders[1], 1)
    served.update(served.first, 5)
    check(folders[0], 5)
