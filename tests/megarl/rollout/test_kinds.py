"""The table of engines: what each entry names is there, without the engine being imported."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.rollout import ENGINES, engine_configuration, engine_kind
from megarl.rollout.kind import EngineKind
from megarl.schema import MegarlConfig

kinds = pytest.mark.parametrize("kind", ENGINES.values(), ids=list(ENGINES))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.engine=tgi is not an engine: use one of sglang, transformers, vllm"):
        engine_kind("tgi")


@kinds
def test_the_class_of_an_engine_is_where_its_entry_says(kind: EngineKind) -> None:
    module, name = kind.engine_class
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@kinds
def test_an_engine_without_weights_is_asked_for_by_its_own_arguments(kind: EngineKind) -> None:
    kind.check(kind.without_weights)
    assert kind.without_weights


@kinds
def test_an_engine_has_one_worker_unless_its_arguments_ask_for_more(kind: EngineKind) -> None:
    assert kind.workers({}) == 1


def test_what_is_given_wins_over_what_keeps_logits_from_being_rounded() -> None:
    config = MegarlConfig()
    config.model.fp32_logits = True
    config.rollout.engine_args = {"hf_overrides": {"moe_router_dtype": "float32"}, "max_num_seqs": 3}
    kept = {"hf_overrides": {"head_dtype": "float32", "moe_router_dtype": "float32"}, "max_num_seqs": 3}
    assert engine_configuration(config).engine_args == kept
    config.rollout.engine_args = {"hf_overrides": {"head_dtype": "bfloat16"}}
    assert engine_configuration(config).engine_args == config.rollout.engine_args
    config.rollout.engine, config.rollout.engine_args = "transformers", {}
    assert engine_configuration(config).engine_args == {"float32_logits": True}
    config.rollout.engine_args = {"float32_logits": False}
    assert engine_configuration(config).engine_args == {"float32_logits": False}


def test_an_engine_is_asked_for_experts_where_they_are_replayed() -> None:
    config = MegarlConfig()
    config.rollout.engine = "transformers"
    assert engine_configuration(config).engine_args == {}
    config.algorithm.router_replay = "rollout"
    assert engine_configuration(config).engine_args == {"enable_return_routed_experts": True}


def test_no_engine_and_no_torch_is_imported_for_the_table() -> None:
    """A configuration is checked, and a job submitted, on a machine that has neither."""
    program = "import sys, megarl.rollout; sys.exit(bool({'torch', 'vllm', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
