"""K/V in blocks, read through a block table: the rules of paged attention, and the gathering.

Two formats of a cache: ``[blocks, block_size, KV_N * D]`` and ``[blocks, KV_N, block_size, D]`` (op-plugin page of
npu_fused_infer_attention_score, PageAttention). The device does not check what a block table holds; here an id out of
range is an error, because the answer would be garbage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.registry import require

__all__ = ["Pages", "require_cache", "require_table"]

_INT32_MAX = 2**31 - 1
_MOST_PER_SLOT = 65535
_ANY_FORMAT = ("BNSD", "TND", "NTD")


@dataclass(frozen=True)
class Pages:
    """Which blocks hold the K/V of each request."""

    block_size: int
    ids: list[Tensor]
    """For each request the ids of the blocks its length needs, int32."""

    def gather(self, cache: Tensor, kv_heads: int, request: int, length: int) -> Tensor:
        """``[KV_N, length, D]``: a copy of what ``cache`` holds for the request."""
        blocks = cache.index_select(0, self.ids[request])
        if blocks.dim() == 3:
            slots, hidden = blocks.shape[0] * blocks.shape[1], blocks.shape[2]
            return blocks.view(slots, kv_heads, hidden // kv_heads)[:length].transpose(0, 1)
        return blocks.transpose(0, 1).flatten(1, 2)[:, :length]


def require_cache(op: str, name: str, cache: Tensor, axes: str, kv_heads: int, block_size: int) -> None:
    """Raises unless ``cache`` is a cache that ``block_size`` and a query of layout ``axes`` can go with.

    Args:
        name: of the operator's parameter.
        axes: of query, such as ``BSH``.
    """
    shape = tuple(cache.shape)
    require(
        cache.numel() <= _INT32_MAX,
        op,
        "a paged key or value has at most 2**31 - 1 elements (the range of int32)",
        f"{name} {shape}: {cache.numel()}",
    )
    require(cache.is_contiguous(), op, "paged key and value are contiguous", f"{name} {shape} {cache.stride()}")
    require(
        cache.dim() == 3 or (cache.dim() == 4 and axes in _ANY_FORMAT),
        op,
        "a paged key or value is [blocks, block_size, KV_N * D], or, with a BNSD or TND query, "
        "[blocks, KV_N, block_size, D]",
        f"{name} {shape} with a {axes} query",
    )
    slots = shape[1] if cache.dim() == 3 else shape[2]
    require(
        slots == block_size,
        op,
        "the block axis of a paged key or value has block_size slots",
        f"{name} {shape}, block_size {block_size}",
    )
    if cache.dim() == 3:
        require(
            shape[2] % kv_heads == 0,
            op,
            "the last axis of a paged key or value is KV_N * D",
            f"{name} {shape} for {kv_heads} heads",
        )
        require(
            shape[2] <= _MOST_PER_SLOT,
            op,
            "KV_N * D is at most 65535 in the format [blocks, block_size, KV_N * D]",
            f"{name} {shape}",
        )
    else:
        require(
            shape[1] == kv_heads,
            op,
            "[blocks, KV_N, block_size, D] has the number of K/V heads as its second axis",
            f"{name} {shape} for {kv_heads} heads",
        )


def require_table(op: str, name: str, table: Tensor, lengths: Sequence[int], block_size: int, blocks: int) -> Pages:
    """Raises unless ``table`` says where the first ``lengths[i]`` tokens of each request ``i`` are.

    Args:
        name: of the parameter that ``lengths`` came from.
        blocks: how many there are.
    """
    require(table.dtype == torch.int32, op, "block_table is int32", table.dtype)
    require(
        table.dim() == 2 and table.shape[0] == len(lengths),
        op,
        "block_table is [B, blocks of the longest request], a row for each request",
        f"{tuple(table.shape)} for {len(lengths)} requests",
    )
    needed = [-(-length // block_size) for length in lengths]
    most = max(needed, default=0)
    require(
        table.shape[1] >= most,
        op,
        f"block_table has a column for each block that the longest of {name} needs",
        f"{table.shape[1]} columns for {max(lengths)} tokens in blocks of {block_size}, which are {most}",
    )
    require(
        sum(needed) <= blocks,
        op,
        "the number of blocks is not less than the sum of the blocks of all requests (shared ones counted each time)",
        f"{blocks} blocks for {sum(needed)}",
    )
    ids = [row[:count] for row, count in zip(table, needed, strict=True)]
    used = torch.cat(ids) if ids else table.flatten()
    wrong = used[(used < 0) | (used >= blocks)]
    require(
        wrong.numel() == 0,
        op,
        "each id of block_table that a request needs is in [0, number of blocks)",
        f"{wrong[:4].tolist()} of {blocks} blocks",
    )
    return Pages(block_size, ids)
