"""The kernel for steps of decoding: right beside float64, whatever lies where."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from npu_prompt_cache.attention import cpu
from npu_prompt_cache.attention.kind import AttentionKind, Span
from npu_prompt_cache.attention.sequence import Sequence
from npu_prompt_cache.layout import KVLayout

BLOCK = 16


class Pool:
    """Planes of random numbers in which a sequence's blocks are anywhere; what belongs to nobody is NaN."""

    def __init__(self, lengths: list[int], heads: int, dims: tuple[int, int], seed: int, placed: int = 0) -> None:
        content = torch.Generator().manual_seed(seed)
        blocks = [-(-length // BLOCK) for length in lengths]
        table = np.random.default_rng(placed).permutation(np.arange(1, sum(blocks) + 4))
        self.planes = [torch.full((len(table) + 1, BLOCK, heads, dim), torch.nan) for dim in dims]
        self.rows: list[list[torch.Tensor]] = []
        self.sequences: list[Sequence] = []
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            of_row, table = table[:count].astype(np.int32), table[count:]
            slots = torch.from_numpy(of_row.astype(np.int64)).repeat_interleave(BLOCK) * BLOCK
            slots = (slots + torch.arange(count * BLOCK) % BLOCK)[:length]
            self.rows.append([torch.randn(length, heads, dim, generator=content) for dim in dims])
            for plane, states in zip(self.planes, self.rows[-1], strict=True):
                plane.view(-1, *plane.shape[2:])[slots] = states
            self.sequences.append(Sequence(row, row + 1, length, of_row))

    def attend(self, query: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
        key_dim, value_dim = (plane.shape[3] for plane in self.planes)
        layout = KVLayout(1, self.planes[0].shape[2], key_dim, torch.float32, BLOCK, value_head_dim=value_dim)
        batch = cpu.PagedAttention(layout).batch(self.sequences, np.zeros(0, np.int64))
        assert batch._step is not None
        assert batch._step.takes(query, *self.planes, kind)
        return batch.attend(query, *self.planes, kind)


def exact(pool: Pool, query: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    outputs = []
    for row, (keys, values) in enumerate(pool.rows):
        first = kind.span.first_key(len(keys) - 1)
        group = query.shape[1] // keys.shape[1]
        k, v = (states[first:].double().repeat_interleave(group, dim=1) for states in (keys, values))
        scale = k.shape[2] ** -0.5 if kind.scale is None else kind.scale
        weights = (torch.einsum("hd,nhd->hn", query[0, :, row].double(), k) * scale).softmax(-1)
        outputs.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(outputs)[None]


def query_of(rows: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    """As models make it: heads before tokens, of a tensor with tokens before heads."""
    return torch.randn(1, rows, heads, dim, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("lengths", [[1], [16], [17], [63, 64, 65], [1030, 3, 2100], [5000]])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (96, 32)])
def test_it_is_exact(lengths: list[int], heads: tuple[int, int], dims: tuple[int, int], threads: int) -> None:
    pool = Pool(lengths, heads[1], dims, seed=1)
    query = query_of(len(lengths), heads[0], dims[0], seed=2)
    for kind in (AttentionKind(), AttentionKind(0.5, Span(window=40)), AttentionKind(2.0, Span(chunk=48))):
        # Scores of this size are rounded by some 1e-6 each.
        torch.testing.assert_close(pool.attend(query, kind).double(), exact(pool, query, kind), rtol=0, atol=1e-5)


def test_large_and_equal_scores() -> None:
    pool = Pool([700], 1, (16, 16), seed=3)
    for factor in (0.0, 30.0, 300.0):
        query = query_of(1, 2, 16, seed=4) * factor
        torch.testing.assert_close(
            pool.attend(query, AttentionKind()).double(), exact(pool, query, AttentionKind()), rtol=0, atol=2e-5
        )


def test_bits_depend_neither_on_where_blocks_are_nor_on_the_rest_of_the_batch(threads: int) -> None:
    lengths = [900, 2000, 31]
    query = query_of(3, 4, 32, seed=5)
    found = [Pool(lengths, 2, (32, 32), seed=6, placed=placed).attend(query, AttentionKind()) for placed in range(4)]
    assert all(torch.equal(one, found[0]) for one in found)
    pool = Pool(lengths, 2, (32, 32), seed=6)
    for row, sequence in enumerate(pool.sequences):
        pool.sequences = [Sequence(0, 1, sequence.kv_length, sequence.block_table)]
        assert torch.equal(pool.attend(query[:, :, row : row + 1], AttentionKind())[0, 0], found[0][0, row])
        pool = Pool(lengths, 2, (32, 32), seed=6)
