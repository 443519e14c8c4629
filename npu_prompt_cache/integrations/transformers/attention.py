"""Our attention function in transformers' registries, and the forward that it serves."""

from __future__ import annotations

import functools
import sys
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


class PagedForward:
    """One forward over the pool: the packed batch, and which layers have written and read it."""

    def __init__(self, cache: PromptCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._attended = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The new tokens' K/V, each ``[1, kv_heads, tokens, head_dim]``, into their slots."""
        self._batch.write(self._cache.key(layer), self._cache.value(layer), keys, values)

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


def _attention(
    own: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged_forward: PagedForward | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Over the pool inside a cached forward, else the model's own."""
    if paged_forward is None:
        function = (
            sys.modules[type(module).__module__].eager_attention_forward
            if own == "eager"
            else ALL_ATTENTION_FUNCTIONS[own]
        )
        return function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    return paged_forward.attend(module.layer_idx, query, scaling), None  # type: ignore[arg-type]


for _own in SUPPORTED_ATTENTION:
    AttentionInterface.register(f"{ATTENTION_PREFIX}{_own}", functools.partial(_attention, _own))
    AttentionMaskInterface.register(f"{ATTENTION_PREFIX}{_own}", ALL_MASK_ATTENTION_FUNCTIONS[_own])
