"""Our attention function in transformers' registries, and the forward that it serves."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from npu_prompt_cache.errors import UnsupportedModel
from npu_prompt_cache.integrations.transformers.models import ATTENTION_PREFIX, SUPPORTED_ATTENTION

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from npu_prompt_cache.attention import PagedBatch
    from npu_prompt_cache.cache import PromptCache


#: What models tell their attention that says nothing about who attends to what, or how: the batch knows where tokens
#: stand. False and None say nothing either; whatever else is said must not be left out, and is refused.
_SAYS_NOTHING = frozenset({"position_ids", "use_cache"})


class PagedForward:
    """One forward over the pool: the packed batch, and which layers have written and read it."""

    def __init__(self, cache: PromptCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._attended = 0
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The new tokens' K/V, each ``[1, kv_heads, tokens, head_dim]``, into their slots."""
        self._batch.write(self._cache.key(layer), self._cache.value(layer), keys, values)
        self._written[layer] = keys, values

    def check_same(self, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        """A model that attends over anything else than what it has just cached computes something else."""
        keys, values = self._written.pop(module.layer_idx, (None, None))  # type: ignore[call-overload]
        if key is not keys or value is not values:
            raise UnsupportedModel(f"{type(module).__name__} attends over other keys or values than it caches")

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Of packed queries ``[1, heads, tokens, head_dim]``; returns ``[1, tokens, heads, head_dim]``."""
        self._attended += 1
        return self._batch.attend(query, self._cache.key(layer), self._cache.value(layer), scale)

    def check_complete(self, model: PreTrainedModel) -> None:
        """A model that passed a layer by our attention computed something else."""
        if self._attended != self._cache.layout.num_layers:
            raise UnsupportedModel(
                f"{type(model).__name__}: {self._attended} of {self._cache.layout.num_layers} layers attended over "
                "the pool; its attention does not go through the registry"
            )


class _Running(threading.local):
    forward: PagedForward | None = None


_running = _Running()


@contextmanager
def attending(forward: PagedForward | None) -> Iterator[None]:
    """Attention of this thread is over that forward's pool, or the model's own where it is None.

    The thread tells it, and no argument, because some models hand none on to their attention.
    """
    before = _running.forward
    _running.forward = forward
    try:
        yield
    finally:
        _running.forward = before


def _attention(
    own: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Over the pool inside a cached forward, else the model's own."""
    paged = _running.forward
    if paged is None:
        function = (
            sys.modules[type(module).__module__].eager_attention_forward
            if own == "eager"
            else ALL_ATTENTION_FUNCTIONS[own]
        )
        return function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    _refuse_what_is_not_served(module, kwargs)
    paged.check_same(module, key, value)
    return paged.attend(module.layer_idx, query, scaling), None  # type: ignore[arg-type]


def _refuse_what_is_not_served(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Windows, soft caps, sinks, biases: what changes attention reaches it as an argument, by any name."""
    if not kwargs.pop("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModel(f"{type(module).__name__} attends to later tokens; only causal attention is served")
    kwargs["dropout"] = kwargs.get("dropout") or None
    for name, said in kwargs.items():
        if said is not None and said is not False and name not in _SAYS_NOTHING:
            raise UnsupportedModel(f"{type(module).__name__} asks its attention for {name}, which is not served")


for _own in SUPPORTED_ATTENTION:
    AttentionInterface.register(f"{ATTENTION_PREFIX}{_own}", functools.partial(_attention, _own))
    AttentionMaskInterface.register(f"{ATTENTION_PREFIX}{_own}", ALL_MASK_ATTENTION_FUNCTIONS[_own])
