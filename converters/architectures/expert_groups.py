"""Group-limited routing (DeepSeek-V2, arXiv 2405.04434, section 2.2.2): a token's experts come from a few groups."""

from converters.architectures.extensions import Extensions
from converters.architectures.hf_config import HuggingFaceConfig


def expert_groups(config: HuggingFaceConfig, *, scoring: int) -> dict[str, int]:
    """TransformerConfig fields that limit a token to the best `topk_group` of `n_group` groups of experts.

    The family scores a group by the sum of its `scoring` best experts: see `group_scores`. Raises UserError where the
    groups cannot be formed, scored, or hold the experts of a token.
    """
    groups, chosen = _groups(config)
    if groups == chosen:
        return {}
    topk = config["num_experts_per_tok"]
    if not 0 < chosen < groups or config.num_experts % groups or topk > chosen * (config.num_experts // groups):
        raise config.error(
            f"chooses {topk} of {config.num_experts} experts in {chosen} of {groups} groups (num_experts_per_tok,"
            " n_routed_experts, topk_group, n_group), which is not possible"
        )
    if scoring > config.num_experts // groups:
        raise config.error(
            f"scores a group by its best {scoring} experts, but its groups (n_group) hold"
            f" {config.num_experts // groups} of {config.num_experts}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def group_scores(config: HuggingFaceConfig, *, scoring: int) -> Extensions:
    """Extension that scores groups by their `scoring` best experts, where Megatron would sum another number of them."""
    groups, chosen = _groups(config)
    if groups == chosen or config["num_experts_per_tok"] // chosen == scoring:
        return Extensions()
    return Extensions(experts_in_group_score=scoring)


def _groups(config: HuggingFaceConfig) -> tuple[int, int]:
    return config.get("n_group", 1), config.get("topk_group", 1)
