"""Which key of a config.json holds what: one table of names a field.

The names come from the configs that aiconfigurator-core 0.12.0 bundles, from the config classes of
transformers 5.24.0 (all 95 with experts were read), and from the models of the sglang 0.5.23 wheel
(`sglang/srt/models`). A model that uses a new name needs a line here and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELD_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_routed_experts",
        "num_moe_experts",
    ),
    "topk": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "experts_per_token",
        "num_selected_experts",
        "num_activated_experts",
    ),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "latent_size": ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size"),
    "intermediate_size": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "expert_intermediate_size",
        "expert_hidden_dim",
        "moe_ffn_hidden_size",
    ),
    "num_shared_experts": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    "shared_intermediate_size": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    ),
    "num_layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "activation": ("mlp_hidden_act", "hidden_act", "hidden_activation"),
    "activation_dtype": ("dtype", "torch_dtype"),
}
"""Field to the keys that may hold it."""

NESTS = (
    "text_config",
    "thinker_config",
    "language_config",
    "llm_config",
    "language_model_config",
    "text_model_config",
    "llm",
    "language_model",
    "ffn_config",
    "moe_config",
)
"""Keys under which a config holds the config of its language model, or of its experts."""

NO_NESTS = (
    "vision",
    "audio",
    "talker",
    "code2wav",
    "token2wav",
    "speech",
    "tts",
    "draft",
    "mtp",
    "nextn",
    "quant",
    "compression",
    "generation",
    "projector",
    "backbone",
    "per_layer",
    "encoder",
    "sparse_attention",
)
"""Parts of the names of nested configs whose experts are not those of the language model."""

SWITCHES = ("enable_moe_block", "is_moe")
"""Keys that turn the experts off when they are false (Gemma-4, Doge)."""

# Where the size of an expert stands under a key that elsewhere means the dense layers, by
# `model_type` or architecture. transformers 5.24.0 modeling_*.py and sglang 0.5.23 models/*.py.
_INTERMEDIATE = [
    "mixtral",
    "mixtralforcausallm",
    "quantmixtralforcausallm",
    "gpt_oss",
    "gptossforcausallm",
    "openai_privacy_filter",
    "minimax_m2",
    "minimaxm2forcausallm",
    "minimax_m3",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "minimaxm3forcausallm",
    "minimaxm3sparseforcausallm",
    "minimaxm3sparseforconditionalgeneration",
    "minimax",
    "minimax_text_01",
    "minimaxtext01forcausallm",
    "minimaxforcausallm",
    "llama4",
    "llama4_text",
    "llama4forconditionalgeneration",
    "llama4forcausallm",
    "phimoe",
    "phimoeforcausallm",
    "olmoe",
    "olmoeforcausallm",
    "flex_olmo",
    "flexolmoforcausallm",
    "jamba",
    "jambaforcausallm",
    "jetmoe",
    "jetmoeforcausallm",
    "aria_text",
    "cohere2_moe",
    "cohere2moeforcausallm",
    "granitemoe",
    "granitemoeforcausallm",
    "granitemoeshared",
    "granitemoesharedforcausallm",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoehybridforcausallm",
    "grok-1",
    "grok1forcausallm",
    "grok1modelforcausallm",
    "xverse",
    "xversemoeforcausallm",
    "iquest_q1",
]
EXPERT_SIZE_KEYS: Mapping[str, str] = {
    **dict.fromkeys(_INTERMEDIATE, "intermediate_size"),
    "dbrx": "ffn_hidden_size",
    "dbrxforcausallm": "ffn_hidden_size",
}
"""Kind of model to the key that holds the size of one expert when no key of the table does."""

# sglang 0.5.23 models/nemotron_h.py (is_gated=False); vllm 0.33.0 models/nemotron_h.py.
NOT_GATED = frozenset({"nemotron_h", "nemotronhforcausallm", "nemotronhpuzzleforcausallm"})
"""Kinds of model whose experts have no gate: the up kernel writes N columns, not 2N."""

UNGATED_ACTIVATIONS = frozenset({"relu2", "relu_squared", "squared_relu"})
"""Activations that are used with a gate by some models and without by others."""

# sglang 0.5.23 models/gpt_oss.py (with_bias=True).
BIASED = frozenset({"gpt_oss", "gptossforcausallm", "openai_privacy_filter"})
"""Kinds of model whose experts have biases."""

# The module of the routed experts below a layer, where it is not mlp.experts: the names in the
# checkpoints' own lists of modules (aiconfigurator-core 0.12.0) and in sglang 0.5.23 models/*.py.
EXPERT_CONTAINERS: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "mixtral",
            "minimax_m2",
            "minimax_m3",
            "minimax_m3_vl",
            "minimaxm3sparseforconditionalgeneration",
            "grok-1",
            "granitemoe",
            "granitemoehybrid",
            "phimoe",
            "kimi_linear",
            "kimilinearforcausallm",
        ],
        "block_sparse_moe.experts",
    ),
    **dict.fromkeys(("llama4", "llama4_text", "jamba", "lfm2_moe"), "feed_forward.experts"),
    **dict.fromkeys(("nemotron_h", "nemotronhforcausallm"), "mixer.experts"),
    **dict.fromkeys(("deepseek_v4", "deepseekv4forcausallm"), "ffn.experts"),
    **dict.fromkeys(("gemma4", "gemma4_text", "diffusion_gemma_text"), "experts"),
}
"""Kind of model to the module of its routed experts."""
