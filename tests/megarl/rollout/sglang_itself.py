"""Program: print what the installed SGLang has and does itself, as JSON.

It runs in the environment that has SGLang: `python sglang_itself.py`.
"""

import json

from megarl.rollout.sglang import cpu

cpu.install()

from sglang.srt.arg_groups.arg_utils import record_fields  # noqa: E402 (what it needs is above)
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402


def main():
    found = {
        "arguments": [field.name for field in record_fields(ServerArgs)],
        "sampling": {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
