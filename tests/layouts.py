"""Layouts for tests, and how large they are."""

from __future__ import annotations

import torch

import npu_prompt_cache as npc


def small_layout(block_size: int = 16, **changes: object) -> npc.KVLayout:
    """Two layers, 64 bytes of K a token: a block of 16 tokens takes 4 KiB in all planes."""
    options = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float16}
    return npc.KVLayout(**{**options, "block_size": block_size, **changes})  # type: ignore[arg-type]


def blocks_of(cache: npc.PromptCache, count: int) -> int:
    return count * cache.layout.block_bytes
