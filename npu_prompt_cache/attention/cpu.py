"""Paged attention on the CPU: torch's own kernels over the pool's planes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from npu_prompt_cache.attention.sequence import Sequence
    from npu_prompt_cache.layout import KVLayout


class PagedAttention:
    """Attention of one request's rows over the pool.

    Args:
        layout: of the pool.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def in_order(self) -> AbstractContextManager[None]:
        """Everything on the CPU comes in the order of the calls."""
        return nullcontext()

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor."""
        return torch.from_numpy(array)

    def batch(self, sequences: list[Sequence], slots: npt.NDArray[np.int64]) -> PagedBatch:
        """A packed batch.

        Args:
            sequences: in packed order, together covering the row.
            slots: int64 ``[tokens]``: the slot of each new token, ``block * block_size + offset``.
        """
        return PagedBatch(self, self._layout, sequences, slots)


class PagedBatch:
    """Where a packed batch writes and reads: the same for all layers of one forward pass. From `PagedAttention.batch`.

    Attributes:
        sequences: in packed order.
    """

    def __init__(
        self, attention: PagedAttention, layout: KVLayout, sequences: list[Sequence], slots: npt.NDArray[np.int64]
    ) -> None:
        self.sequences = sequences
        self._slots = attention.upload(slots)
        self._places = [_Place(attention, sequence, layout.block_size) for sequence in sequences]
        self._masks = [_mask(sequence, layout.dtype, self._slots.device) for sequence in sequences]

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Puts the new tokens' K and V, each ``[1, kv_heads, tokens, head_dim]``, into their slots of the planes."""
        for plane, states in ((keys, new_keys), (values, new_values)):
            plane.view(-1, *plane.shape[2:]).index_copy_(0, self._slots, states[0].transpose(0, 1))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Causal attention of each sequence over its own blocks; grouped queries where there are fewer K/V heads.

        Args:
            query: ``[1, heads, tokens, head_dim]``, packed.
            keys: plane of K, ``[blocks, block_size, kv_heads, head_dim]``, new tokens written.
            values: plane of V.
            scale: factor on the scores; None for ``head_dim ** -0.5``.

        Returns:
            ``[1, tokens, heads, head_dim]``.
        """
        outputs = []
        grouped = query.shape[1] != keys.shape[2]
        for sequence, place, mask in zip(self.sequences, self._places, self._masks, strict=True):
            whole = sequence.tokens == sequence.kv_length
            output = scaled_dot_product_attention(
                query[:, :, sequence.start : sequence.stop],
                place.read(keys),
                place.read(values),
                attn_mask=mask,
                is_causal=whole and sequence.kv_length > 1,
                scale=scale,
                enable_gqa=grouped,
            )
            outputs.append(output.transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _Place:
    """Where one sequence's tokens lie in a plane: a slice where its blocks are neighbours, else a list of blocks."""

    def __init__(self, attention: PagedAttention, sequence: Sequence, block_size: int) -> None:
        blocks = -(-sequence.kv_length // block_size)
        table = sequence.block_table[:blocks]
        self.kv_length = sequence.kv_length
        self.first_slot: int | None = None
        if int(table[-1]) - int(table[0]) == blocks - 1 and bool((table[1:] - table[:-1] == 1).all()):
            self.first_slot = int(table[0]) * block_size
        else:
            self.blocks = attention.upload(table)

    def read(self, plane: torch.Tensor) -> torch.Tensor:
        """``[1, kv_heads, kv_length, head_dim]``: a view of the plane, or of a copy of scattered blocks."""
        if self.first_slot is None:
            rows = plane.index_select(0, self.blocks).view(-1, *plane.shape[2:])[: self.kv_length]
        else:
            rows = plane.view(-1, *plane.shape[2:])[self.first_slot : self.first_slot + self.kv_length]
        return rows.transpose(0, 1).unsqueeze(0)


def _mask(sequence: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Right-down causal mask, ``[tokens, kv_length]``; None where the kernel's own or no mask is the same."""
    tokens = sequence.tokens
    if tokens in (1, sequence.kv_length):
        return None
    hidden = torch.full((tokens, sequence.kv_length), float("-inf"), dtype=dtype, device=device)
    return hidden.triu_(sequence.kv_length - tokens + 1)
