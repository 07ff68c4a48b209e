"""Weight maps of the blocks that many architectures share, in HuggingFace's usual names."""

from collections.abc import Iterable

from converters.architectures.weight_map import Kind, Parameter, Part

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_EXPERT_LOCAL = _MEGATRON + "mlp.experts.local_experts.{expert}."
_EXPERTS_TE = _MEGATRON + "mlp.experts."
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""HuggingFace's usual names of the matrices of an MLP, or of an expert."""


def embedding_and_output(*, tied: bool) -> tuple[Parameter, ...]:
    """The token embedding, the last norm and the output layer, which `tied` makes a copy of the embedding."""
    embedding = (("model.embed_tokens.weight", ("vocabulary", "hidden")),)
    output = embedding if tied else (("lm_head.weight", ("vocabulary", "hidden")),)
    return (
        Parameter("embedding.word_embeddings.weight", embedding, Kind.VOCABULARY, Part.FIRST),
        Parameter("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),), Kind.REPLICATED, Part.LAST),
        Parameter("output_layer.weight", output, Kind.VOCABULARY, Part.COPY_ON_LAST if tied else Part.LAST),
    )


def grouped_query_attention(
    layers: Iterable[int], *, qk_norm: bool = False, qkv_bias: bool = False
) -> tuple[Parameter, ...]:
    """Attention with separate query, key and value projections (arXiv 2305.13245), after a norm."""
    hf, megatron = _HF + "self_attn.", _MEGATRON + "self_attention."
    layers = frozenset(layers)

    def qkv(name: str, *inputs: str) -> Parameter:
        return Parameter(
            f"{megatron}linear_qkv.{name}",
            (
                (f"{hf}q_proj.{name}", ("query", *inputs)),
                (f"{hf}k_proj.{name}", ("key_value", *inputs)),
                (f"{hf}v_proj.{name}", ("key_value", *inputs)),
            ),
            Kind.QKV,
            layers=layers,
        )

    norms = [
        Parameter(
            f"{megatron}{x}_layernorm.weight",
            ((f"{hf}{x}_norm.weight", ("head",)),),
            Kind.REPLICATED,
            layers=layers,
        )
        for x in ("q", "k")
    ]
    return (
        _norm("input_layernorm", "input_layernorm", layers, fused_into="self_attention.linear_qkv"),
        qkv("weight", "hidden"),
        *((qkv("bias"),) if qkv_bias else ()),
        *(norms if qk_norm else ()),
        _linear(megatron + "linear_proj.weight", hf + "o_proj.weight", ("hidden", "query"), Kind.ROW, layers),
    )


def latent_attention(layers: Iterable[int], *, low_rank_query: bool) -> tuple[Parameter, ...]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), after a norm.

    The down projections are small and duplicated on every tensor-parallel rank.
    """
    hf, megatron = _HF + "self_attn.", _MEGATRON + "self_attention."
    layers = frozenset(layers)

    def latent_norm(hf_name: str, name: str, dimension: str) -> Parameter:
        return Parameter(
            f"{megatron}{name}_layernorm.weight",
            ((hf + hf_name, (dimension,)),),
            Kind.REPLICATED,
            layers=layers,
            transformer_engine=f"{megatron}linear_{name}_up_proj.layer_norm_weight",
        )

    def linear(name: str, hf_name: str, shape: tuple[str, str], kind: Kind) -> Parameter:
        return _linear(f"{megatron}linear_{name}.weight", f"{hf}{hf_name}.weight", shape, kind, layers)

    query = (
        linear("q_down_proj", "q_a_proj", ("query_latent", "hidden"), Kind.REPLICATED),
        latent_norm("q_a_layernorm.weight", "q", "query_latent"),
        linear("q_up_proj", "q_b_proj", ("query", "query_latent"), Kind.COLUMN),
    )
    return (
        _norm("input_layernorm", "input_layernorm", layers),
        *(query if low_rank_query else (linear("q_proj", "q_proj", ("query", "hidden"), Kind.COLUMN),)),
        linear("kv_down_proj", "kv_a_proj_with_mqa", ("key_value_latent_and_rope", "hidden"), Kind.REPLICATED),
        latent_norm("kv_a_layernorm.weight", "kv", "key_value_latent"),
        linear("kv_up_proj", "kv_b_proj", ("key_value_up", "key_value_latent"), Kind.COLUMN),
        linear("proj", "o_proj", ("hidden", "value"), Kind.ROW),
    )


def dense_mlp(layers: Iterable[int], norm: str = "post_attention_layernorm") -> tuple[Parameter, ...]:
    """A gated MLP after a norm, which HuggingFace calls `norm`; empty without such layers."""
    layers = frozenset(layers)
    if not layers:
        return ()
    return (
        _norm(norm, "pre_mlp_layernorm", layers, fused_into="mlp.linear_fc1"),
        *_gated_mlp(_HF + "mlp.", _MEGATRON + "mlp.", "ffn", layers),
    )


def mixture_of_experts(
    layers: Iterable[int],
    *,
    expert_bias: bool = False,
    shared_experts: bool = False,
    hf_module: str = "mlp",
    hf_projections: tuple[str, str, str] = GATE_UP_DOWN,
) -> tuple[Parameter, ...]:
    """A router and gated experts after a norm; empty without such layers.

    With `expert_bias`, the router's balancing bias (arXiv 2408.15664). HuggingFace calls the whole `hf_module` and the
    projections of an expert `hf_projections`: gate, up and down.
    """
    layers, hf = frozenset(layers), f"{_HF}{hf_module}."
    if not layers:
        return ()
    bias = Parameter(
        _MEGATRON + "mlp.router.expert_bias",
        ((hf + "gate.e_score_correction_bias", ("experts",)),),
        Kind.REPLICATED,
        layers=layers,
        float32=True,
        is_buffer=True,
    )
    shared = _gated_mlp(hf + "shared_experts.", _MEGATRON + "mlp.shared_experts.", "shared_expert_ffn", layers)
    router = _linear(
        _MEGATRON + "mlp.router.weight", f"{hf}gate.weight", ("experts", "hidden"), Kind.REPLICATED, layers
    )
    return (
        _norm("post_attention_layernorm", "pre_mlp_layernorm", layers),
        router,
        *((bias,) if expert_bias else ()),
        *_gated_mlp(hf + "experts.{expert}.", _EXPERT_LOCAL, "expert_ffn", layers, hf_projections, grouped=_EXPERTS_TE),
        *(shared if shared_experts else ()),
    )


def _norm(hf_name: str, name: str, layers: frozenset[int], fused_into: str | None = None) -> Parameter:
    return Parameter(
        f"{_MEGATRON}{name}.weight",
        ((f"{_HF}{hf_name}.weight", ("hidden",)),),
        Kind.REPLICATED,
        layers=layers,
        transformer_engine=fused_into and f"{_MEGATRON}{fused_into}.layer_norm_weight",
    )


def _linear(megatron: str, hf: str, shape: tuple[str, str], kind: Kind, layers: frozenset[int]) -> Parameter:
    return Parameter(megatron, ((hf, shape),), kind, layers=layers)


def _gated_mlp(
    hf: str,
    megatron: str,
    ffn: str,
    layers: frozenset[int],
    hf_projections: tuple[str, str, str] = GATE_UP_DOWN,
    grouped: str | None = None,
) -> tuple[Parameter, Parameter]:
    gate, up, down = (f"{hf}{name}.weight" for name in hf_projections)
    return (
        Parameter(
            megatron + "linear_fc1.weight",
            ((gate, (ffn, "hidden")), (up, (ffn, "hidden"))),
            Kind.GATED,
            layers=layers,
            transformer_engine=grouped and grouped + "linear_fc1.weight{expert}",
        ),
        Parameter(
            megatron + "linear_fc2.weight",
            ((down, ("hidden", ffn)),),
            Kind.ROW,
            layers=layers,
            transformer_engine=grouped and grouped + "linear_fc2.weight{expert}",
        ),
    )
