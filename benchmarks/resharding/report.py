"""Builds the Markdown page of `refit.py`'s results."""

from collections.abc import Mapping

from resharding.tables import Results, markdown, sentences

_NOTES = """\
## What is compared

- A trainer with whole experts (ETP1) gives its weights to an engine, which cuts them. Every rank and every worker is a
  process of its own, with one thread for tensors; the values are bf16 (a router's bias fp32).
- The models have the widths of Qwen3-30B-A3B and of Moonlight-16B-A3B (DeepSeek-V3's architecture, here with its latent
  queries too), and few layers, experts and words; `qwen3_moe_wide` has experts of 1,024 rows, whole blocks of FP8 for
  each of four workers, and `qwen3_moe_thirds` heads and words of which three have equal shares.
  There are no layers of multi-token prediction.
- All contenders run in the same processes and take turns, each round beginning with another. Seconds go from the
  moment at which all ranks begin to the one at which the last has ended; CPU seconds are those of all ranks.
  Connections, plans and views are made before, once, as they are in a training run.
- Before the rounds everything that a contender wrote is wiped, written again and compared with what it must be, bit
  by bit.
- **memcpy** is the bare move: as many bytes between the same ranks, through the same segments of shared memory and in
  messages of the same sizes, but contiguous at both ends, and a byte through a pipe says that they are there. It copies
  as torch does: on an AMD EPYC the fastest of six ways, on an Intel Xeon no faster than memmove. Kernels that write
  past the caches, as megarl's do since 2026-11-24, can be faster than it.
- **direct** is megarl's refit (`megarl/resharding`): `Sender.send` and `Receiver.receive` from the beginning of a
  version until every message came, was found right by its CRC-32, and was written where it belongs. Work of the engine
  before and after, such as pausing and deriving values again, is not in it. Rows with "(gloo)" and "(rdma)" go through
  megarl's transports tcp and rdma, which are for ranks on different machines, the others through shared memory. For
  rdma UCX takes the memory of the machine where it may, and loopback where "sockets" leaves it nothing else. By rdma,
  large pieces that are contiguous at both ends skip the buckets, and only their checksums are taken.
- **direct, FP8** is the same refit into an engine that holds the matrices of its layers in block FP8: they are
  quantised where they are packed, and codes and scales travel. Here cores do it; a GPU does it in the pass that packs.
- **NIXL read** is the limit of rdma: as many bytes between the same ranks, in reads of the same sizes, two at once, but
  contiguous at both ends, there from the beginning, and nothing is packed, announced or verified. "With checksums" both
  ends take the CRC-32 of every message, too, by the same machine code: no verified refit by reads can take less where
  cores do all of it.
- **direct, changes** is `refit.delta=true`: before each run, and outside of its seconds, one element in 50 gets another
  last bit, which is between what a step does at a learning rate of 1e-6 (0.4 %) and at 2e-5 (3 %), as
  [weight_changes_cpu.md](weight_changes_cpu.md) says; what travels is the difference, deflated.
- **all-gather** is what verl and slime do unless told otherwise: the ranks of a pipeline stage gather whole HuggingFace
  tensors over gloo, bucket by bucket, and the first of them gives these to every worker, which copies its part; by a
  broadcast over gloo, or in shared memory that the workers map, as where trainer and engine share GPUs. It is kinder
  than they are: nothing is gathered that two ranks hold, only the rank that gives puts the tensors together, views are
  made once, and the stages work side by side. gloo goes through the loopback device, since it has no shared memory.
- **megatron.core.resharding** is that of the installed megatron-core, through its own gloo service, to ranks of
  Megatron that are cut as the engine; beside it megarl's refit to the same ranks, through shared memory and through
  gloo. It has no checksums and takes memory for all that a rank receives. It is given modules with Transformer Engine's
  parameter names, of which it needs names, shapes and marks only. Its plan is made before the rounds.
- Extra memory is RssAnon and RssShmem at their most, sampled every 3 ms from the opening of a contender to the end of
  its second run, over what the process held before. Shared memory counts for the trainer rank that made it.
"""


def page(facts: Mapping[str, str], results: Mapping[str, Results]) -> str:
    """The whole page; `facts` are lines such as date, machine and command."""
    parts = ["# Moving the trainer's weights into an engine, on a CPU\n"]
    parts += [f"{name}: {fact}\n" for name, fact in facts.items()]
    for model, of_model in results.items():
        parts += [f"## {model}, {of_model.model_bytes / 1e6:.0f} MB\n", markdown(of_model)]
        parts += [*(f"- {each}" for each in sentences(of_model)), ""]
    return "\n".join([*parts, _NOTES])
