"""Loads vLLM into the process that others are forked from: it takes eight seconds of a core.

Nothing of vLLM is corrected by it: what is forked may look at vLLM as it comes.
"""

import gc
import os

from megarl.rollout.vllm.arguments import prepare_environment

_SOCKETS = "VLLM_RPC_BASE_PATH"

# A folder that goes with each process, which finds its own.
os.environ[_SOCKETS] = ""
prepare_environment()
del os.environ[_SOCKETS]

import vllm.v1.engine.llm_engine  # noqa: E402 (after the environment)
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

# Engines search for garbage when they start and when they end, for half of the time that it takes.
gc.freeze()
