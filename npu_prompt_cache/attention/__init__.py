"""Attention that reads K/V from the pool's blocks: one module a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from npu_prompt_cache.attention import cpu

if TYPE_CHECKING:
    from npu_prompt_cache.attention import npu
    from npu_prompt_cache.layout import KVLayout

#: The modules of both devices have the same two classes, with the same methods.
PagedAttention: TypeAlias = "cpu.PagedAttention | npu.PagedAttention"
PagedBatch: TypeAlias = "cpu.PagedBatch | npu.PagedBatch"


def paged_attention(layout: KVLayout, num_heads: int, device: torch.device, gathers: bool = False) -> PagedAttention:
    """Attention of a request over the pool, on the device of the pool and the model.

    Args:
        layout: of the pool.
        num_heads: query heads.
        device: of the pool.
        gathers: True where the model is given the rows of all tokens, and attends over what it makes of them.

    Raises:
        UnsupportedModel: no operator of the device takes the model's shapes.
    """
    if device.type == "cpu":
        return cpu.PagedAttention(layout)
    from npu_prompt_cache.attention import npu

    return npu.paged_attention(layout, num_heads, device, gathers)
