"""SGLang's HTTP server with our hooks; a program: `python -m megarl.rollout.sglang.server FOLDER`.

It runs in SGLang's environment. Every process that SGLang starts imports this module first, because Python's
multiprocessing imports the parent's main module. This is the only way to hook in that early, so here, and nowhere else,
importing has side effects.
"""

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from converters.errors import UserError
from megarl.rollout.sglang import cpu, hooks, int8
from megarl.rollout.sglang.arguments import check_block_fp8, check_int8, check_names, check_version
from megarl.rollout.sglang.calls import ARGUMENTS, REFUSED
from megarl.rollout.sglang.kind import VERSIONS
from megarl.rollout.sglang.parent import end_with_parent
from megarl.rollout.sglang.soft_cap import with_capping_attention
from megatron_ext.loopback import listen_on_loopback


def main() -> int:
    """Serve until the parent process ends; return 2 if the arguments are refused."""
    folder = Path(sys.argv[1])
    try:
        server_args = _server_args(json.loads((folder / ARGUMENTS).read_text()))
    except UserError as error:
        (folder / REFUSED).write_text(str(error))
        return 2
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    run_server(server_args)
    return 0


def _server_args(arguments: Mapping[str, Any]) -> Any:
    check_version(version("sglang"))
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    check_names(arguments, [field.name for field in record_fields(ServerArgs)])
    check_block_fp8(arguments)
    check_int8(arguments)
    server_args = ServerArgs(**with_capping_attention(arguments))
    try:
        server_args.resolve_once()
    except (ValueError, AssertionError, TypeError, NotImplementedError, OSError) as error:
        raise UserError(f"SGLang refuses its arguments: {error}; change rollout.engine_args") from error
    return server_args


end_with_parent()
# Each worker opens a rendezvous, even a single one.
listen_on_loopback()
_IS_ON_CPU = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
if _IS_ON_CPU:
    cpu.corrections.install()
# Other versions are refused by `main`, and may lack the registry.
if version("sglang") in VERSIONS:
    hooks.register()
    int8.register_hooks()
    if _IS_ON_CPU:
        cpu.corrections.register_hooks()
        cpu.fp8.register_hooks()
        cpu.int8.register_hooks()
        cpu.kv_cache.register_hooks()
        cpu.experts.register_hooks()
        cpu.latent.register_hooks()
        cpu.soft_cap.register_hooks()

if __name__ == "__main__":
    sys.exit(main())
