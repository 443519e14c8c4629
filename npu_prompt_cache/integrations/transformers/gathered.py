"""Forwards of models that make something of the keys and values of all tokens before they attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_prompt_cache.attention.kind import EVERYTHING, AttentionKind
from npu_prompt_cache.errors import UnsupportedModel
from npu_prompt_cache.integrations.transformers.attention import PagedForward
from npu_prompt_cache.integrations.transformers.models import Way, text_config, way_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from npu_prompt_cache.attention.cpu import PagedBatch
    from npu_prompt_cache.cache import PromptCache


def forward_of(model: PreTrainedModel) -> type[PagedForward]:
    """The kind of forward that a model has."""
    return {Way.PAGED: PagedForward, Way.GATHERED: GatheredForward, Way.MASKED: MaskedForward}[
        way_of(text_config(model))
    ]


class GatheredForward(PagedForward):
    """A forward whose model is given the rows of all tokens of all sequences, in packed order, by ``cache.update``.

    It expands them (latents to keys and values, fewer heads to more), and attention is over what it hands on.
    """

    _batch: PagedBatch

    def __init__(self, cache: PromptCache, batch: PagedBatch, reach: list[int | None]) -> None:
        super().__init__(cache, batch, reach)
        self._tokens = sum(sequence.kv_length for sequence in batch.sequences)
        self._unread: int | None = None  # the layer whose rows were given last, until attention follows

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens' into their slots; returns all tokens', each ``[1, heads, kv_tokens, head_dim]``."""
        if self._unread is not None:
            raise UnsupportedModel(f"layer {self._unread} cached its keys and values and did not attend")
        super().write(layer, keys, values)
        self._unread = layer
        return self._batch.gather(self._cache.key(layer)), self._batch.gather(self._cache.value(layer))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kind: AttentionKind,
    ) -> torch.Tensor:
        """Of packed queries over what the model made of the rows; returns ``[1, tokens, heads, head_dim]``."""
        if not self._written or not key.shape[2] == value.shape[2] == self._tokens:
            raise UnsupportedModel(
                f"{type(module).__name__} attends over {key.shape[2]} keys and {value.shape[2]} values, where its "
                f"cache has given it {self._tokens}"
            )
        if kind.span != EVERYTHING:
            raise UnsupportedModel(f"{type(module).__name__} does not see every token; only full attention is gathered")
        if self._unread is not None:
            self._attended.add(self._unread)
            self._unread = None
        return self._batch.attend_gathered(query, key, value, kind).contiguous()


class MaskedForward(GatheredForward):
    """A forward whose model attends by code of its own, which no registry replaces, under the mask that it is given."""

    attends = False

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a `GatheredForward`; that the model attends next is not seen."""
        self._unread = None
        self._attended.add(layer)
        return super().write(layer, keys, values)

    def mask_to_give(self, model: PreTrainedModel) -> torch.Tensor:
        """``[1, 1, tokens, kv_tokens]`` of the model's dtype: 0 where a token is seen, else the lowest number."""
        hidden = self._batch.hidden()
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(hidden.shape, dtype=model.dtype, device=hidden.device).masked_fill_(hidden, lowest)
