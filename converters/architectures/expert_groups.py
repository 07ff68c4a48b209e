"""Group-limited routing (DeepSeek-V2, arXiv 2405.04434, section 2.2.2): a token's experts come from a few groups."""

from converters.architectures.hf_config import HuggingFaceConfig


def expert_groups(config: HuggingFaceConfig, *, scoring: int) -> dict[str, int]:
    """TransformerConfig fields that limit a token to the best `topk_group` of `n_group` groups of experts.

    The family scores a group by the sum of its `scoring` best experts. Raises UserError where megatron-core, which
    takes the best `num_experts_per_tok // topk_group`, would choose other groups.
    """
    groups, chosen = config.get("n_group", 1), config.get("topk_group", 1)
    if groups == chosen:
        return {}
    topk = config["num_experts_per_tok"]
    if config.num_experts % groups or not 0 < chosen < groups or topk > chosen * (config.num_experts // groups):
        raise config.error(
            f"chooses {topk} of {config.num_experts} experts in {chosen} of {groups} groups (num_experts_per_tok,"
            " n_routed_experts, topk_group, n_group), which is not possible"
        )
    if topk // chosen != scoring:
        raise config.error(
            f"chooses {topk} experts in {chosen} groups, each scored by its best {scoring}: Megatron scores groups by"
            f" the best num_experts_per_tok // topk_group = {topk // chosen} and would choose others"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
