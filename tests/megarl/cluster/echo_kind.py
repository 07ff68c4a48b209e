"""The engine that echoes, as a kind of engine."""

import os
from pathlib import Path

from megarl.rollout.kind import EngineKind, EngineSizes

ECHO = EngineKind(
    title="Echo",
    engine_class=("echo_engine", "EchoEngine"),
    argument_class=("no_such_engine", "Arguments"),
    refused={},
    tested={},
    offers=frozenset(),
    sizes=lambda _arguments: EngineSizes(2, None, "bf16"),
    context_argument="context",
    workers=lambda _arguments: 2,
    nodes=lambda arguments: arguments.get("nodes", 1),
    part_class=("echo_engine", "EchoPart"),
    part_arguments=lambda number, first: {"number": number, "first": first},
    loopback_environment={
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    },
    without_weights={"version": -1},
    float32_logits={},
    layout_versions=(),
    packages={},
)
