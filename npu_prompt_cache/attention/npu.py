"""Paged attention on the NPU: torch_npu's operators over the pool's planes and a block table.

The only module that imports torch_npu. Facts about operators are from their op-plugin pages, products A2 and A3.

Streams: work is enqueued on torch's current stream. torch_npu keeps a queue of its own in front of the device's
streams; `QueuedStream` hands it on, so that what is enqueued through the runtime itself (the cache's copies and events)
comes after what torch was asked for before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch_npu

from npu_prompt_cache.attention import cpu
from npu_prompt_cache.attention.kind import AttentionKind
from npu_prompt_cache.errors import UnsupportedModel

if TYPE_CHECKING:
    import numpy.typing as npt

    from npu_prompt_cache.attention.sequence import Sequence
    from npu_prompt_cache.layout import KVLayout, LayerShape

#: Side of the mask that ``sparse_mode=3`` takes, whatever the lengths are.
_MASK_SIDE = 2048
#: Of a call, with packed layouts.
_MAX_SEQUENCES = 4096
#: Right-down causal: the last query sees the last key, whatever the lengths are.
_RIGHT_DOWN_CAUSAL = 3
#: The same, and each query sees only so many keys before its own.
_BAND = 4


_FUSED = "npu_fused_infer_attention_score_v2"
_SDPA = "scaled_dot_product_attention"


class Route(NamedTuple):
    """How a layer's attention goes over the pool."""

    op: str
    layout: str
    reason: str


class _Rule(NamedTuple):
    fits: Callable[[LayerShape, int, AttentionKind], bool]
    op: str | None  # None: refused
    layout: str
    reason: str


def _packs(kv: LayerShape, heads: int) -> bool:
    """True where the operator takes packed sequences (TND)."""
    return kv.head_dim == 128 or (kv.head_dim == 64 and heads == kv.num_kv_heads)


#: The first rule that fits decides. Of the fused operators it is the one that its page recommends wherever neither a
#: shared prefix nor quantised K/V are wanted. Torch's own operators take each sequence's rows, which are copied
#: together on the device where its blocks are no neighbours.
_RULES = (
    _Rule(
        lambda kv, heads, kind: kv.dtype is torch.float32,
        _SDPA,
        "BNSD",
        "fused attention takes float16 and bfloat16 only",
    ),
    _Rule(
        lambda kv, heads, kind: kv.value_head_dim != kv.head_dim,
        _SDPA,
        "BNSD",
        "fused attention over pages takes K and V of one head_dim only",
    ),
    _Rule(
        lambda kv, heads, kind: kv.block_size % 128 != 0 or kv.block_size > 512,
        None,
        "",
        "fused attention over pages takes blocks of 128, 256, 384 or 512 tokens: set block_size",
    ),
    _Rule(
        lambda kv, heads, kind: heads > 256,
        None,
        "",
        "fused attention takes at most 256 query heads",
    ),
    _Rule(
        lambda kv, heads, kind: heads // kv.num_kv_heads > 64,
        None,
        "",
        "fused attention takes at most 64 query heads for each key/value head",
    ),
    _Rule(
        lambda kv, heads, kind: kv.num_kv_heads * kv.head_dim > 65535,
        None,
        "",
        "fused attention over pages [blocks, block_size, H] takes H = key/value heads * head_dim up to 65535",
    ),
    _Rule(
        lambda kv, heads, kind: kv.head_dim % 16 != 0 or kv.head_dim > 512,
        None,
        "",
        "fused attention takes a head_dim that is a multiple of 16, at most 512",
    ),
    _Rule(
        lambda kv, heads, kind: kind.softcap is not None or kind.span.chunk is not None,
        _SDPA,
        "BNSD",
        "fused attention knows neither soft-capped scores nor chunks of keys",
    ),
    _Rule(
        lambda kv, heads, kind: kind.sinks is not None and kind.sinks.dtype is not torch.bfloat16,
        _SDPA,
        "BNSD",
        "fused attention takes sinks in bfloat16 only",
    ),
    _Rule(lambda kv, heads, kind: _packs(kv, heads), _FUSED, "TND", "packed, no padding"),
    _Rule(
        lambda kv, heads, kind: kind.sinks is not None,
        _SDPA,
        "BNSD",
        "fused attention takes sinks with TND only, and TND takes head_dim 128, or 64 where queries are not grouped",
    ),
    _Rule(
        lambda kv, heads, kind: kind.span.window is not None,
        _SDPA,
        "BNSD",
        "outside TND, which does not take this head_dim, fused attention shows a single query token every key",
    ),
    _Rule(
        lambda kv, heads, kind: True,
        _FUSED,
        "BSND",
        "TND takes head_dim 128, or 64 where queries are not grouped; BSND takes multiples of 16 up to 512",
    ),
)


def route(layout: KVLayout, num_heads: int, kind: AttentionKind) -> Route:
    """Decides how a layer's attention goes over the pool.

    Args:
        layout: of the pool.
        num_heads: query heads.
        kind: what the layer asks for; no kind is refused that another one is not.

    Raises:
        UnsupportedModel: no operator takes it; the message says why.
    """
    ways = {_route_of_layer(layer, num_heads, kind) for layer in layout.layer_shapes}
    return ways.pop() if len(ways) == 1 else Route(_SDPA, "BNSD", "layers need different operators")


def _route_of_layer(layer: LayerShape, num_heads: int, kind: AttentionKind) -> Route:
    rule = next(rule for rule in _RULES if rule.fits(layer, num_heads, kind))
    if rule.op is None:
        raise UnsupportedModel(f"attention over the pool on the NPU cannot be: {rule.reason}; found {layer}")
    return Route(rule.op, rule.layout, rule.reason)


class QueuedStream:
    """Torch's current stream of a device, as it was when this was made, and torch_npu's queue in front of it."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        torch.npu.init()  # type: ignore[attr-defined]  # this may be the program's first use of torch's NPU
        # torch_npu makes the streams of a device when it is first set.
        with torch.npu.device(device_index):  # type: ignore[attr-defined]
            self._stream = torch.npu.current_stream()  # type: ignore[attr-defined]

    def hand_on(self) -> int:
        """Waits until the runtime has all that torch was asked for on this stream. Returns the runtime's handle."""
        # Of several devices, only the current one's queue is handed on.
        with torch.npu.device(self._device_index):  # type: ignore[attr-defined]
            return self._stream.npu_stream  # type: ignore[no-any-return]


def paged_attention(
    layout: KVLayout, num_heads: int, device: torch.device, gathers: bool = False
) -> PagedAttention | SdpaAttention:
    """Attention of one request by the route that its model takes; see `attention.paged_attention`.

    Raises:
        UnsupportedModel: no operator takes the model's shapes.
    """
    if gathers:
        return SdpaAttention(layout, device)
    way = route(layout, num_heads, AttentionKind())
    return SdpaAttention(layout, device) if way.op == _SDPA else PagedAttention(layout, device)


class _OnStream:
    """The device, and the stream that a request's leases are fenced on: the one that was current when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.npu.current_stream(device)  # type: ignore[attr-defined]

    def _empty(self, *shape: int) -> torch.Tensor:
        """int32, of that stream's memory: another one may use it in `in_order` only, and so is waited for."""
        # No inference tensor: the next forward may be outside inference_mode, and writes to it.
        with torch.inference_mode(False), torch.npu.stream(self._stream):  # type: ignore[attr-defined]
            return torch.empty(*shape, dtype=torch.int32, device=self._device)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Work inside comes after what this object's stream was given before, and that stream waits for it.

        The request's leases are fenced on that stream; the caller may use another one later.
        """
        current = torch.npu.current_stream(self._device)  # type: ignore[attr-defined]
        if current == self._stream:
            yield
            return
        current.wait_stream(self._stream)
        try:
            yield
        finally:
            self._stream.wait_stream(current)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy on the device, enqueued: the host does not wait."""
        return _pinned(array).to(self._device, non_blocking=True)


class SdpaAttention(_OnStream, cpu.PagedAttention):
    """Attention of one request's rows by torch's own operator: what `cpu` does, on the device."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        _OnStream.__init__(self, device)
        cpu.PagedAttention.__init__(self, layout)


class PagedAttention(_OnStream):
    """Attention of one request's rows over the pool. Its tables stay on the device and change in place.

    Their addresses change only when a row outgrows its table, whose width doubles then: a captured graph can be
    replayed in between.

    Args:
        layout: of the pool.
        device: of the pool and the model.
    """

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        super().__init__(device)
        self.layout = layout
        self._table_on_host = np.zeros((0, 0), np.int32)
        self._table = self._empty(0, 0)
        self._slots = self._empty(0)

    def batch(
        self, sequences: list[Sequence], slots: npt.NDArray[np.int64], sources: npt.NDArray[np.int64] | None = None
    ) -> PagedBatch:
        """A packed batch; the tables hold it until the next one.

        Args:
            sequences: in packed order, together covering the row.
            slots: int64 ``[n]``: where K/V are written, ``block * block_size + offset``.
            sources: int64 ``[n]``: which new token's; by default each token's, in their order.
        """
        if len(slots) > len(self._slots):
            self._slots = self._empty(len(slots))
        self._slots[: len(slots)].copy_(_pinned(slots.astype(np.int32)), non_blocking=True)
        self._set_table(sequences)
        taken = None if sources is None else self.upload(sources)
        return PagedBatch(self, sequences, self._slots[: len(slots)], taken, self._table)

    def _set_table(self, sequences: list[Sequence]) -> None:
        rows, width = self._table_on_host.shape
        needed = max(len(sequence.block_table) for sequence in sequences)
        if rows != len(sequences) or width < needed:
            rows, width = len(sequences), max(2 * width, needed + 1)
            self._table = self._empty(rows, width)
            self._table_on_host = np.full((rows, width), -1, np.int32)
        table = np.zeros((rows, width), np.int32)  # block 0 is nobody's
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.block_table)] = sequence.block_table
        if not np.array_equal(table, self._table_on_host):
            self._table.copy_(_pinned(table), non_blocking=True)
            self._table_on_host = table

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: tuple[list[int], list[int]],
        input_layout: str,
        kind: AttentionKind,
    ) -> torch.Tensor:
        """One call of the operator; `query` as the layout wants it, lengths of queries and of keys."""
        blocks, block_size, heads, head_dim = keys.shape  # values' too: `route`
        # The pages define no mask of 2048 x 2048 for a single query token outside TND, and it sees every key anyway.
        masked = input_layout == "TND" or query.shape[1] > 1
        window = kind.span.window
        band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
        output, _ = torch_npu.npu_fused_infer_attention_score_v2(
            query,
            keys.view(blocks, block_size, heads * head_dim),
            values.view(blocks, block_size, heads * head_dim),
            atten_mask=_causal_mask(query.device) if masked else None,
            actual_seq_qlen=lengths[0],
            actual_seq_kvlen=lengths[1],
            block_table=table,
            learnable_sink=kind.sinks,
            num_query_heads=query.shape[-2],
            num_key_value_heads=heads,
            softmax_scale=head_dim**-0.5 if kind.scale is None else kind.scale,
            input_layout=input_layout,
            sparse_mode=(_BAND if band else _RIGHT_DOWN_CAUSAL) if masked else 0,
            block_size=block_size,
            **band,
        )
        return output  # type: ignore[no-any-return]


class PagedBatch:
    """Where a packed batch writes and reads: the same for all layers of one forward pass. From `PagedAttention.batch`.

    Attributes:
        sequences: in packed order.
    """

    def __init__(
        self,
        attention: PagedAttention,
        sequences: list[Sequence],
        slots: torch.Tensor,
        sources: torch.Tensor | None,
        table: torch.Tensor,
    ) -> None:
        self.sequences = sequences
        self._attention = attention
        self._slots = slots
        self._sources = sources
        self._table = table

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Puts the new tokens' K and V, each ``[1, kv_heads, tokens, head_dim]``, into their slots of the planes.

        That of a token which several rows of the batch begin with goes to the slots of each, before any of them reads.
        """
        new_keys, new_values = _token_major(new_keys), _token_major(new_values)
        if self._sources is not None:
            new_keys, new_values = (rows.index_select(0, self._sources) for rows in (new_keys, new_values))
        torch_npu.npu_scatter_pa_kv_cache(new_keys, new_values, keys, values, self._slots, cache_mode="Norm")

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Causal attention of each sequence over its own blocks; grouped queries where there are fewer K/V heads.

        Args:
            query: ``[1, heads, tokens, head_dim]``, packed.
            keys: plane of K, ``[blocks, block_size, kv_heads, head_dim]``, new tokens written.
            values: plane of V.
            kind: what the layer asks for.

        Returns:
            ``[1, tokens, heads, head_dim]``.
        """
        way = route(self._attention.layout, query.shape[1], kind)
        if way.op == _SDPA:
            return self._reader.attend(query, keys, values, kind)
        packed = _token_major(query)
        is_packed = way.layout == "TND"
        outputs = []
        for first, last in self._calls(keys.shape[0], keys.shape[1], is_packed):
            sequences = self.sequences[first:last]
            start, tokens = sequences[0].start, sequences[0].tokens
            rows = packed[start : sequences[-1].stop]
            # Lengths of queries are cumulative where they are packed, those of keys never are: taken the other way
            # round they give wrong results and no error.
            queries = [s.stop - start if is_packed else tokens for s in sequences]
            lengths = (queries, [s.kv_length for s in sequences])
            if not is_packed:
                rows = rows.view(len(sequences), tokens, *rows.shape[1:])
            output = self._attention.attend(rows, keys, values, self._table[first:last], lengths, way.layout, kind)
            outputs.append(output.view(-1, *packed.shape[1:]))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    @functools.cached_property
    def _reader(self) -> cpu.BatchReader:
        return cpu.BatchReader(self._attention, self._attention.layout, self.sequences)

    def _calls(self, block_count: int, block_size: int, is_packed: bool) -> Iterator[tuple[int, int]]:
        """Intervals of neighbouring sequences that one call takes.

        The blocks of its sequences, those that they share counted for each, must not be more than the pool has; there
        are at most 4096 sequences; and without packing all must have equally many new tokens.
        """
        first = blocks = 0
        for at, sequence in enumerate(self.sequences):
            own = -(-sequence.kv_length // block_size)
            fits = is_packed or sequence.tokens == self.sequences[first].tokens
            if at > first and (blocks + own > block_count or at - first == _MAX_SEQUENCES or not fits):
                yield first, at
                first, blocks = at, 0
            blocks += own
        yield first, len(self.sequences)


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    """A copy in pinned memory: what is copied from there need not be waited for."""
    return torch.from_numpy(array).pin_memory()


def _token_major(states: torch.Tensor) -> torch.Tensor:
    """``[1, heads, tokens, head_dim]`` as contiguous ``[tokens, heads, head_dim]``: operators take no other strides."""
    return states[0].transpose(0, 1).contiguous()


@functools.cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """bool ``[2048, 2048]``: True above the diagonal, where nothing is seen."""
    with torch.inference_mode(False):
        mask = torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool).triu_(1)
        return mask.to(device)  # done when this returns: any stream may read it
