"""Every causal language model of transformers, tiny."""

from __future__ import annotations

import torch
from tiny import PAD, VOCABULARY
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = 3
#: Tokens of a sliding window, and of a chunk.
WINDOW = 24

#: What sizes are called. A config is given those of these names that it has.
SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    "qk_rope_head_dim": 8,
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    "sliding_window": WINDOW,
    # Large enough that every logit depends on every token before it, and that greedy text is no near-tie.
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
}

#: Layers of every kind that a type may have: with a window first, so that what follows depends on it.
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_CHOSEN = {"use_sliding_window": True, "max_window_layers": 1}
#: Of models that cache latents: `head_dim` is that of what rotary positions turn.
_LATENTS = {"head_dim": 8, "num_key_value_heads": 4}
#: What some need besides.
TWEAKS: dict[str, dict[str, object]] = {
    "afmoe": _MIXED | {"num_dense_layers": 1},
    "beam": _MIXED,
    "codegen": {"rotary_dim": 8},
    "cohere2": _MIXED,
    "cohere2_moe": _MIXED,
    "cwm": _MIXED,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": _MIXED | {"num_key_value_heads": 2},
    "exaone4": _MIXED,
    "exaone_moe": _MIXED,
    "flint": _MIXED,
    "gemma2": _MIXED | {"attn_logit_softcapping": 1.0},
    "gemma3_text": _MIXED,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_oss": _MIXED,
    "gptj": {"rotary_dim": 8},
    # At their default of 1, scores are so large that float32 rounds logits by 1e-4, with and without the cache.
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "granite_swa": _MIXED | {"attention_multiplier": 0.25},
    "granitemoe_swa": _MIXED | {"attention_multiplier": 0.25},
    "kolibri1": _MIXED,
    "laguna": _MIXED | {"num_attention_heads_per_layer": [4, 8, 4]},
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "attention_chunk_size": WINDOW,
        "attn_temperature_tuning": False,
    },
    "mellum": _MIXED,
    "ministral": _MIXED,
    "modernbert-decoder": _MIXED,
    "olmo3": _MIXED,
    "qwen2": _CHOSEN,
    "qwen2_moe": _CHOSEN,
    "qwen3": _CHOSEN,
    "qwen3_moe": _CHOSEN,
    **dict.fromkeys(
        (
            "axk1",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "longcat_flash",
            "minicpm3",
            "sarvam_mla",
            "youtu",
        ),
        _LATENTS,
    ),
    "reformer": {"is_decoder": True},
    "smollm3": _CHOSEN | {"no_rope_layers": [0, 1, 0]},
    "vaultgemma": _MIXED | {"attn_logit_softcapping": 1.0},
}
#: Where small sizes contradict one another. They are refused for what they are, so that no weights are needed.
AS_IT_COMES = frozenset(
    {
        "deepseek_v4",
        "dots3_note",
        "dots3_note_text",
        "gemma3n_text",
        "gemma4",
        "gemma4_assistant",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_assistant",
        "gemma4_unified_text",
        "gpt_neo",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_text",
        "mamba2",
        "prophetnet",
        "reformer",
        "xlnet",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    }
)
#: Why there is none to look at: nobody else can load these as causal models either, but for gemma3n.
NOT_BUILDABLE = {
    "cohere_compass_text": "its class asks its own default config for layers that it has not",
    "gemma3n": "it needs timm",
    "musicgen": "its class takes another config than the one of its type",
    "musicgen_melody": "its class takes another config than the one of its type",
}
#: The type of the model that it is loaded as, where that is another: its text part alone.
LOADED_AS = {"emu3": "emu3_text_model"}


def tiny_config_of(model_type: str, **changes: object) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    if model_type in AS_IT_COMES:
        return kind(**TWEAKS.get(model_type, {}))
    return _tiny(kind, {**TWEAKS.get(model_type, {}), **changes})


def _tiny(kind: type[PreTrainedConfig], changes: dict[str, object]) -> PreTrainedConfig:
    default = kind()
    sizes = {name: size for name, size in SIZES.items() if hasattr(default, name) and not _is_computed(kind, name)}
    for name, part in kind.sub_configs.items():
        if getattr(default, name, None) is not None and name not in changes:
            sizes[name] = _tiny(type(getattr(default, name)) if part is AutoConfig else part, {})
    return kind(**{**sizes, **changes})


def _is_computed(kind: type[PreTrainedConfig], name: str) -> bool:
    found = getattr(kind, name, None)
    return isinstance(found, property) and found.fset is None


def build(config: PreTrainedConfig, device: str = "cpu", **options: object) -> PreTrainedModel:
    torch.manual_seed(1)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, **options).eval()
