"""Inference attention: what the fused, prompt and incremental operators of torch_npu compute, by request."""

from dataclasses import dataclass

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.attention_call import Call, Shape, shape_of
from npu_prompt_cache.sim.ops.attention_kernel import attend, log_sum_exp, with_sink
from npu_prompt_cache.sim.ops.attention_layout import from_heads_first, heads_first
from npu_prompt_cache.sim.ops.attention_lengths import ends, per_request
from npu_prompt_cache.sim.ops.attention_mask import COMPRESSED, SparseMask, require_compressed, require_mask_values
from npu_prompt_cache.sim.ops.attention_pages import Pages, require_cache, require_table
from npu_prompt_cache.sim.ops.registry import require

__all__ = ["empty_outputs", "infer"]

_UNBOUNDED = 2**63 - 1
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)


@dataclass(frozen=True)
class _Plan:
    """A call that keeps the rules, ready to run."""

    shape: Shape
    starts: list[int]
    """Row of query at which each request begins; all 0 but in packed layouts."""
    rows: list[int]
    """Query tokens of each request."""
    kv_starts: list[int]
    columns: list[int]
    """K/V tokens of each request, without a shared prefix."""
    prefix: int
    """Tokens of the shared prefix."""
    pages: Pages | None
    mask: SparseMask


def infer(call: Call) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp of one call.

    Returns:
        The output in its layout, in query's dtype, and the LSE, float32: ``[B, N, S, 1]``, ``[T, N, 1]`` in packed
        layouts, ``[0]`` where it is not asked for. Rows past a request's length, and rows with nothing to attend,
        are 0; their LSE is +inf.

    Raises:
        RuleViolation: a documented rule is broken; the text quotes it.
        NotImplementedError: the simulator does not serve what is asked.
    """
    shape = shape_of(call)
    if call.query.numel() == 0:
        return empty_outputs(call.query, call.input_layout, shape.heads, shape.value_dim, call.lse)
    return _run(call, _plan(call, shape))


def empty_outputs(query: Tensor, input_layout: str, heads: int, value_dim: int, lse: bool) -> tuple[Tensor, Tensor]:
    """Zeros where the output and the LSE of such a call go; shapes as in :func:`infer`.

    Like torch_npu's kernel for the meta device, which gives ``[0]`` for an LSE not asked for.
    """
    axes, _, out_axes = input_layout.partition("_")
    rows = heads_first(query, axes, heads)
    out = from_heads_first(rows.new_zeros(*rows.shape[:-1], value_dim), out_axes or axes)
    return out, _lse(rows, "T" in axes, lse)


def _lse(rows: Tensor, packed: bool, wanted: bool) -> Tensor:
    if not wanted:
        return rows.new_empty(0, dtype=torch.float32)
    shape = (rows.shape[1], rows.shape[0]) if packed else rows.shape[:-1]
    return rows.new_full((*shape, 1), torch.inf, dtype=torch.float32)


def _run(call: Call, plan: _Plan) -> tuple[Tensor, Tensor]:
    shape, layout = plan.shape, call.layout
    query = heads_first(call.query, layout.axes, shape.heads)
    if call.query_rope is not None:
        query = torch.cat((query, heads_first(call.query_rope, layout.axes, shape.heads)), dim=-1)
    out = query.new_zeros(*query.shape[:-1], shape.value_dim)
    lse = _lse(query, layout.packed, call.lse)
    for request, (start, rows) in enumerate(zip(plan.starts, plan.rows, strict=True)):
        key, value = _keys_and_values(call, plan, request)
        hidden = plan.mask.hidden(request, rows, key.shape[1])
        if hidden is not None and plan.mask.given is not None and not call.flavour.empty_rows:
            require(
                not bool(hidden.all(-1).any()),
                call.op,
                "in sparse_mode 0 and 1 no row of atten_mask hides everything that takes part",
                f"such a row for request {request}",
            )
        span = slice(start, start + rows)
        attended = attend(
            query[:, span] if layout.packed else query[request, :, span],
            key,
            value,
            call.scale,
            hidden=hidden,
            bias=_bias(call, request, rows, key.shape[1]),
        )
        part = attended.out if call.sink is None else with_sink(attended, call.sink).out
        (out[:, span] if layout.packed else out[request, :, span]).copy_(part)
        if call.lse:  # of the keys alone, like that of CANN's kernel, which adds the sink after it
            part = log_sum_exp(attended)
            (lse[span, :, 0] if layout.packed else lse[request, :, span, 0]).copy_(part.T if layout.packed else part)
    return from_heads_first(out, layout.out), lse


def _keys_and_values(call: Call, plan: _Plan, request: int) -> tuple[Tensor, Tensor]:
    """``[KV_N, S2, D]`` and ``[KV_N, S2, DV]`` of a request, rope and shared prefix included."""
    heads, columns = plan.shape.kv_heads, plan.columns[request]
    if plan.pages is not None:
        key, value = (plan.pages.gather(cache, heads, request, columns) for cache in (call.key, call.value))
        if call.key_rope is not None:
            key = torch.cat((key, plan.pages.gather(call.key_rope, heads, request, columns)), dim=-1)
        return key, value
    axes, start = call.layout.axes, plan.kv_starts[request]
    span = slice(start, start + columns)

    def part(tensor: Tensor) -> Tensor:
        first = heads_first(tensor, axes, heads)
        return first[:, span] if call.layout.packed else first[request, :, span]

    key, value = part(call.key), part(call.value)
    if call.key_rope is not None:
        key = torch.cat((key, part(call.key_rope)), dim=-1)
    if call.key_prefix is not None and call.value_prefix is not None:
        key = torch.cat((heads_first(call.key_prefix, axes, heads)[0, :, : plan.prefix], key), dim=1)
        value = torch.cat((heads_first(call.value_prefix, axes, heads)[0, :, : plan.prefix], value), dim=1)
    return key, value


def _bias(call: Call, request: int, rows: int, columns: int) -> Tensor | None:
    if call.pse_shift is None:
        return None
    return call.pse_shift[min(request, call.pse_shift.shape[0] - 1), :, :rows, :columns].float()


def _plan(call: Call, shape: Shape) -> _Plan:
    if call.paged:
        heads = shape.kv_heads
        for name, cache in (("key", call.key), ("value", call.value), ("key_rope", call.key_rope)):
            if cache is not None:
                require_cache(call.op, name, cache, call.layout.axes, heads, call.block_size)
        require(
            call.key.shape[:-1] == call.value.shape[:-1],
            call.op,
            "a paged key and value have the same shape (but for their D, where packed)",
            f"{tuple(call.key.shape)} and {tuple(call.value.shape)}",
        )
    starts, rows = _query_spans(call, shape)
    kv_starts, columns, pages = _kv_spans(call, shape, rows)
    prefix = _prefix(call)
    mask = _mask(call, shape, len(rows), _mask_columns(call, shape, columns, prefix))
    _require_pse(call, shape, len(rows), _mask_columns(call, shape, columns, prefix))
    single = not call.layout.packed and shape.tokens == 1
    allowed = (0, 1) if single else (0, 1, 2, 3)
    require(
        call.inner_precise in allowed,
        call.op,
        "inner_precise is 0, 1, 2 or 3, and 0 or 1 where query's S is 1",
        f"{call.inner_precise} with S = {shape.tokens}",
    )
    if call.layout.packed and mask.mode == 3:
        late = next((i for i, (row, column) in enumerate(zip(rows, columns, strict=True)) if row > column), None)
        require(
            late is None,
            call.op,
            "sparse_mode 3 of a packed layout needs at least as many K/V tokens as query tokens in each request",
            None if late is None else f"{rows[late]} and {columns[late]} in request {late}",
        )
    return _Plan(shape, starts, rows, kv_starts, columns, prefix, pages, mask)


def _query_spans(call: Call, shape: Shape) -> tuple[list[int], list[int]]:
    name = call.flavour.query_lengths
    if call.layout.packed:
        stops = ends(call.op, name, call.query_lengths, shape.tokens, "query")
        return _spans(stops)
    # A single query token has no length to speak of: the page says that the parameter has no effect then.
    lengths = None if shape.tokens == 1 else call.query_lengths
    rows = per_request(call.op, name, lengths, shape.requests, shape.tokens, "query")
    return [0] * len(rows), rows


def _spans(stops: list[int]) -> tuple[list[int], list[int]]:
    starts = [0, *stops[:-1]]
    return starts, [stop - start for start, stop in zip(starts, stops, strict=True)]


def _kv_spans(call: Call, shape: Shape, rows: list[int]) -> tuple[list[int], list[int], Pages | None]:
    op, name, requests = call.op, call.flavour.kv_lengths, len(rows)
    if call.block_table is None:
        if not call.layout.packed:
            columns = per_request(op, name, call.kv_lengths, requests, shape.kv_tokens, "key")
            return [0] * requests, columns, None
        stops = ends(op, name, call.kv_lengths, shape.kv_tokens, "key")
        require(
            len(stops) == requests,
            op,
            f"{call.flavour.query_lengths} and {name} of a packed layout have one element a request",
            f"{requests} and {len(stops)}",
        )
        return *_spans(stops), None
    require(call.kv_lengths is not None, op, f"a block_table needs {name}, one length per request", None)
    assert call.kv_lengths is not None
    require(
        not call.layout.packed or len(call.kv_lengths) == requests,
        op,
        f"with a block_table {name} of a packed layout has one length per request, not a running sum",
        f"{len(call.kv_lengths)} lengths for {requests} requests",
    )
    columns = per_request(op, name, call.kv_lengths, requests, None, "key")
    _require_block_size(call, shape, max(rows, default=1))
    pages = require_table(op, name, call.block_table, columns, call.block_size, call.key.shape[0])
    return [0] * requests, columns, pages


def _require_block_size(call: Call, shape: Shape, longest: int) -> None:
    size = call.block_size
    if shape.latent:
        rule = "with query_rope and D = 512 block_size is a multiple of 16 and at most 1024"
        require(size > 0 and size % 16 == 0 and size <= 1024, call.op, rule, size)
    elif longest > 1:
        rule = "where a request has more than one query token block_size is a multiple of 128, 128 to 512"
        require(size > 0 and size % 128 == 0 and size <= 512, call.op, rule, size)
    else:
        rule = "where each request has one query token block_size is a multiple of 16 (float16, bfloat16), 16 to 512"
        require(size > 0 and size % 16 == 0 and size <= 512, call.op, rule, size)


def _prefix(call: Call) -> int:
    if call.key_prefix is None:
        return 0
    limit = call.key_prefix.shape[call.layout.axes.index("S")]
    if call.prefix_lengths is not None:
        require(len(call.prefix_lengths) == 1, call.op, "actual_shared_prefix_len has one element", call.prefix_lengths)
    name = "actual_shared_prefix_len"
    return per_request(call.op, name, call.prefix_lengths, 1, limit, "key_shared_prefix")[0]


def _mask_columns(call: Call, shape: Shape, columns: list[int], prefix: int) -> int:
    """K/V positions that a whole mask or a pse_shift covers at least."""
    if call.block_table is None:
        return shape.kv_tokens + prefix
    if shape.tokens == 1:
        return call.block_table.shape[1] * call.block_size
    return max((-(-each // call.block_size) for each in columns), default=0) * call.block_size


def _mask(call: Call, shape: Shape, requests: int, columns: int) -> SparseMask:
    op, mode, mask, packed = call.op, call.sparse_mode, call.atten_mask, call.layout.packed
    if mask is not None:
        require(mask.dtype in _MASK_DTYPES, op, "atten_mask is bool, int8 or uint8", mask.dtype)
    if not packed and shape.tokens == 1 and not shape.roped:
        # The page: sparse_mode, pre_tokens and next_tokens have no effect on a single query token without rope.
        compressed = mask is not None and mode in (3, 4) and tuple(mask.shape[-2:]) == (COMPRESSED, COMPRESSED)
        if mask is None or compressed:
            return SparseMask(0, _UNBOUNDED, _UNBOUNDED)
        return SparseMask(1, 0, 0, _whole_mask(call, shape, requests, mask, columns))
    if shape.latent or packed:
        require(mode in (0, 3, 4), op, "packed layouts, and query_rope with D = 512, need sparse_mode 0, 3 or 4", mode)
    require(mode in (0, 1, 2, 3, 4), op, "sparse_mode is 0, 1, 2, 3 or 4", mode)
    if mode >= 2:
        require_compressed(op, mask, mode)
        require(
            mode != 4 or call.pre_tokens + call.next_tokens >= 0,
            op,
            "the band of sparse_mode 4 is not empty: pre_tokens + next_tokens is at least 0",
            f"{call.pre_tokens} and {call.next_tokens}",
        )
        return SparseMask(mode, call.pre_tokens, call.next_tokens)
    if mask is None:
        require(mode == 0, op, "sparse_mode 1 needs atten_mask, the whole mask", None)
        return SparseMask(0, _UNBOUNDED, _UNBOUNDED)
    require(not packed, op, "sparse_mode 0 of a packed layout goes without atten_mask", tuple(mask.shape))
    given = _whole_mask(call, shape, requests, mask, columns)
    return SparseMask(mode, call.pre_tokens, call.next_tokens, given)


def _whole_mask(call: Call, shape: Shape, requests: int, mask: Tensor, columns: int) -> Tensor:
    """A mask of modes 0 and 1 as ``[1 or B, 1, >= S1, >= S2]``."""
    rule = (
        "atten_mask of sparse_mode 0 and 1 is (1, Q_S, KV_S), (B, Q_S, KV_S), (B, 1, Q_S, KV_S) or (1, 1, Q_S, KV_S), "
        "or without rope (B, KV_S) where Q_S is 1 and (Q_S, KV_S) where it is more"
    )
    found = f"{tuple(mask.shape)} for B = {requests}, Q_S = {shape.tokens}, KV_S = {columns}"
    require(2 <= mask.dim() <= 4 and not (mask.dim() == 2 and shape.roped), call.op, rule, found)
    require_mask_values(call.op, mask)
    if mask.dim() == 2:
        given = mask[:, None, None] if shape.tokens == 1 else mask[None, None]
    else:
        given = mask[:, None] if mask.dim() == 3 else mask
    require(given.shape[0] in (1, requests) and given.shape[1] == 1, call.op, rule, found)
    require(
        given.shape[2] >= shape.tokens and given.shape[3] >= columns,
        call.op,
        "atten_mask covers Q_S and KV_S, with a block_table all slots of its blocks",
        found,
    )
    return given


def _require_pse(call: Call, shape: Shape, requests: int, columns: int) -> None:
    pse = call.pse_shift
    if pse is None:
        return
    require(not call.layout.packed, call.op, "packed layouts go without pse_shift", call.input_layout)
    require(shape.head_dim % 16 == 0, call.op, "with pse_shift D is a multiple of 16", shape.head_dim)
    require(
        pse.dtype == call.query.dtype and pse.is_contiguous(),
        call.op,
        "pse_shift has query's dtype and is contiguous",
        f"{pse.dtype} with strides {pse.stride()}",
    )
    require(
        pse.dim() == 4
        and pse.shape[0] in (1, requests)
        and pse.shape[1] == shape.heads
        and pse.shape[2] >= shape.tokens
        and pse.shape[3] >= columns,
        call.op,
        "pse_shift is (B, Q_N, Q_S, KV_S) or (1, Q_N, Q_S, KV_S), with a block_table over all slots of its blocks",
        f"{tuple(pse.shape)} for B = {requests}, Q_N = {shape.heads}, Q_S = {shape.tokens}, KV_S = {columns}",
    )
