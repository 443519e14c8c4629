"""Which models the cache serves, and the geometry of their K/V."""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch._dynamo import OptimizedModule
from transformers import GenerationMixin, PreTrainedModel

from npu_prompt_cache.errors import UnsupportedModel
from npu_prompt_cache.integrations.transformers import adapters
from npu_prompt_cache.integrations.transformers.rotary import DYNAMIC, LONG, rotary_kinds, rotary_lengths
from npu_prompt_cache.layout import SUPPORTED_DTYPES, KVLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Model types whose code was read for this: a token's K/V depend on weights, tokens and ``position_ids`` alone, and
#: attention is causal over ``cache.update``'s keys and of a kind that `AttentionKind` has, through the registries of
#: attention and mask functions (but for `_MASKED`). Each is tested against its uncached self; that alone is not enough.
SUPPORTED_MODEL_TYPES = (
    "afmoe",
    "apertus",
    "apertus1p5_text",
    "arcee",
    "aria_text",
    "axk1",
    "beam",
    "bert",
    "bert-generation",
    "biogpt",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "dots1",
    "electra",
    "emu3_text_model",
    "ernie",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "falcon",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jetmoe",
    "kolibri1",
    "laguna",
    "llama",
    "llama4_text",
    "longcat_flash",
    "megatron-bert",
    "mellum",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "rembert",
    "sarvam_mla",
    "sarvam_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
)
#: What a layer's queries may see: every token so far, the last ones, those of their own chunk.
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
#: Model types of which text is a part, and which of their inputs are media: those whose code was read for it. What a
#: medium's embeddings depend on is in its digest (`media`), and attention among its tokens is causal as among others.
SUPPORTED_MEDIA_TYPES = ("llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
#: What may encode the images of those that take an encoder of any type.
_TOWERS = ("clip_vision_model", "siglip_vision_model")
#: What the text parts of these are, besides models that are served by themselves.
_TEXT_PARTS = ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text")
#: Of these, types that make something else of the keys and values of all tokens before they attend: they expand
#: latents, repeat heads in an order of their own, attend twice. ``cache.update`` gives them the rows of all tokens.
_GATHERED = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "diffllama",
        "glm4_moe_lite",
        "jetmoe",
        "longcat_flash",
        "minicpm3",
        "sarvam_mla",
        "youtu",
    }
)
#: Of these, types whose attention is code of their own, outside the registry: it runs over the rows of all tokens of
#: all sequences, under a mask.
_MASKED = frozenset({"falcon", "gpt_neox_japanese", "megatron-bert", "rembert"})
#: Rotary scalings under which a token's key depends on nothing but the token's position, or in ways that are known.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "ntk_alpha", "proportional", "yarn", LONG, DYNAMIC)
#: What a forward must take for rows to be packed: positions of each token, and which logits are wanted.
_NEEDED_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "cache", "logits_to_keep")
#: What a module that knows transformers' registry of attention functions calls it.
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
#: Why some of the others do not stand there.
_REFUSED_BECAUSE = {
    "blt": "puts bytes together to patches before it attends",
    "camembert": "counts positions from its padding token on",
    "data2vec-text": "counts positions from its padding token on",
    "doge": "adds a mask of its own to attention",
    "dory": "runs its layers several times over",
    "gemma3n_text": "has layers that attend over K/V of other layers",
    "gemma4_text": "has layers that attend over K/V of other layers",
    "gemma4_unified_text": "has layers that attend over K/V of other layers",
    "git": "reads images too: equal token ids need not mean equal input",
    "hrm_text": "runs its layers several times over",
    "lfm2": "may have convolutions, whose state is no K/V",
    "lfm2_moe": "may have convolutions, whose state is no K/V",
    "minimax_m3_vl_text": "may attend to chosen blocks of keys only",
    "mllama_text_model": "has layers that attend to images",
    "moshi": "attends to tokens that transformers' own cache drops: its answers depend on how a prompt is cut",
    "phi4_multimodal": "reads images and sounds too: equal token ids need not mean equal input",
    "roberta": "counts positions from its padding token on",
    "roberta-prelayernorm": "counts positions from its padding token on",
    "roc_bert": "reads shapes and sounds of its tokens too",
    "xlm-roberta": "counts positions from its padding token on",
    "xlm-roberta-xl": "counts positions from its padding token on",
    "xmod": "counts positions from its padding token on",
}
#: What the original attention may be; ours is registered once for each.
SUPPORTED_ATTENTION = ("sdpa", "eager")

#: What the name of our attention function begins with, before the name of the model's own.
ATTENTION_PREFIX = "npu_prompt_cache|"


class Way(Enum):
    """How a model attends over what is in the pool."""

    PAGED = "over the pool's blocks, for it"
    GATHERED = "over what it makes of the rows of all tokens, for it"
    MASKED = "by itself, over the rows of all tokens and under a mask"


def way_of(config: PreTrainedConfig) -> Way:
    """The way of a supported model."""
    if config.model_type in _MASKED:
        return Way.MASKED
    return Way.GATHERED if config.model_type in _GATHERED else Way.PAGED


def layout_of(model: PreTrainedModel, block_size: int = 128) -> KVLayout:
    """The K/V geometry of a supported model.

    Raises:
        UnsupportedModel: its K/V cannot be cached correctly; the message names the model and the reason.
    """
    config = check_supported(model)
    model = inner_model(model)
    num_kv_heads, head_dim, value_head_dim = _sizes(config)
    return KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=model.dtype,
        block_size=block_size,
    )


def inner_model(model: Any) -> Any:
    """The transformers model inside what peft or torch.compile made of it, or `model` itself."""
    while True:
        inside = model._orig_mod if isinstance(model, OptimizedModule) else adapters.adapted_model(model)
        if inside is model:
            return model
        model = inside


def _sizes(config: PreTrainedConfig) -> tuple[int, int, int | None]:
    """Of what a layer gives to ``cache.update``: heads, elements of one of K, and of V where they are others."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return 1, config.kv_lora_rank, config.qk_rope_head_dim
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type == "falcon":
        if config.new_decoder_architecture or not config.multi_query:
            return heads, head_dim, None
        return 1, head_dim, None
    return getattr(config, "num_key_value_heads", None) or heads, head_dim, None


def check_supported(model: PreTrainedModel) -> PreTrainedConfig:
    """Returns the config of the model's text part, or raises `UnsupportedModel` with the reason."""
    given = model
    virtual = adapters.virtual_tokens(model)
    model = inner_model(model)

    def refuse(reason: str) -> None:
        raise unsupported(given, reason)

    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        refuse("it is not a transformers model with generate() (attach the ...ForCausalLM class)")
    if virtual is not None:
        refuse(f"its adapter {virtual} puts virtual tokens before the prompt, which have no ids")
    has_media = model.config.model_type in SUPPORTED_MEDIA_TYPES
    config = text_config(model) if has_media else model.config
    text: Any = model.base_model.language_model if has_media else model
    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder: its decoder's K/V depend on the encoder's input, not on token ids alone")
    if others := set(getattr(config, "layer_types", None) or ()) - set(SUPPORTED_LAYER_TYPES):
        refuse(f"it has layers of type {', '.join(sorted(others))}; served are {', '.join(SUPPORTED_LAYER_TYPES)}")
    takes = inspect.signature(type(model).forward).parameters
    if missing := [argument for argument in _NEEDED_ARGUMENTS if argument not in takes]:
        refuse(f"its forward takes no {', '.join(missing)}")
    if config.model_type not in _MASKED and not any(
        hasattr(sys.modules.get(type(part).__module__), _REGISTRY) for part in model.modules()
    ):
        refuse("its attention does not go through transformers' registry of attention functions")
    if config.get_text_config() is not config:
        refuse("text is only a part of what it reads: equal token ids need not mean equal input")
    if getattr(config, "attn_temperature_tuning", False):
        refuse("it scales queries by their column, padding included (attn_temperature_tuning=True)")
    if getattr(config, "alibi", False):
        refuse("it adds ALiBi to the mask of its attention (alibi=True)")
    if getattr(config, "reorder_and_upcast_attn", False):
        refuse("it may pass by the registry of attention functions (reorder_and_upcast_attn=True)")
    if config.model_type not in SUPPORTED_MODEL_TYPES and not (has_media and config.model_type in _TEXT_PARTS):
        reason = _REFUSED_BECAUSE.get(config.model_type, "is not known to be right with it; README.md lists what is")
        refuse(f"model_type {config.model_type!r} {reason}")
    if has_media and config.model_type in _MASKED:
        refuse(f"model_type {config.model_type!r} is not served where a model reads images besides text")
    if getattr(config, "add_cross_attention", False):
        refuse("it has cross-attention: its K/V depend on an encoder's input, not on token ids alone")
    tower: Any = getattr(model.base_model, "vision_tower", None)
    if has_media and tower is not None and tower.config.model_type not in _TOWERS:
        refuse(f"a {tower.config.model_type!r} encodes its images; what is served is {', '.join(_TOWERS)}")
    if not all(getattr(module, "is_causal", True) for module in text.modules()):
        refuse("it is an encoder: its tokens attend to later ones")
    if has_media and not rotary_lengths(model).are_fixed:
        refuse("its rotary positions depend on lengths, and media among its tokens do not count as tokens")
    for rope in sorted({kind for _, _, kind in rotary_kinds(text)} - set(SUPPORTED_ROPE_TYPES)):
        refuse(f"rope_type {rope!r} is not one of {', '.join(SUPPORTED_ROPE_TYPES)}: keys may depend on the length")
    for reason in filter(None, map(adapters.refusal, model.modules())):
        refuse(reason)
    if model.dtype not in SUPPORTED_DTYPES:
        refuse(f"its dtype {model.dtype} is not one of {', '.join(str(dtype) for dtype in SUPPORTED_DTYPES)}")
    own = original_attention(config._attn_implementation)
    if own not in SUPPORTED_ATTENTION:
        refuse(f"attn_implementation {own!r} is not one of {', '.join(SUPPORTED_ATTENTION)}")
    return config


def unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    """The error that says why a model cannot be served."""
    return UnsupportedModel(f"{type(model).__name__} cannot use the prompt cache: {reason}")


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the part that has the K/V: the model's own where it reads nothing but text."""
    config = model.config
    return config.text_config if config.model_type in SUPPORTED_MEDIA_TYPES else config


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention implementation of the part that has the K/V; a vision tower keeps its own."""
    is_part = text_config(model) is not model.config
    model.set_attn_implementation({"text_config": name} if is_part else name)


def original_attention(name: str | None) -> str:
    """The model's own attention implementation, also while ours is set."""
    return (name or "eager").removeprefix(ATTENTION_PREFIX)


def attention_is_served(config: PreTrainedConfig) -> bool:
    """True while attention is ours where it must be, or a kind that is served: somebody may have set another one."""
    if way_of(config) is Way.MASKED:
        return config._attn_implementation in SUPPORTED_ATTENTION
    return is_ours(config._attn_implementation)


def is_ours(name: str | None) -> bool:
    """True while our attention function is set: somebody may have set another one over it."""
    return (name or "").startswith(ATTENTION_PREFIX)
