"""One call of the training attention: its sizes, its requests, its mask, and the rules on them.

The rules are those of op-plugin's page of ``npu_fusion_attention`` and of its host code. Dropout, long sequences cut
over devices (``sparse_mode`` 7 and 8) and the compressed alibi bias are not served.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.attention_call import refuse
from npu_prompt_cache.sim.ops.attention_layout import heads_first
from npu_prompt_cache.sim.ops.attention_mask import outside_band, require_compressed, require_mask_values
from npu_prompt_cache.sim.ops.registry import require

__all__ = ["Training", "training"]

_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_TOKENS = 1 << 20
_MOST_PACKED = 2048
_PREFIX_MODES = (5, 6)
_PREFIX_SHAPE = (3072, 2048)
_ALIBI_ROWS = 1024


@dataclass(frozen=True)
class Training:
    """A call that keeps the rules, heads first."""

    op: str
    layout: str
    query: Tensor
    """``[B, N, S1, D]``, or ``[N, T, D]`` if packed; a view, as key and value are."""
    key: Tensor
    value: Tensor
    scale: float
    spans: list[tuple[slice, slice]]
    """Rows of query and of key that each request has."""
    mode: int
    before: int
    after: int
    prefix: list[int]
    mask: Tensor | None
    """``[1 or B, 1 or N, >= S1, >= S2]`` of modes 0, 1 and 5."""
    pse: Tensor | None
    sink: Tensor | None

    @property
    def packed(self) -> bool:
        """Whether requests lie one after the other."""
        return self.layout == "TND"

    def part(self, tensor: Tensor, request: int, rows: slice) -> Tensor:
        """What ``tensor``, heads first, has of a request: ``[N, S, X]``."""
        return tensor[:, rows] if self.packed else tensor[request, :, rows]

    def hidden(self, request: int) -> Tensor | None:
        """``[1 or N, S1, S2]``, true where a pair of the request takes no part; None where all do."""
        query_rows, key_rows = self.spans[request]
        rows, columns = query_rows.stop - query_rows.start, key_rows.stop - key_rows.start
        offset = columns - rows
        if self.mode == 2:
            return outside_band(rows, columns, rows, 0)
        if self.mode == 3:
            return outside_band(rows, columns, rows + columns, offset)
        if self.mode == 4:
            return outside_band(rows, columns, self.before - offset, self.after + offset)
        if self.mode == 6:
            hidden = outside_band(rows, columns, rows + columns, offset)
            return None if hidden is None else hidden & (torch.arange(columns) >= self.prefix[request])
        if self.mask is None:
            return None
        hidden = self.mask[min(request, self.mask.shape[0] - 1), :, :rows, :columns].bool()
        if self.mode == 0:
            self._require_band(hidden, outside_band(rows, columns, self.before, self.after))
        if self.packed:
            require(
                not bool(hidden.all(-1).any()),
                self.op,
                "with TND no row of atten_mask hides everything",
                f"such a row for request {request}",
            )
        return hidden

    def _require_band(self, hidden: Tensor, outside: Tensor | None) -> None:
        require(
            outside is None or not bool((outside & ~hidden).any()),
            self.op,
            "atten_mask of sparse_mode 0 hides all that lies outside pre_tockens and next_tockens",
            f"a mask that shows some of it, with {self.before} and {self.after}",
        )

    def bias(self, request: int) -> Tensor | None:
        """``[N, 1 or S1, S2]``: what the scaled scores get, which is ``scale * pse`` (``pse_type`` 1)."""
        if self.pse is None:
            return None
        return self.pse[min(request, self.pse.shape[0] - 1)].float() * self.scale


def training(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None,
    padding_mask: Tensor | None,
    atten_mask: Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tockens: int,
    next_tockens: int,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    sparse_mode: int,
    softmax_layout: str,
    sink: Tensor | None,
) -> Training:
    """Checks a call; parameters as of ``npu_fusion_attention``."""
    layout = input_layout.upper()
    require(layout in _LAYOUTS, op, f"input_layout is one of {', '.join(_LAYOUTS)}", repr(input_layout))
    require(head_num > 0, op, "head_num is at least 1", head_num)
    refuse(op, padding_mask=padding_mask)
    require(0 < keep_prob <= 1, op, "keep_prob is in (0, 1]", keep_prob)
    if keep_prob != 1:
        refuse(op, **{"keep_prob below 1 (dropout)": keep_prob})
    require(
        softmax_layout == "" or (softmax_layout == "TND" and layout == "TND"),
        op,
        "softmax_layout is empty, or TND with input_layout TND",
        f"{softmax_layout!r} with {layout}",
    )
    heads_query, heads_key, heads_value = _require_tensors(op, layout, head_num, query, key, value)
    spans = _spans(op, layout, heads_query, heads_key, actual_seq_qlen, actual_seq_kvlen)
    mode = sparse_mode if atten_mask is not None else 0
    mask = _mask(op, layout, sparse_mode, atten_mask, spans, head_num)
    _require_bias(op, layout, pse, query, heads_query, heads_key)
    if sink is not None:
        require(
            tuple(sink.shape) == (head_num,) and sink.dtype == torch.float32,
            op,
            "sink is float32, one element a head",
            f"{sink.dtype} {tuple(sink.shape)} for {head_num} heads",
        )
    return Training(
        op=op,
        layout=layout,
        query=heads_query,
        key=heads_key,
        value=heads_value,
        scale=scale,
        spans=spans,
        mode=mode,
        before=pre_tockens,
        after=next_tockens,
        prefix=_prefix(op, mode, prefix, spans),
        mask=mask,
        pse=pse,
        sink=sink,
    )


def _require_tensors(
    op: str, layout: str, heads: int, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads first."""
    require(
        query.dtype in _DTYPES and query.dtype == key.dtype == value.dtype,
        op,
        "query, key and value are float16, bfloat16 or float32, all the same",
        f"{query.dtype}, {key.dtype} and {value.dtype}",
    )
    shapes = f"{layout}: {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)} with head_num {heads}"
    require(
        query.dim() == key.dim() == value.dim() == len(layout),
        op,
        "query, key and value have the axes of input_layout",
        shapes,
    )
    kv_heads = heads
    if "H" in layout:
        hidden = query.shape[-1]
        require(hidden % heads == 0 and hidden > 0, op, "H is head_num times D", shapes)
        head_dim = hidden // heads
        require(key.shape[-1] % head_dim == 0 and key.shape[-1] > 0, op, "key's H is a multiple of query's D", shapes)
        kv_heads = key.shape[-1] // head_dim
        require(value.shape[-1] % kv_heads == 0, op, "value's H is a multiple of key's N", shapes)
    first, second, third = (
        heads_first(tensor, layout, count) for tensor, count in ((query, heads), (key, kv_heads), (value, kv_heads))
    )
    head_axis = 0 if layout == "TND" else 1
    kv_heads = second.shape[head_axis]
    require(first.shape[head_axis] == heads, op, "head_num is the N of query", shapes)
    require(second.shape[:-1] == third.shape[:-1], op, "key and value have the same shape (but for D)", shapes)
    require(layout == "TND" or first.shape[0] == second.shape[0], op, "B is the same for all", shapes)
    require(heads <= 256, op, "query's N is at most 256", heads)
    require(kv_heads > 0 and heads % kv_heads == 0, op, "query's N is a multiple of key's", shapes)
    require(
        1 <= first.shape[-1] <= 768 and first.shape[-1] == second.shape[-1] >= third.shape[-1],
        op,
        "D is 1 to 768, the same of query and key, and not more of value",
        shapes,
    )
    require(max(first.shape[-2], second.shape[-2]) <= _MOST_TOKENS, op, "S, or T, is at most 1M", shapes)
    return first, second, third


def _spans(
    op: str,
    layout: str,
    query: Tensor,
    key: Tensor,
    query_ends: Sequence[int] | None,
    key_ends: Sequence[int] | None,
) -> list[tuple[slice, slice]]:
    if layout != "TND":
        return [(slice(0, query.shape[-2]), slice(0, key.shape[-2]))] * query.shape[0]
    require(
        bool(query_ends) and bool(key_ends) and len(query_ends or ()) == len(key_ends or ()),
        op,
        "TND needs actual_seq_qlen and actual_seq_kvlen, equally long, one running sum per request",
        f"{query_ends} and {key_ends}",
    )
    require(
        len(query_ends or ()) <= _MOST_PACKED, op, f"TND takes at most {_MOST_PACKED} requests", len(query_ends or ())
    )
    spans = [
        _slices(op, name, list(given or ()), tokens)
        for name, given, tokens in (
            ("actual_seq_qlen", query_ends, query.shape[-2]),
            ("actual_seq_kvlen", key_ends, key.shape[-2]),
        )
    ]
    return list(zip(*spans, strict=False))


def _slices(op: str, name: str, stops: list[int], tokens: int) -> list[slice]:
    """The rows of each request; requests at the end with a 0 for a running sum take no part."""
    while stops and stops[-1] == 0:
        stops.pop()
    require(
        all(before <= after for before, after in zip([0, *stops], stops, strict=False)),
        op,
        f"{name} is a running sum: no element is negative or less than the one before it (zeros at the end apart)",
        stops,
    )
    require(not stops or stops[-1] <= tokens, op, f"{name} ends within the {tokens} tokens T", stops[-1:])
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _mask(
    op: str,
    layout: str,
    mode: int,
    mask: Tensor | None,
    spans: list[tuple[slice, slice]],
    heads: int,
) -> Tensor | None:
    """The mask of modes 0, 1 and 5 as ``[1 or B, 1 or N, S1, S2]``."""
    allowed = (0, 1, 2, 3, 4, 6, 7, 8) if layout == "TND" else (0, 1, 2, 3, 4, 5, 6)
    require(mode in allowed, op, "sparse_mode is 0 to 6, with TND 0 to 8 but 5", f"{mode} with {layout}")
    if mask is None:
        # The page: without atten_mask sparse_mode, pre_tockens and next_tockens have no effect.
        return None
    if mode in (7, 8):
        refuse(op, **{f"sparse_mode {mode} (a long sequence cut over devices)": mode})
    require(mask.dtype in (torch.bool, torch.uint8), op, "atten_mask is bool or uint8", mask.dtype)
    if mode in (2, 3, 4):
        require_compressed(op, mask, mode)
        return None
    require_mask_values(op, mask)
    if mode == 6:
        require(
            tuple(mask.shape) == _PREFIX_SHAPE and torch.equal(mask.view(torch.uint8), _prefix_mask()),
            op,
            "sparse_mode 6 needs atten_mask (3072, 2048): ones above the diagonal of the first 2048 rows, and in the "
            "right half of the others",
            f"{mask.dtype} {tuple(mask.shape)}",
        )
        return None
    rows = max((one.stop - one.start for one, _ in spans), default=0)
    columns = max((other.stop - other.start for _, other in spans), default=0)
    given = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    pairs = (rows, columns)
    shapes = [(len(spans), heads, *pairs), (len(spans), 1, *pairs)]
    shapes += [] if mode in _PREFIX_MODES else [(1, 1, *pairs)]
    require(
        tuple(given.shape) in ([(1, 1, *pairs)] if layout == "TND" else shapes) and mask.dim() in (2, 4),
        op,
        "atten_mask is (B, N, S1, S2), (B, 1, S1, S2), (1, 1, S1, S2) or (S1, S2); with sparse_mode 5 one of the first "
        "two, with TND (S1, S2) of the longest request",
        f"{tuple(mask.shape)} for B = {len(spans)}, S1 = {rows}, S2 = {columns}, sparse_mode {mode}",
    )
    return given


@functools.cache
def _prefix_mask() -> Tensor:
    causal = torch.ones(2048, 2048, dtype=torch.uint8).triu_(1)
    halves = torch.arange(2048) >= 1024
    return torch.cat((causal, halves.to(torch.uint8).expand(1024, 2048)))


def _prefix(op: str, mode: int, prefix: Sequence[int] | None, spans: list[tuple[slice, slice]]) -> list[int]:
    if mode not in _PREFIX_MODES:
        return []
    given = [int(each) for each in prefix or ()]
    require(
        len(given) == len(spans) <= 32,
        op,
        "sparse_mode 5 and 6 need prefix, one element for each of at most 32 requests",
        f"{len(given)} for {len(spans)}",
    )
    for length, (rows, columns) in zip(given, spans, strict=True):
        most, fewer = columns.stop - columns.start, (columns.stop - columns.start) - (rows.stop - rows.start)
        require(
            max(0, fewer) <= length <= most,
            op,
            "an element of prefix is at least S2 - S1 and 0, and at most S2",
            f"{length} for S2 = {most}, S2 - S1 = {fewer}",
        )
    return given


def _require_bias(op: str, layout: str, pse: Tensor | None, given: Tensor, query: Tensor, key: Tensor) -> None:
    if pse is None:
        return
    if layout == "TND":
        refuse(op, **{"pse with TND": pse})
    require(pse.dtype == given.dtype, op, "pse has query's dtype", f"{pse.dtype} and {given.dtype}")
    requests, heads, rows, _ = query.shape
    columns = key.shape[-2]
    if rows > _ALIBI_ROWS and pse.dim() == 4 and pse.shape[2] == _ALIBI_ROWS:
        refuse(op, **{f"pse of {_ALIBI_ROWS} rows (compressed alibi)": pse})
    shapes = ((requests, heads, rows, columns), (requests, heads, 1, columns), (1, heads, rows, columns))
    require(
        tuple(pse.shape) in shapes,
        op,
        "pse is (B, N, S1, S2), (B, N, 1, S2) or (1, N, S1, S2)",
        f"{tuple(pse.shape)} for B = {requests}, N = {heads}, S1 = {rows}, S2 = {columns}",
    )
