"""Load a checkpoint into a GPTModel and export it again with another project's converter, on a CPU.

    python -m conversion.peers mbridge --hf DIR --out DIR

Run it in a separate environment, see `programs.py`. The last line is JSON: the seconds of `load` (HuggingFace files
into the model) and of `export` (the model into HuggingFace files), without imports and building the model; the
seconds until the exported files are on the disk, for which the peers do not wait; and the number of missing tensors.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conversion import transformer_engine_names
from megatron_ext import device

CPU_CONFIG: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    # The weights are overwritten when the checkpoint is loaded.
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
}
"""Fields of TransformerConfig that the peers set for a GPU; none matters for copying weights."""


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a peer."""

    load_seconds: float
    export_seconds: float
    sync_seconds: float
    tensors_not_written: int


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """Megatron's process groups, TP = PP = EP = 1."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
        dist.destroy_process_group()


def _measure(load: Callable[[], Any], export: Callable[[], Any], source: Path, out: Path) -> Outcome:
    start = time.perf_counter()
    with torch.no_grad():
        load()
    loaded = time.perf_counter()
    export()
    exported = time.perf_counter()
    _sync(out)
    synced = time.perf_counter()
    not_written = _tensor_names(source) - _tensor_names(out)
    return Outcome(loaded - start, exported - loaded, synced - exported, len(not_written))


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _tensor_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return {name for name in names if not name.endswith("_scale_inv")}


def run_mbridge(source: Path, out: Path) -> Outcome:
    """mbridge's AutoBridge: load_weights, save_weights."""
    from mbridge import AutoBridge
    from transformers import AutoConfig

    _let_mbridge_run_on_cpu()
    with single_rank():
        bridge = AutoBridge.from_config(AutoConfig.from_pretrained(source))
        bridge.set_extra_args(**CPU_CONFIG)
        models = bridge.get_model(wrap_with_ddp=False)
        return _measure(
            lambda: bridge.load_weights(models, str(source)),
            lambda: bridge.save_weights(models, str(out)),
            source,
            out,
        )


def _let_mbridge_run_on_cpu() -> None:
    import safetensors
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from mbridge.models.ext.deepseek_v3 import dequant_fp8_safetensor_io
    from megatron.core.transformer import MLATransformerConfig

    class RenamedField(MLATransformerConfig):
        """megatron-core 0.16 calls original_max_position_embeddings what mbridge calls max_position_embeddings."""

        def __init__(self, max_position_embeddings: int, **fields: Any) -> None:
            super().__init__(original_max_position_embeddings=max_position_embeddings, **fields)

    def open_on_cpu(file: str, framework: str, device: str) -> Any:  # noqa: ARG001
        return safetensors.safe_open(file, framework=framework, device="cpu")

    DeepseekV3Bridge.TransformerConfigClass = RenamedField
    # mbridge reads tensors to the GPU, and dequantises them with a Triton kernel.
    dequant_fp8_safetensor_io.safe_open = open_on_cpu
    dequant_fp8_safetensor_io.weight_dequant = _dequantise


def _dequantise(codes: torch.Tensor, scale: torch.Tensor, block_size: int = 128) -> torch.Tensor:
    rows, columns = codes.shape
    scales = scale.repeat_interleave(block_size, 0)[:rows].repeat_interleave(block_size, 1)[:, :columns]
    return (codes.float() * scales).to(torch.get_default_dtype())


def run_megatron_bridge(source: Path, out: Path) -> Outcome:
    """megatron-bridge's AutoBridge: load_hf_weights, save_hf_pretrained."""
    from megatron.bridge import AutoBridge

    with single_rank():
        bridge = AutoBridge.from_hf_pretrained(source)
        provider = bridge.to_megatron_provider(load_weights=False)
        for name, value in CPU_CONFIG.items():
            setattr(provider, name, value)
        models = provider.provide_distributed_model(wrap_with_ddp=False)
        return _measure(
            lambda: bridge.load_hf_weights(models),
            # Not strict, which would skip every file with a missing tensor.
            lambda: bridge.save_hf_pretrained(models, out, show_progress=False, strict=False),
            source,
            out,
        )


PEERS: Mapping[str, Callable[[Path, Path], Outcome]] = {
    "mbridge": run_mbridge,
    "megatron-bridge": run_megatron_bridge,
}


def main() -> None:
    """Run one peer once; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="HuggingFace folder to load")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to export to")
    options = parser.parse_args()
    device.install()
    transformer_engine_names.install()
    with contextlib.redirect_stdout(sys.stderr):
        outcome = PEERS[options.peer](options.hf, options.out)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
