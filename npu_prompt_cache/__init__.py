"""A prompt (prefix) cache for LLM inference on Ascend NPUs.

A request whose prompt begins like an earlier one reuses the K/V that is already on the device and prefills only
what is new. ``npc.enable(model)`` is the one line most programs need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from npu_prompt_cache.cache import Lease, Match, Pin, PromptCache, Stats
    from npu_prompt_cache.config import CacheConfig
    from npu_prompt_cache.errors import (
        AclError,
        CacheClosed,
        IntegrityError,
        LeaseReleased,
        PinLimitExceeded,
        PoolExhausted,
        PromptCacheError,
        RuntimeNotFound,
        UnsupportedModel,
    )
    from npu_prompt_cache.layout import KVLayout
    from npu_prompt_cache.template import Prompt, PromptTemplate

__version__ = "0.1.0"

__all__ = [
    "AclError",
    "CacheClosed",
    "CacheConfig",
    "IntegrityError",
    "KVLayout",
    "Lease",
    "LeaseReleased",
    "Match",
    "Pin",
    "PinLimitExceeded",
    "PoolExhausted",
    "Prompt",
    "PromptCache",
    "PromptCacheError",
    "PromptTemplate",
    "RuntimeNotFound",
    "Stats",
    "UnsupportedModel",
    "disable",
    "enable",
]

# Imported when they are first used: `npu_prompt_cache.sim` has to come before torch, which all of these import.
_MODULES = {
    "cache": ("Lease", "Match", "Pin", "PromptCache", "Stats"),
    "config": ("CacheConfig",),
    "errors": (
        "AclError",
        "CacheClosed",
        "IntegrityError",
        "LeaseReleased",
        "PinLimitExceeded",
        "PoolExhausted",
        "PromptCacheError",
        "RuntimeNotFound",
        "UnsupportedModel",
    ),
    "layout": ("KVLayout",),
    "template": ("Prompt", "PromptTemplate"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def enable(model: PreTrainedModel, **options: Any) -> PromptCache:
    """Gives a transformers model a prompt cache: `PromptCache.for_model` and `PromptCache.attach` in one.

    Args:
        model: a decoder-only transformers model.
        options: what `PromptCache.for_model` takes, such as ``max_gb=4``.

    Example:
        >>> import npu_prompt_cache as npc
        >>> cache = npc.enable(model)  # doctest: +SKIP
        >>> model.generate(**inputs)  # prefills only what no earlier prompt began with  # doctest: +SKIP
    """
    from npu_prompt_cache.cache import PromptCache

    cache = PromptCache.for_model(model, **options)
    try:
        cache.attach(model).owns_cache = True
    except BaseException:
        cache.close()
        raise
    return cache


def disable(model: PreTrainedModel) -> None:
    """Restores a model that `enable` or `PromptCache.attach` changed, and closes a cache that `enable` made.

    Raises:
        ValueError: no cache is attached to the model.
    """
    from npu_prompt_cache.integrations import transformers

    attachment = transformers.attachment_of(model)
    if attachment.owns_cache:
        attachment.cache.close()
    else:
        attachment.detach()
