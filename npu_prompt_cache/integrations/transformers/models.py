"""Which models the cache serves, and the geometry of their K/V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import GenerationMixin, PreTrainedModel

from npu_prompt_cache.errors import UnsupportedModel
from npu_prompt_cache.layout import SUPPORTED_DTYPES, KVLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Model types whose attention is known to be: rotary positions from ``position_ids``, full causal attention over
#: ``cache.update``'s keys, through the attention registry. Each is tested against its uncached self.
SUPPORTED_MODEL_TYPES = (
    "arcee",
    "glm",
    "granite",
    "helium",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
#: Rotary scalings under which a token's key depends on nothing but the token's position.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: What the original attention may be; ours is registered once for each.
SUPPORTED_ATTENTION = ("sdpa", "eager")

#: What the name of our attention function begins with, before the name of the model's own.
ATTENTION_PREFIX = "npu_prompt_cache|"


def layout_of(model: PreTrainedModel, block_size: int = 128) -> KVLayout:
    """The K/V geometry of a supported model.

    Raises:
        UnsupportedModel: its K/V cannot be cached correctly; the message names the model and the reason.
    """
    config = check_supported(model)
    heads = config.num_attention_heads
    return KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        block_size=block_size,
    )


def check_supported(model: PreTrainedModel) -> PreTrainedConfig:
    """Returns the model's config, or raises `UnsupportedModel` with the reason."""
    name = type(model).__name__

    def refuse(reason: str) -> None:
        raise UnsupportedModel(f"{name} cannot use the prompt cache: {reason}")

    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        refuse("it is not a transformers model with generate() (attach the ...ForCausalLM class)")
    config = model.config
    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder: its decoder's K/V depend on the encoder's input, not on token ids alone")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        refuse(f"it has layers of type {', '.join(sorted(kinds - {'full_attention'}))}; only full attention is served")
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        refuse(f"it attends over a sliding window (sliding_window={config.sliding_window})")
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        refuse(f"model_type {config.model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in SUPPORTED_ROPE_TYPES:
        refuse(f"rope_type {rope!r} makes keys depend on the length of the sequence")
    if getattr(model, "_hf_peft_config_loaded", False):
        refuse("it has adapters loaded, which change what K/V depend on")
    if any("base_layer" in module._modules for module in model.modules()):
        refuse("it has adapter layers, whose being switched on and off cannot be seen")
    if model.dtype not in SUPPORTED_DTYPES:
        refuse(f"its dtype {model.dtype} is not one of {', '.join(str(dtype) for dtype in SUPPORTED_DTYPES)}")
    own = original_attention(config._attn_implementation)
    if own not in SUPPORTED_ATTENTION:
        refuse(f"attn_implementation {own!r} is not one of {', '.join(SUPPORTED_ATTENTION)}")
    return config


def original_attention(name: str | None) -> str:
    """The model's own attention implementation, also while ours is set."""
    return (name or "eager").removeprefix(ATTENTION_PREFIX)


def is_ours(name: str | None) -> bool:
    """True while our attention function is set: somebody may have set another one over it."""
    return (name or "").startswith(ATTENTION_PREFIX)
