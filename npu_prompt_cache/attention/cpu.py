"""Paged attention on the CPU: torch's own kernels over the pool's planes, and one of ours for steps of decoding."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from npu_prompt_cache import _core

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from npu_prompt_cache.attention.kind import AttentionKind, Span
    from npu_prompt_cache.attention.sequence import Sequence
    from npu_prompt_cache.layout import KVLayout

#: New tokens of a sequence that go together at least where layers have windows or chunks: a call has its price too.
_SMALLEST_PIECE = 256


class Uploads(Protocol):
    """What brings arrays to the device of the planes."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor there."""


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

    def batch(
        self, sequences: list[Sequence], slots: npt.NDArray[np.int64], sources: npt.NDArray[np.int64] | None = None
    ) -> PagedBatch:
        """A packed batch.

        Args:
            sequences: in packed order, together covering the row.
            slots: int64 ``[n]``: where K/V are written, ``block * block_size + offset``.
            sources: int64 ``[n]``: which new token's; by default each token's, in their order.
        """
        return PagedBatch(self, self._layout, sequences, slots, sources)


class BatchReader:
    """Attention of a packed batch by torch's own operators, over each sequence's rows of the planes.

    Args:
        attention: whose `upload` brings tables to the planes' device.
        layout: of the pool.
        sequences: in packed order.
    """

    def __init__(self, attention: Uploads, layout: KVLayout, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self._upload = attention.upload
        self._places = [_Place(attention, sequence, layout.block_size) for sequence in sequences]
        self._pieces: dict[tuple[Span, bool], list[_Piece]] = {}

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
        pieces = self._pieces_for(kind, query)
        reads = (
            (piece.place.read(keys, piece.first, piece.last), piece.place.read(values, piece.first, piece.last))
            for piece in pieces
        )
        return _attend_each(query, pieces, reads, kind)

    def gather(self, plane: torch.Tensor) -> torch.Tensor:
        """All tokens of every sequence, in packed order: ``[1, kv_heads, kv_tokens, head_dim]``. Not to be written to.

        Args:
            plane: of K or V, new tokens written.
        """
        rows = [
            place.read(plane, 0, sequence.kv_length)
            for sequence, place in zip(self.sequences, self._places, strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)

    def attend_gathered(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """As `attend`, over keys and values ``[1, heads, kv_tokens, head_dim]``, ordered as `gather` orders tokens.

        Only of a kind whose queries see every token so far.
        """
        lengths = [sequence.kv_length for sequence in self.sequences]
        reads = zip(torch.split(keys, lengths, 2), torch.split(values, lengths, 2), strict=True)
        return _attend_each(query, self._pieces_for(kind, query), reads, kind)

    def hidden(self) -> torch.Tensor:
        """What the new tokens do not see of `gather`'s: bool ``[1, 1, tokens, kv_tokens]``.

        That is other sequences, and of their own what comes later.
        """
        lengths = [sequence.kv_length for sequence in self.sequences]
        place = np.concatenate([np.arange(length) for length in lengths])
        owner = np.repeat(np.arange(len(lengths)), lengths)
        is_new = np.concatenate([np.arange(s.kv_length) >= s.kv_length - s.tokens for s in self.sequences])
        hidden = (owner != owner[is_new, None]) | (place > place[is_new, None])
        return self._upload(hidden[None, None])

    def _pieces_for(self, kind: AttentionKind, query: torch.Tensor) -> list[_Piece]:
        """The same for all layers of a kind, so made once."""
        span, by_kernel = kind.span, _is_for_kernel(kind)
        found = self._pieces.get((span, by_kernel))
        if found is None:
            found = [
                piece
                for sequence, place in zip(self.sequences, self._places, strict=True)
                for piece in _cut(sequence, place, span, by_kernel, query)
            ]
            self._pieces[span, by_kernel] = found
        return found


class PagedBatch(BatchReader):
    """Where a packed batch writes and reads: the same for all layers of one forward pass. From `PagedAttention.batch`.

    Attributes:
        sequences: in packed order.
    """

    def __init__(
        self,
        attention: PagedAttention,
        layout: KVLayout,
        sequences: list[Sequence],
        slots: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64] | None,
    ) -> None:
        super().__init__(attention, layout, sequences)
        self._slots = slots
        self._on_device = attention.upload(slots)
        self._sources = None if sources is None else attention.upload(sources)
        self._is_on_cpu = self._on_device.device.type == "cpu"
        is_step = all(sequence.tokens == 1 for sequence in sequences)
        self._step = _Step(sequences) if is_step and self._is_on_cpu else None

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """As of a `BatchReader`."""
        if self._step is not None and self._step.takes(query, keys, values, kind):
            return self._step.attend(query, keys, values, kind)
        return super().attend(query, keys, values, kind)

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Puts the new tokens' K and V, each ``[1, kv_heads, tokens, head_dim]``, into their slots of the planes.

        That of a token which several rows of the batch begin with goes to the slots of each, before any of them reads.
        """
        for plane, states in ((keys, new_keys), (values, new_values)):
            rows = states[0].transpose(0, 1)
            if self._sources is not None:
                rows = rows.index_select(0, self._sources)
            if self._is_on_cpu:
                _write_rows(plane, rows, self._slots)
            else:
                plane.flatten(0, 1).index_copy_(0, self._on_device, rows)


class _Step:
    """A step of decoding, one new token a sequence: K and V are read where they lie, however scattered."""

    def __init__(self, sequences: list[Sequence]) -> None:
        width = max(len(sequence.block_table) for sequence in sequences)
        self._blocks = np.zeros((len(sequences), width), np.int32)
        for row, sequence in zip(self._blocks, sequences, strict=True):
            row[: len(sequence.block_table)] = sequence.block_table
        self._last = np.array([sequence.kv_length for sequence in sequences], np.int64)
        self._first: dict[Span, npt.NDArray[np.int64]] = {}  # the first token that each sequence sees

    def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: AttentionKind) -> bool:
        """True where the kernel does: in other precisions torch's is as good."""
        is_whole = not (keys.shape[3] % _core.DECODE_LANES or values.shape[3] % _core.DECODE_LANES)
        return is_whole and query.dtype is torch.float32 and _is_for_kernel(kind)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """As of a `BatchReader`."""
        first = self._first.get(kind.span)
        if first is None:
            first = np.array([kind.span.first_key(int(last) - 1) for last in self._last], np.int64)
            self._first[kind.span] = first
        _, heads, rows, key_dim = query.shape
        _, block_size, kv_heads, value_dim = values.shape
        packed = query.transpose(1, 2).contiguous()
        output = query.new_empty(1, rows, heads, value_dim)
        _core.decode_attention(
            packed.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            output.data_ptr(),
            self._blocks,
            first,
            self._last,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            block_size,
            key_dim**-0.5 if kind.scale is None else kind.scale,
            torch.get_num_threads(),
        )
        return output


def _write_rows(plane: torch.Tensor, rows: torch.Tensor, slots: npt.NDArray[np.int64]) -> None:
    """Rows ``[rows, heads, dim]`` into slots of a plane: torch's ``index_copy_`` takes several times as long."""
    if rows.shape != (len(slots), *plane.shape[2:]) or rows.dtype != plane.dtype:
        raise RuntimeError(f"rows {list(rows.shape)} {rows.dtype} for a plane {list(plane.shape)} {plane.dtype}")
    rows = rows.contiguous()  # held until it is copied
    _core.write_rows(rows.data_ptr(), plane.data_ptr(), slots, rows.shape[1] * rows.shape[2] * rows.itemsize)


class _Place:
    """Where one sequence's tokens lie in a plane: a slice where its blocks are neighbours, else a list of blocks."""

    def __init__(self, attention: Uploads, sequence: Sequence, block_size: int) -> None:
        blocks = -(-sequence.kv_length // block_size)
        table = sequence.block_table[:blocks]
        self.first_slot: int | None = None
        if int(table[-1]) - int(table[0]) == blocks - 1 and bool((table[1:] - table[:-1] == 1).all()):
            self.first_slot = int(table[0]) * block_size
        else:
            self.blocks = attention.upload(table)

    def read(self, plane: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """``[1, kv_heads, last - first, head_dim]``: a view of the plane, or of a copy of scattered blocks."""
        if self.first_slot is None:
            block_size = plane.shape[1]
            passed = first // block_size
            plane = plane.index_select(0, self.blocks[passed : -(-last // block_size)])
            first, last = first - passed * block_size, last - passed * block_size
        else:
            first, last = self.first_slot + first, self.first_slot + last
        return plane.flatten(0, 1)[None, first:last].transpose(1, 2)


class _Piece(NamedTuple):
    """Some new tokens of a sequence, and the keys that any of them sees."""

    place: _Place
    start: int  # in the packed row
    stop: int
    first: int  # of the sequence's tokens
    last: int
    mask: torch.Tensor | None


def _cut(sequence: Sequence, place: _Place, span: Span, by_kernel: bool, query: torch.Tensor) -> Iterator[_Piece]:
    """A sequence whole; or in pieces, where few of its keys are seen from any place: each reads these alone."""
    before = sequence.kv_length - sequence.tokens
    step = sequence.tokens
    if span.limits(sequence.kv_length):
        step = max(_SMALLEST_PIECE, *(reach for reach in span if reach is not None))
    for at in range(0, sequence.tokens, step):
        end = min(at + step, sequence.tokens)
        first, last = span.first_key(before + at), before + end
        mask = _mask(before + at, first, last, span, by_kernel, query)
        yield _Piece(place, sequence.start + at, sequence.start + end, first, last, mask)


def _attend_each(
    query: torch.Tensor,
    pieces: list[_Piece],
    reads: Iterable[tuple[torch.Tensor, torch.Tensor]],
    kind: AttentionKind,
) -> torch.Tensor:
    """Of pieces in packed order, over the keys and values of each; returns ``[1, tokens, heads, head_dim]``."""
    attend = _attend_by_kernel if _is_for_kernel(kind) else _attend_by_hand
    outputs = []
    for piece, (keys, values) in zip(pieces, reads, strict=True):
        output = attend(query[:, :, piece.start : piece.stop], keys, values, piece.mask, kind)
        outputs.append(output.transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _is_for_kernel(kind: AttentionKind) -> bool:
    return kind.softcap is None and kind.sinks is None


def _attend_by_kernel(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, kind: AttentionKind
) -> torch.Tensor:
    """Of one sequence, ``[1, heads, tokens, head_dim]``."""
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=kind.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, kind: AttentionKind
) -> torch.Tensor:
    """As `_attend_by_kernel`, with what torch's kernel has no argument for: as models' own eager attention does it."""
    _, heads, tokens, head_dim = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    scale = head_dim**-0.5 if kind.scale is None else kind.scale
    # Heads that share K/V stand together: their rows are one matrix, and K/V need not be repeated.
    rows = query.reshape(1, kv_heads, -1, head_dim)
    scores = (rows @ keys.transpose(2, 3)).view(1, heads, tokens, length) * scale
    if kind.softcap is not None:
        scores = (scores / kind.softcap).tanh_() * kind.softcap
    if mask is not None:
        scores = scores + mask
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, heads, tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., :length].to(values.dtype)
    return (weights.reshape(1, kv_heads, -1, length) @ values).view(1, heads, tokens, -1)


def _mask(
    query_first: int, first: int, last: int, span: Span, by_kernel: bool, query: torch.Tensor
) -> torch.Tensor | None:
    """For queries ``[query_first, last)`` over keys ``[first, last)``: minus infinity where one does not see the other.

    None where nothing is hidden, and where the kernel's own causal mask is the same.
    """
    if last - query_first == 1 or (by_kernel and query_first == first and not span.limits(last - first)):
        return None
    keys = torch.arange(first, last, device=query.device)
    queries = keys[query_first - first :, None]
    hidden = keys > queries
    if span.window is not None:
        hidden |= keys <= queries - span.window
    if span.chunk is not None:
        hidden |= keys // span.chunk < queries // span.chunk
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
