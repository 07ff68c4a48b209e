"""The code here, and what it says of SGLang, beside the installed one; no server is started (`make test-sglang`)."""

import json
import subprocess

import pytest
from in_sglang import output_of

from converters.errors import UserError
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.sglang.environment import WITHHELD
from megarl.rollout.sglang.kind import EXPERT_EXCHANGES, EXPERT_KERNELS, GRAPH_CHOICES, SGLANG
from megarl.rollout.sglang.samples import NEUTRAL, Limits, question

pytestmark = pytest.mark.sglang
MADE_BY_ITSELF = {
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
    # Makes a grammar of one that is asked for.
    "ebnf_full_assistant",
}
"""Sampling parameters that SGLang fills in for itself."""


@pytest.fixture(scope="module")
def itself(tmp_path_factory):
    folders = [write_tiny_model(name, tmp_path_factory.mktemp(name)) for name in ("qwen3", "deepseek_v3")]
    return json.loads(output_of("sglang_itself.py", *folders).splitlines()[-1])


def test_the_tables_name_arguments_that_the_server_has(itself):
    known = {*itself["arguments"]}
    assert {*SGLANG.refused, *SGLANG.tested, *SGLANG.without_weights, *SGLANG.able_to_sleep} <= known
    assert {*SGLANG.float32_logits, *SGLANG.gpu_share(0.5), *(SGLANG.returning_experts or {})} <= known
    assert {*SGLANG.beside_returned_experts} <= known
    assert {*GRAPH_CHOICES, "cuda_graph_backend_decode", "cuda_graph_config"} <= known


def test_variables_that_no_server_sees_are_variables_that_it_would_read(itself):
    assert {*WITHHELD} <= {*itself["variables"]}


def test_all_kernels_of_experts_but_one_may_be_chosen(itself):
    assert {*EXPERT_KERNELS, "hpc_ops"} == {*itself["expert kernels"]}
    # The last is for those who bring one of their own.
    assert {*EXPERT_EXCHANGES, "megamoe", "customized"} == {*itself["expert exchanges"]}


def test_experts_in_blocks_are_written_straight_where_sglang_leaves_them_as_they_were_loaded(itself):
    found = itself["experts in blocks"]
    straight = {backend for backend, (_, reason) in found.items() if reason is None}
    assert straight == {"triton", "flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm"}
    assert all(is_kept for is_kept, reason in found.values() if reason is None)


def test_a_server_whose_loop_goes_on_while_it_is_paused_is_refused(itself):
    loops = itself["loops"]
    asked_for = {
        "event_loop_pdmux": {"enable_pdmux": True},
        "event_loop_pp": {"pp_size": 2},
        "event_loop_pp_disagg_prefill": {"disaggregation_mode": "prefill"},
        "event_loop_pp_disagg_decode": {"disaggregation_mode": "decode"},
    }
    assert {name for name, is_held in loops.items() if not is_held} == asked_for.keys()
    assert {"event_loop_normal", "event_loop_overlap"} <= loops.keys()
    for given in asked_for.values():
        with pytest.raises(UserError, match="is not supported"):
            SGLANG.check(given)


def test_experts_are_chosen_where_they_are_told_of(itself):
    assert itself["choices in the kernel"] == [True, False]


def test_a_request_says_every_sampling_parameter_that_there_is(itself):
    """An argument of the server could say something else for one that is left out."""
    (sent,) = question(Request([5], SamplingParameters()), Limits(512, 64), interval=64)["sampling_params"]
    assert sent.keys() == itself["sampling"].keys() - MADE_BY_ITSELF


def test_what_no_request_uses_has_the_value_that_changes_nothing(itself):
    changed = {name: value for name, value in NEUTRAL.items() if value != itself["sampling"][name]}
    # Without a word it follows the server's own default.
    assert changed == {"watermark": {"enabled": False}}
    assert itself["sampling"]["watermark"] is None


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("a copy of the model's own", "Online weight updates are not supported: a copy"),
        ("a product from halves", "the HPC-Ops bf16xfp32 GEMM optimization is enabled"),
        ("weights of a daemon", "model weights are shared with the daemon"),
    ],
)
def test_a_worker_that_keeps_copies_of_its_weights_takes_no_others(itself, reason, sentence):
    """SGLang's own call refuses it, which the calls of ours do not reach."""
    answers, usual = itself["updates"][reason], itself["updates"]["none"]
    for call in ("begin_loading", "load_bucket", "open", "receive"):
        assert answers[call].startswith("UpdateError: ")
        assert sentence in answers[call]
        assert not usual[call].startswith("UpdateError")
    for call in ("stop_profiler", "connect", "close", "disconnect"):
        assert answers[call] == usual[call]


def test_a_response_ends_where_other_engines_end_it(itself):
    """By generation_config.json, and by config.json where there is none; SGLang takes the tokens of both."""
    assert itself["ends"] == {"none": [5], "another": [7, 8], "no token": []}


def test_memory_was_released_by_all_workers_when_one_says_so(itself):
    """One of them takes two seconds; SGLang by itself does not wait for it."""
    by_itself, with_hooks = itself["early"]
    assert by_itself > 1
    assert abs(with_hooks) < 0.5


def test_a_worker_that_sleeps_finds_the_runtime_which_it_preloads(itself):
    """Goes, with the hook, when the library says itself where the runtime lies."""
    needs = subprocess.run(
        ["readelf", "--dynamic", itself["preloads"]["library"]], check=True, capture_output=True, text=True
    ).stdout
    assert "Shared library: [libcudart.so.13]" in needs
    assert "RPATH" not in needs
    assert "RUNPATH" not in needs
    assert itself["preloads"]["places"] == ["nvidia/cu13/lib"]


def test_the_share_of_a_gpu_that_it_takes_is_known(itself):
    assert len(itself["shares"]) == 156
    assert [each for each in itself["shares"] if each[3] != each[4]] == []
