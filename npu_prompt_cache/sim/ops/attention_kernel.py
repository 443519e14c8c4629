"""Masked attention of one request, forward and backward: what every attention operator of the simulator computes.

Everything is heads first: query ``[N, S1, D]``, key ``[KV_N, S2, D]``, value ``[KV_N, S2, DV]`` with ``N`` a multiple
of ``KV_N`` (query head ``n`` reads K/V head ``n // (N // KV_N)``). Scores, softmax and sums are float32, whatever the
inputs are. ``hidden`` is true where a pair takes no part, ``[S1, S2]``, ``[1, S1, S2]`` or ``[N, S1, S2]``; ``bias``
is added to the scaled scores, ``[1 or N, 1 or S1, S2]``. A row with nothing to attend has output 0 and total 0.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Attended", "Gradients", "attend", "attend_backward", "log_sum_exp", "with_sink"]

# Scores held at once: 64 MiB of float32.
_SCORES = 1 << 24


class Attended(NamedTuple):
    """Attention of one request, float32."""

    out: Tensor
    """``[N, S1, DV]``."""
    maximum: Tensor
    """``[N, S1]``: the greatest score of each row; the least float32 where there is none."""
    total: Tensor
    """``[N, S1]``: the sum of ``exp(score - maximum)`` of each row."""


class Gradients(NamedTuple):
    """What :func:`attend` got, by what a loss is: float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    """``[N, S1, S2]``: of the scaled scores with their bias."""
    sink: Tensor
    """``[N]``; zeros without a sink."""


class _Tile(NamedTuple):
    kv: slice
    heads: slice
    rows: slice


def log_sum_exp(attended: Attended) -> Tensor:
    """``[N, S1]``: log of the sum of the exponentials of each row's scores; +inf for a row with nothing to attend.

    The infinity is how the device marks rows without a result (CANN page of aclnnFusedInferAttentionScoreV4,
    output softmaxLse).
    """
    lse = attended.maximum + attended.total.log()
    return lse.masked_fill(attended.total == 0, torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
) -> Attended:
    """``softmax(scale * query @ key^T + bias, where not hidden) @ value``; shapes as in the module's text."""
    heads, rows, _ = query.shape
    out = query.new_zeros(heads, rows, value.shape[2], dtype=torch.float32)
    maximum = query.new_full((heads, rows), torch.finfo(torch.float32).min, dtype=torch.float32)
    total = query.new_zeros(heads, rows, dtype=torch.float32)
    if key.shape[1] == 0:
        return Attended(out, maximum, total)
    for tile in _tiles(query, key):
        scores = _scores(tile, query, key, scale, hidden, bias)
        top = scores.amax(-1).clamp_(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(top[..., None]).exp_()
        mass = weights.sum(-1)
        parts = _per_kv_head(weights, tile) @ value[tile.kv].float()
        parts = parts.view(*weights.shape[:2], -1) / mass.masked_fill(mass == 0, 1)[..., None]
        out[tile.heads, tile.rows], maximum[tile.heads, tile.rows], total[tile.heads, tile.rows] = parts, top, mass
    return Attended(out, maximum, total)


def with_sink(attended: Attended, sink: Tensor) -> Attended:
    """The same attention where each row also attends to a score of its head's, ``sink`` ``[N]``, with a value of 0."""
    sink = sink[:, None].float()
    maximum = torch.maximum(attended.maximum, sink)
    of_keys = attended.total * (attended.maximum - maximum).exp()
    total = of_keys + (sink - maximum).exp()
    return Attended(attended.out * (of_keys / total)[..., None], maximum, total)


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    attended: Attended,
    grad: Tensor,
    *,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Gradients:
    """Gradients of :func:`attend`, and of :func:`with_sink` after it, from the row statistics and the output returned.

    Args:
        attended: of the whole attention; ``key`` and ``value`` may be a part of what it attended to.
        sink: that of :func:`with_sink`, if ``attended`` is its.
        grad: ``[N, S1, DV]``, of ``attended.out``.
    """
    heads, rows, _ = query.shape
    of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
    of_scores = query.new_zeros(heads, rows, key.shape[1], dtype=torch.float32)
    grad = grad.float()
    # What each row's weights have in common, because they sum to one.
    common = (grad * attended.out.float()).sum(-1)
    mass = attended.total.masked_fill(attended.total == 0, torch.inf)
    for tile in _tiles(query, key):
        weights = _scores(tile, query, key, scale, hidden, bias).sub_(attended.maximum[tile.heads, tile.rows, None])
        weights = weights.exp_().div_(mass[tile.heads, tile.rows, None])
        into = _per_kv_head(grad[tile.heads, tile.rows], tile)
        of_value[tile.kv] += _per_kv_head(weights, tile).transpose(1, 2) @ into
        of_weights = (into @ value[tile.kv].float().transpose(1, 2)).view(weights.shape)
        of_tile = weights * (of_weights - common[tile.heads, tile.rows, None])
        of_scores[tile.heads, tile.rows] = of_tile
        scaled = _per_kv_head(of_tile, tile) * scale
        of_query[tile.heads, tile.rows] = (scaled @ key[tile.kv].float()).view(*of_tile.shape[:2], -1)
        of_key[tile.kv] += scaled.transpose(1, 2) @ _per_kv_head(query[tile.heads, tile.rows].float(), tile)
    of_sink = query.new_zeros(heads, dtype=torch.float32)
    if sink is not None:
        weight = (sink[:, None].float() - attended.maximum).exp() / mass
        of_sink = -(weight * common).sum(-1)
    return Gradients(of_query, of_key, of_value, of_scores, of_sink)


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    """Parts of K/V heads and rows, each with at most about ``_SCORES`` scores, which together are all."""
    heads, rows, _ = query.shape
    kv_heads, columns, _ = key.shape
    group = heads // kv_heads
    step = max(1, _SCORES // max(1, group * rows * columns))
    row_step = max(1, min(rows, _SCORES // max(1, group * columns)))
    for first in range(0, kv_heads, step):
        kv = slice(first, min(first + step, kv_heads))
        for row in range(0, rows, row_step):
            yield _Tile(kv, slice(kv.start * group, kv.stop * group), slice(row, min(row + row_step, rows)))


def _scores(
    tile: _Tile, query: Tensor, key: Tensor, scale: float, hidden: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Scaled scores of a tile, with bias, minus infinity where hidden: ``[heads, rows, S2]``, float32, our own."""
    part = query[tile.heads, tile.rows]
    scores = _per_kv_head(part.float(), tile) @ key[tile.kv].float().transpose(1, 2)
    scores = scores.view(*part.shape[:2], key.shape[1]).mul_(scale)
    if bias is not None:
        scores += _of_tile(bias, tile)
    if hidden is not None:
        scores.masked_fill_(_of_tile(hidden if hidden.dim() == 3 else hidden[None], tile), -torch.inf)
    return scores


def _of_tile(pairs: Tensor, tile: _Tile) -> Tensor:
    pairs = pairs if pairs.shape[0] == 1 else pairs[tile.heads]
    return pairs if pairs.shape[1] == 1 else pairs[:, tile.rows]


def _per_kv_head(rows: Tensor, tile: _Tile) -> Tensor:
    """``[heads, rows, X]`` as ``[kv heads, group * rows, X]``: the rows of the heads that share a K/V head together."""
    return rows.reshape(tile.kv.stop - tile.kv.start, -1, rows.shape[2])
