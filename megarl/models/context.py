"""How many tokens an engine takes of a prompt and its response, as far as that is known before it starts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from converters.architectures.hf_config import HuggingFaceConfig
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.rollout import engine_kind
from megarl.schema import MegarlConfig


def known_context(config: MegarlConfig) -> int:
    """Tokens that the engine's arguments limit a prompt and its response to, or else the model's config.json.

    With YaRN (arXiv 2309.00071) engines take the stretched length, whatever `max_position_embeddings` says of it.
    """
    if given := engine_kind(config.rollout.engine).context(config.rollout.engine_args):
        return given
    model = HuggingFaceConfig(read_json(Path(config.model.path) / CONFIG))
    rope, longest = model.rope, model["max_position_embeddings"]
    is_stretched = rope["rope_type"] == "yarn"
    return max(longest, int(rope["factor"] * rope["original_max_position_embeddings"])) if is_stretched else longest


def check_context(config: MegarlConfig, prompts: Iterable[Sequence[int]]) -> None:
    """Raise UserError if the longest prompt and a response of the longest kind do not fit an engine's context."""
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
