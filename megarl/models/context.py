"""Context length of an engine, as far as it is known before the engine starts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from converters.architectures.hf_config import HuggingFaceConfig
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.rollout import engine_kind
from megarl.schema import MegarlConfig


def known_context(config: MegarlConfig) -> int:
    """Most tokens of a prompt and its response, by the engine's arguments or else by the model's config.json.

    With YaRN (arXiv:2309.00071) engines use the extended length, even if `max_position_embeddings` is the original one.
    """
    if given := engine_kind(config.rollout.engine).context(config.rollout.engine_args):
        return given
    model = HuggingFaceConfig(read_json(Path(config.model.path) / CONFIG))
    rope, longest = model.rope, model["max_position_embeddings"]
    is_stretched = rope["rope_type"] == "yarn"
    return max(longest, int(rope["factor"] * rope["original_max_position_embeddings"])) if is_stretched else longest


def check_context(config: MegarlConfig, prompts: Iterable[Sequence[int]]) -> None:
    """Raise UserError if the longest prompt and a response of full length do not fit into an engine's context."""
    limit, response = known_context(config), config.rollout.max_response_tokens
    prompt = max(map(len, prompts), default=0)
    if prompt + response > limit:
        argument = engine_kind(config.rollout.engine).context_argument
        given = argument in config.rollout.engine_args
        source = f"rollout.engine_args.{argument}={limit}" if given else f"the {limit} tokens that the model takes"
        raise UserError(
            f"a prompt of {prompt} tokens and rollout.max_response_tokens={response} new ones do not fit {source}:"
            f" lower rollout.max_response_tokens{f' or raise rollout.engine_args.{argument}' if given else ''}"
        )
