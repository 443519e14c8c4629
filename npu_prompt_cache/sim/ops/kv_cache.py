"""References of the operators that write tokens into a paged K/V cache and read them back, format ND.

Sources: the op-plugin page of npu_scatter_pa_kv_cache with that of the operator it calls, aclnnScatterPaKvCache, for
what A2 and A3 support of it; the page of aclnnGatherPaKvCache; the ATB pages of ReshapeAndCacheOperation and
PagedCacheLoadOperation. The device checks no slot and no block id: out of range it writes somewhere else.

Words: a cache is ``[num_blocks, block_size, num_heads, head_size]``; slot s of it is token ``s % block_size`` of
block ``s // block_size``.
"""

import itertools

import torch

from npu_prompt_cache.sim.ops.checks import (
    require_contiguous,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
    require_unique,
)
from npu_prompt_cache.sim.ops.registry import reference, require

_CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
_TOKEN_BYTES_MAX = 148 * 1024


@reference("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Writes ``key`` and ``value`` into the slots of their caches, in place.

    Args:
        key: ``[tokens, num_heads, k_head_size]``, float16, bfloat16 or int8 as on A2/A3.
        value: ``[tokens, num_heads, v_head_size]``.
        key_cache: ``[num_blocks, block_size, num_heads, k_head_size]``, written.
        value_cache: ``[num_blocks, block_size, num_heads, v_head_size]``, written.
        slot_mapping: ``[tokens]``, int32 or int64, each in ``[0, num_blocks * block_size)``, none twice.
        compress_lens: for compressed caches only: not served.
        compress_seq_offsets: the same.
        seq_lens: the same.
        cache_mode: None or 'Norm', that is ND. The operator's own default, 'PA_NZ', is not served.
    """
    op = "npu_scatter_pa_kv_cache"
    _require_uncompressed(op, key, value, (compress_lens, compress_seq_offsets, seq_lens), cache_mode)
    require_dtype(op, "key (on A2/A3)", key, _CACHE_DTYPES)
    require_same_dtype(op, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    require_contiguous(op, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    require_contiguous(op, slot_mapping=slot_mapping)
    require_dtype(op, "slot_mapping", slot_mapping, (torch.int32, torch.int64))
    require_shape(op, "value", value, (*key.shape[:2], value.shape[2]), "[key's tokens, key's heads, v_head_size]")
    _require_cache(op, "key_cache", key_cache, key)
    _require_cache(op, "value_cache", value_cache, value)
    require_shape(
        op, "value_cache", value_cache, (*key_cache.shape[:3], value.shape[2]), "[key_cache's …, v_head_size]"
    )
    slots = _slots(op, "slot_mapping", slot_mapping, key, key_cache, negatives_skip=False)
    _write(key_cache, slots, key)
    _write(value_cache, slots, value)


@reference("npu_scatter_pa_kv_cache_functional")
def npu_scatter_pa_kv_cache_functional(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`npu_scatter_pa_kv_cache` into contiguous copies of the caches, which it returns."""
    key_cache = key_cache.clone(memory_format=torch.contiguous_format)
    value_cache = value_cache.clone(memory_format=torch.contiguous_format)
    npu_scatter_pa_kv_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode=cache_mode,
    )
    return key_cache, value_cache


@reference("atb::_npu_reshape_and_cache")
def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Writes ``key`` and ``value`` into the slots of their ND caches, in place; a negative slot is skipped.

    Args:
        key: ``[tokens, num_heads, k_head_size]``, float16, bfloat16 or int8.
        value: ``[tokens, num_heads, v_head_size]``.
        key_cache: ``[num_blocks, block_size, num_heads, k_head_size]``, written.
        value_cache: ``[num_blocks, block_size, num_heads, v_head_size]``, written.
        slot_indices: ``[tokens]``, int32, below ``num_blocks * block_size``, none twice.
    """
    op = "_npu_reshape_and_cache"
    require_rank(op, "value", value, 3)
    require_shape(op, "key", key, (*value.shape[:2], key.shape[-1]), "[value's tokens, value's heads, k_head_size]")
    require_same_dtype(op, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    slots = _reshape_and_cache_slots(op, key, key_cache, slot_indices)
    _require_cache(op, "value_cache", value_cache, value)
    require_contiguous(op, value_cache=value_cache)
    require_shape(
        op, "value_cache", value_cache, (*key_cache.shape[:3], value.shape[2]), "[key_cache's …, v_head_size]"
    )
    _write(key_cache, slots, key)
    _write(value_cache, slots, value)


@reference("atb::_npu_reshape_and_cache_siso")
def _npu_reshape_and_cache_siso(key: torch.Tensor, key_cache: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """:func:`_npu_reshape_and_cache` of the keys alone."""
    op = "_npu_reshape_and_cache_siso"
    require_same_dtype(op, key=key, key_cache=key_cache)
    slots = _reshape_and_cache_slots(op, key, key_cache, slot_indices)
    _write(key_cache, slots, key)


@reference("npu_gather_pa_kv_cache")
def npu_gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Reads every request's tokens out of its blocks into ``key`` and ``value``, one request after the other.

    Args:
        key_cache: ``[num_blocks, block_size, num_heads, k_head_size]``, float16, bfloat16 or int8.
        value_cache: ``[num_blocks, block_size, num_heads, v_head_size]``.
        block_tables: ``[batch, blocks]``, int32, each in ``[0, num_blocks)``.
        seq_lens: tokens of each request, int32: ``[batch]``, or ``[batch + 1]`` running sums that begin with 0.
        key: ``[tokens of all requests, num_heads, k_head_size]``, written.
        value: ``[tokens of all requests, num_heads, v_head_size]``, written.
        seq_offset: ``[batch]``, int32: where in its table a request begins, at ``seq_offset // block_size``.
        is_seq_lens_cumsum: whether ``seq_lens`` holds running sums.
    """
    op = "npu_gather_pa_kv_cache"
    lengths = _lengths(op, "seq_lens", seq_lens, is_seq_lens_cumsum)
    require_contiguous(op, key_cache=key_cache, value_cache=value_cache, key=key, value=value)
    require_contiguous(op, block_tables=block_tables, seq_lens=seq_lens)
    _gather(op, (key_cache, value_cache), block_tables, lengths, seq_offset, (key, value))


@reference("npu_gather_pa_kv_cache_functional")
def npu_gather_pa_kv_cache_functional(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`npu_gather_pa_kv_cache` into copies of ``key`` and ``value``, which it returns."""
    key, value = key.clone(), value.clone()
    npu_gather_pa_kv_cache(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        key,
        value,
        seq_offset=seq_offset,
        is_seq_lens_cumsum=is_seq_lens_cumsum,
    )
    return key, value


@reference("atb::npu_paged_cache_load")
def npu_paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ATB spelling of :func:`npu_gather_pa_kv_cache`, with new ``key`` and ``value``, which it returns."""
    op = "npu_paged_cache_load"
    lengths = _lengths(op, "context_lens", context_lens, cumsum)
    key = key_cache.new_empty(sum(lengths), *key_cache.shape[2:])
    value = value_cache.new_empty(sum(lengths), *value_cache.shape[2:])
    _gather(op, (key_cache, value_cache), block_table, lengths, seq_starts, (key, value))
    return key, value


@reference("atb::npu_paged_cache_load.out")
def npu_paged_cache_load_out(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`npu_paged_cache_load` into the ``key`` and ``value`` given, resized if need be, which it returns."""
    for out, found in zip(
        (key, value),
        npu_paged_cache_load(key_cache, value_cache, block_table, context_lens, seq_starts=seq_starts, cumsum=cumsum),
        strict=True,
    ):
        out.resize_(found.shape).copy_(found)
    return key, value


def _require_uncompressed(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    compression: tuple[torch.Tensor | None, ...],
    cache_mode: str | None,
) -> None:
    """Refuses, by name, what is not the ND scene of the page: NZ caches and compressed ones."""
    require(
        cache_mode in (None, "Norm"),
        op,
        "cache_mode is 'Norm' for ND caches; 'PA_NZ' (the default) is for FRACTAL_NZ caches, which are not simulated",
        repr(cache_mode),
    )
    rule = "key and value have 3 dimensions; A2/A3 have no scene with 4 (compressed caches)"
    require(key.dim() == 3 and value.dim() == 3, op, rule, f"{tuple(key.shape)}, {tuple(value.shape)}")
    rule = "compress_lens, compress_seq_offsets and seq_lens belong to compressed caches and are None for ND ones"
    require(all(tensor is None for tensor in compression), op, rule, "a tensor")


def _require_cache(op: str, name: str, cache: torch.Tensor, tokens: torch.Tensor) -> None:
    """A cache holds what the tokens are."""
    require_rank(op, name, cache, 4)
    meaning = "[num_blocks, block_size, num_heads, head_size]"
    require_shape(op, name, cache, (*cache.shape[:2], *tokens.shape[1:]), meaning)


def _reshape_and_cache_slots(
    op: str, key: torch.Tensor, key_cache: torch.Tensor, slot_indices: torch.Tensor
) -> torch.Tensor:
    """Checks the keys of ReshapeAndCache; their slots, as :func:`_slots` gives them."""
    require_rank(op, "key", key, 3)
    require_dtype(op, "key", key, _CACHE_DTYPES)
    _require_cache(op, "key_cache", key_cache, key)
    require_contiguous(op, key_cache=key_cache)
    require_dtype(op, "slot_indices", slot_indices, (torch.int32,))
    return _slots(op, "slot_indices", slot_indices, key, key_cache, negatives_skip=True)


def _slots(
    op: str, name: str, slots: torch.Tensor, tokens: torch.Tensor, cache: torch.Tensor, *, negatives_skip: bool
) -> torch.Tensor:
    """The slots as int64, checked: one a token, in range, none twice among those written."""
    require_shape(op, name, slots, (tokens.shape[0],), "[tokens]")
    slots = slots.long()
    slot_count = cache.shape[0] * cache.shape[1]
    low = "(-2^31" if negatives_skip else "[0"
    inside = slots < slot_count if negatives_skip else (slots >= 0) & (slots < slot_count)
    rule = f"{name} is in {low}, num_blocks * block_size = {slot_count})"
    require(bool(inside.all()), op, rule, _first(slots, ~inside))
    require_unique(op, f"{name} holds no slot twice", slots[slots >= 0])
    return slots


def _first(values: torch.Tensor, wrong: torch.Tensor) -> str:
    """The first wrong value and where it is, for an error."""
    positions = wrong.flatten().nonzero().flatten()
    return f"{int(values.flatten()[positions[0]])}" if len(positions) else "none"


def _write(cache: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Copies the tokens whose slots are not negative."""
    kept = slots >= 0
    flat = cache.view(cache.shape[0] * cache.shape[1], *cache.shape[2:])
    flat.index_copy_(0, slots[kept], tokens[kept])


def _lengths(op: str, name: str, lengths: torch.Tensor, cumulative: bool) -> list[int]:
    """Tokens of each request."""
    require_dtype(op, name, lengths, (torch.int32,))
    require_rank(op, name, lengths, 1)
    values: list[int] = lengths.tolist()
    if cumulative:
        require(values[:1] == [0], op, f"{name} as running sums begins with 0", values[:1])
        values = [stop - start for start, stop in itertools.pairwise(values)]
    require(min(values, default=0) >= 0, op, f"the lengths in {name} are not negative", values)
    return values


def _gather(
    op: str,
    caches: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    lengths: list[int],
    offsets: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Checks and copies, request by request, for key and value alike."""
    for name, cache, output in zip(("key", "value"), caches, outputs, strict=True):
        require_dtype(op, f"{name}_cache (on A2/A3)", cache, _CACHE_DTYPES)
        require_rank(op, f"{name}_cache", cache, 4)
        shape = (sum(lengths), *cache.shape[2:])
        require_shape(op, name, output, shape, "[tokens of all requests, num_heads, head_size]")
        token_bytes = cache.shape[2] * cache.shape[3] * cache.element_size()
        require(token_bytes <= _TOKEN_BYTES_MAX, op, f"a token of {name} takes at most 148 KiB", token_bytes)
        require_same_dtype(op, **{f"{name}_cache": cache, name: output})
    require_same_dtype(op, key_cache=caches[0], value_cache=caches[1])
    require_shape(
        op, "value_cache", caches[1], (*caches[0].shape[:3], caches[1].shape[3]), "[key_cache's …, v_head_size]"
    )
    rows = _rows(op, caches[0], block_tables, lengths, offsets)
    for cache, output in zip(caches, outputs, strict=True):
        output.copy_(cache.reshape(-1, *cache.shape[2:])[rows])


def _rows(
    op: str, cache: torch.Tensor, block_tables: torch.Tensor, lengths: list[int], offsets: torch.Tensor | None
) -> torch.Tensor:
    """The slots to read, in order."""
    block_count, block_size = cache.shape[:2]
    require_dtype(op, "the block table", block_tables, (torch.int32,))
    require_rank(op, "the block table", block_tables, 2)
    require(
        len(block_tables) == len(lengths),
        op,
        "the block table has a row a request",
        f"{len(block_tables)} rows for {len(lengths)}",
    )
    inside = (block_tables >= 0) & (block_tables < block_count)
    require(bool(inside.all()), op, f"block ids are in [0, num_blocks = {block_count})", _first(block_tables, ~inside))
    starts = [0] * len(lengths)
    if offsets is not None:
        require_dtype(op, "the offsets into the block table", offsets, (torch.int32,))
        require_shape(op, "the offsets into the block table", offsets, (len(lengths),), "[batch]")
        starts = [offset // block_size for offset in offsets.tolist()]
    rows = []
    for table, length, start in zip(block_tables.long(), lengths, starts, strict=True):
        needed = start + -(-length // block_size)
        rule = f"a row of the block table ({block_tables.shape[1]} blocks) covers its request"
        require(start >= 0 and needed <= block_tables.shape[1], op, rule, f"blocks {start} to {needed}")
        tokens = torch.arange(length)
        rows.append(table[start + tokens // block_size] * block_size + tokens % block_size)
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
