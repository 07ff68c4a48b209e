"""The page about options is the one that the tables make; arguments of the engine that are in no test are not in it."""

from pathlib import Path

import pytest
from given_options import given_options

from converters.errors import UserError
from megarl.config.options_reference import reference
from megarl.rollout import ENGINES
from megarl.rollout.kind import EngineKind
from megarl.rollout.vllm.kind import VLLM

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("kind", ENGINES.values(), ids=list(ENGINES))
def test_the_tables_name_arguments_of_the_installed_engine(kind: EngineKind) -> None:
    # An engine in an environment of its own says so there: tests/megarl/rollout/test_sglang_itself.py.
    assert {*kind.refused, *kind.beside_returned_experts, *kind.tested} <= set(kind.arguments()) or not kind.arguments()
    assert not kind.refused.keys() & kind.tested.keys()


@pytest.mark.parametrize(("name", "test"), [each for kind in ENGINES.values() for each in kind.tested.items()])
def test_a_tested_argument_is_given_in_its_test(name: str, test: str) -> None:
    assert name in given_options((ROOT / "tests" / test).read_text())


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("speculative_config", {"method": "ngram"}, "guesses worse with every step, but for .*; give method=mtp"),
        ("kv_cache_dtype", "fp8_e5m2", "not been compared .*; use auto or bfloat16 or float16 or fp8 or fp8_e4m3"),
        ("hf_overrides", {"head_dtype": "float32", "rope_theta": 5.0}, "follows config.json.*; use head_dtype"),
        ("hf_config_path", "elsewhere", "the engine another"),
        ("data_parallel_backend", "ray", "start with it, on its machine.*; use mp"),
        ("trust_remote_code", True, "Python code from the model's folder"),
        ("enable_eplb", True, "where they lay at the start"),
        ("prefill_context_parallel_size", 2, "none for more workers; use 1"),
    ],
)
def test_an_argument_that_makes_another_model_is_refused(argument: str, value: object, says: str) -> None:
    with pytest.raises(UserError, match=f"^rollout.engine_args.{argument}=.* is not supported: .*{says}"):
        VLLM.check({argument: value})


def test_an_engine_of_data_parallel_ranks_is_on_one_machine() -> None:
    with pytest.raises(
        UserError, match=r"^rollout\.engine_args\.data_parallel_size=4 is not supported with nnodes=2: .* one machine$"
    ):
        VLLM.check({"data_parallel_size": 4, "nnodes": 2})
    VLLM.check({"data_parallel_size": 4, "nnodes": 1})
    VLLM.check({"data_parallel_size": 1, "nnodes": 2})


@pytest.mark.parametrize(
    ("argument", "refused", "taken"),
    [
        ("pipeline_parallel_size", 2, 1),
        ("decode_context_parallel_size", 2, 1),
        ("enable_prefix_caching", False, True),
    ],
)
def test_what_cannot_return_experts_is_refused_where_they_are_asked_for(
    argument: str, refused: object, taken: object
) -> None:
    asked = VLLM.returning_experts
    assert asked is not None
    with pytest.raises(
        UserError, match=rf"^rollout\.engine_args\.{argument}={refused} is not supported with algorithm\.router_replay="
    ):
        VLLM.check({argument: refused, **asked})
    VLLM.check({argument: refused})
    VLLM.check({argument: taken, **asked})


def test_what_is_switched_off_is_not_refused() -> None:
    VLLM.check({"data_parallel_backend": "mp", "kv_cache_dtype": "fp8", "trust_remote_code": False})
    VLLM.check({"hf_overrides": {"head_dtype": "float32"}})


def test_the_policys_own_layers_may_draft() -> None:
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    VLLM.check(drafting)
    assert VLLM.drafts(drafting)
    assert not VLLM.drafts({})
    with pytest.raises(UserError, match=r"not supported with algorithm\.router_replay=rollout: on a CPU"):
        VLLM.check({**drafting, "enable_return_routed_experts": True})
    elsewhere = {"speculative_config": {**drafting["speculative_config"], "model": "another"}}
    with pytest.raises(UserError, match="give method=mtp and num_speculative_tokens, or leave it out"):
        VLLM.check(elsewhere)
