"""References of torch_npu's attention operators, on plain CPU tensors, against an oracle of loops in float64."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from attention_calls import COMPRESSED, SECOND_NAMES, fused

from npu_prompt_cache.sim.ops import attention_kernel
from npu_prompt_cache.sim.ops.attention_fused import (
    _first_out,
    _first_outputs,
    _second_out,
    _second_outputs,
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
)
from npu_prompt_cache.sim.ops.attention_fusion import npu_fusion_attention, npu_fusion_attention_grad
from npu_prompt_cache.sim.ops.attention_incre import npu_incre_flash_attention
from npu_prompt_cache.sim.ops.attention_prompt import npu_prompt_flash_attention
from npu_prompt_cache.sim.ops.attention_update import npu_attention_update
from npu_prompt_cache.sim.ops.registry import RuleViolation

UNBOUNDED = 2147483647
EPSILON = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}


def oracle(query, key, value, scale, sees, pse=None, sink=None):
    """Attention of one request, a head and a token at a time; all ``[N, S, D]``; ``sees(i, j)`` is the mask."""
    heads, rows, _ = query.shape
    kv_heads, columns, _ = key.shape
    query, key, value = (each.double() for each in (query, key, value))
    out = torch.zeros(heads, rows, value.shape[2], dtype=torch.float64)
    lse = torch.full((heads, rows), math.inf, dtype=torch.float64)
    for head, i in itertools.product(range(heads), range(rows)):
        seen = [j for j in range(columns) if sees(i, j)]
        shared = head // (heads // kv_heads)
        scores = scale * key[shared, seen].mv(query[head, i])
        if pse is not None:
            scores = scores + pse[head, i, seen].double()
        logits = scores if sink is None else torch.cat((scores, sink[head : head + 1].double()))
        if len(logits):
            weights = logits.softmax(0)[: len(seen)]
            out[head, i] = weights @ value[shared, seen]
            lse[head, i] = logits.logsumexp(0)
    return out, lse


def sees_of(mode, rows, columns, before=UNBOUNDED, after=UNBOUNDED, mask=None):
    """The sparse modes, as the pages define them: i and j are a query's and a key's number in their request."""
    late = columns - rows
    return {
        0: lambda i, j: mask is None or (not mask[i, j] and i - before <= j <= i + after),
        1: lambda i, j: not mask[i, j],
        2: lambda i, j: j <= i,
        3: lambda i, j: j <= i + late,
        4: lambda i, j: i + late - before <= j <= i + late + after,
    }[mode]


def assert_near(found, expected, dtype, name="output"):
    assert found.dtype == dtype
    assert not found.isnan().any()
    torch.testing.assert_close(
        found.double(), expected, rtol=EPSILON[dtype], atol=EPSILON[dtype], msg=lambda text: f"{name}: {text}"
    )


def assert_lse(found, expected):
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def rand(generator, *shape, dtype=torch.float16):
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.fixture
def generator(request):
    # Other numbers in each test and case, the same in each run.
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))


# --- Layouts -----------------------------------------------------------------------------------------------------


def laid_out(tensor, axes):
    """``[B, N, S, D]`` in the order ``axes``, contiguous."""
    moved = tensor.permute(*("BNSD".index(axis) for axis in axes.replace("H", "ND")))
    return (moved.flatten(-2) if "H" in axes else moved).contiguous()


def heads_first(tensor, axes, heads):
    """The inverse of :func:`laid_out`."""
    if "H" in axes:
        tensor = tensor.reshape(*tensor.shape[:-1], heads, -1)
        axes = axes.replace("H", "ND")
    return tensor.permute(*(axes.index(axis) for axis in "BNSD"))


class Dense(NamedTuple):
    """Requests with K/V that are not in blocks, ``[B, N, S, D]``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: list
    columns: list


def dense(generator, heads=4, kv_heads=2, head_dim=16, rows=(5, 0, 7), columns=(9, 4, 0), dtype=torch.float16):
    """Requests padded to 7 and 9 tokens; one has no query token and one no key."""
    requests = len(rows)
    return Dense(
        rand(generator, requests, heads, 7, head_dim, dtype=dtype),
        rand(generator, requests, kv_heads, 9, head_dim, dtype=dtype),
        rand(generator, requests, kv_heads, 9, head_dim, dtype=dtype),
        list(rows),
        list(columns),
    )


def expect(data, scale, mode, *, before=UNBOUNDED, after=UNBOUNDED, masks=None, pse=None):
    """Output ``[B, N, S, D]`` and LSE ``[B, N, S]`` of all requests; 0 and +inf past a request's length."""
    out = torch.zeros(*data.query.shape[:-1], data.value.shape[-1], dtype=torch.float64)
    lse = torch.full(data.query.shape[:-1], math.inf, dtype=torch.float64)
    for request, (rows, columns) in enumerate(zip(data.rows, data.columns, strict=True)):
        sees = sees_of(mode, rows, columns, before, after, None if masks is None else masks[request])
        out[request, :, :rows], lse[request, :, :rows] = oracle(
            data.query[request, :, :rows],
            data.key[request, :, :columns],
            data.value[request, :, :columns],
            scale,
            sees,
            None if pse is None else pse[request],
        )
    return out, lse


MODES = {
    "no mask": (0, {}),
    "2 left up": (2, {}),
    "3 right down": (3, {}),
    "4 band": (4, {"before": 2, "after": 1}),
    "4 band below the diagonal": (4, {"before": 4, "after": -2}),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"])
@pytest.mark.parametrize("mode", MODES)
def test_dense_layouts_and_modes(generator, version, layout, mode):
    dtype = torch.float16 if version == 1 else torch.bfloat16
    data = dense(generator, dtype=dtype)
    number, band = MODES[mode]
    axes, _, out_axes = layout.partition("_")
    out, lse = fused(
        version,
        *(laid_out(each, axes) for each in data[:3]),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout=layout,
        actual_seq_lengths=data.rows,
        actual_seq_lengths_kv=data.columns,
        sparse_mode=number,
        atten_mask=COMPRESSED if number else None,
        pre_tokens=band.get("before", UNBOUNDED),
        next_tokens=band.get("after", UNBOUNDED),
        softmax_lse_flag=True,
    )
    expected, expected_lse = expect(data, 0.3, number, **band)
    assert_near(heads_first(out, out_axes or axes, 4), expected, dtype)
    assert_lse(lse, expected_lse[..., None])
    assert out.is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", ["Q,KV", "1,Q,KV", "B,Q,KV", "B,1,Q,KV", "1,1,Q,KV"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
def test_whole_masks(generator, version, mode, shape, dtype):
    data = dense(generator, rows=(7, 6), columns=(9, 8))
    # One row and one column more than there are: a mask may be rounded up.
    mask = torch.rand(2, 8, 10, generator=generator) < 0.4
    mask[:, 2] = True  # a row with nothing to attend
    mask = mask if shape.startswith("B") else mask[:1].expand(2, -1, -1)
    given = mask if shape.startswith("B") else mask[:1]
    given = {"Q,KV": given[0], "1,Q,KV": given, "B,Q,KV": given}.get(shape, given[:, None]).contiguous()
    out, lse = fused(
        version,
        *data[:3],
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout="BNSD",
        actual_seq_lengths=data.rows,
        actual_seq_lengths_kv=data.columns,
        sparse_mode=mode,
        atten_mask=given.to(dtype),
        pre_tokens=3,
        next_tokens=2,
        softmax_lse_flag=True,
    )
    expected, expected_lse = expect(data, 0.3, mode, before=3, after=2, masks=mask)
    assert_near(out, expected, torch.float16)
    assert_lse(lse, expected_lse[..., None])
    assert (out[:, :, 2] == 0).all()
    assert lse[:, :, 2].isposinf().all()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mode", [0, 1, 3])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_single_query_token_knows_no_sparse_mode(generator, version, mode, requests):
    query = rand(generator, requests, 1, 64)
    key, value = rand(generator, requests, 9, 32), rand(generator, requests, 9, 32)
    mask = torch.rand(requests, 9, generator=generator) < 0.4
    out, _ = fused(
        version,
        query,
        key,
        value,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout="BSH",
        actual_seq_lengths_kv=[9, 3, 1][:requests],
        sparse_mode=mode,
        atten_mask=COMPRESSED if mode == 3 else mask,
        pre_tokens=0,
        next_tokens=0,
    )
    for request, columns in enumerate([9, 3, 1][:requests]):
        sees = (lambda i, j: True) if mode == 3 else (lambda i, j, row=mask[request]: not row[j])
        heads = [
            each[request, :].view(-1, count, 16).transpose(0, 1)
            for each, count in ((query, 4), (key[:, :columns], 2), (value[:, :columns], 2))
        ]
        expected, _ = oracle(*heads, 0.3, sees)
        assert_near(out[request].view(1, 4, 16).transpose(0, 1), expected, torch.float16)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_pse_shift_is_added_to_scaled_scores(generator, version, shared):
    data = dense(generator, rows=(7, 3), columns=(9, 2))
    pse = rand(generator, 1 if shared else 2, 4, 7, 12)
    out, _ = fused(
        version,
        *data[:3],
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout="BNSD",
        actual_seq_lengths=data.rows,
        actual_seq_lengths_kv=data.columns,
        pse_shift=pse,
    )
    assert_near(out, expect(data, 0.3, 0, pse=pse.expand(2, -1, -1, -1))[0], torch.float16)


def test_shared_prefix_stands_before_each_request(generator):
    data = dense(generator, rows=(7, 3), columns=(9, 5))
    prefixes = [rand(generator, 1, 2, 6, 16) for _ in range(2)]
    out, lse = npu_fused_infer_attention_score(
        *(laid_out(each, "BSND") for each in data[:3]),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout="BSND",
        actual_seq_lengths=data.rows,
        actual_seq_lengths_kv=data.columns,
        key_shared_prefix=laid_out(prefixes[0], "BSND"),
        value_shared_prefix=laid_out(prefixes[1], "BSND"),
        actual_shared_prefix_len=[4],
        sparse_mode=3,
        atten_mask=COMPRESSED,
        softmax_lse_flag=True,
    )
    key, value = (
        torch.cat((prefix[:, :, :4].expand(2, -1, -1, -1), each), 2)
        for prefix, each in zip(prefixes, (data.key, data.value), strict=True)
    )
    whole = Dense(data.query, key, value, data.rows, [13, 9])
    expected, expected_lse = expect(whole, 0.3, 3)
    assert_near(heads_first(out, "BSND", 4), expected, torch.float16)
    assert_lse(lse, expected_lse[..., None])


@pytest.mark.parametrize("version", [1, 2])
def test_nothing_to_do(version):
    arguments = {"num_heads": 2, "input_layout": "BNSD", "softmax_lse_flag": True}
    none = torch.zeros(3, 2, 0, 16, dtype=torch.float16)
    some = torch.ones(3, 2, 4, 16, dtype=torch.float16)
    out, lse = fused(version, none, some, some, **arguments)
    assert out.shape == none.shape
    assert lse.shape == (3, 2, 0, 1)
    out, lse = fused(version, some, none, none, **arguments)
    assert torch.equal(out, torch.zeros_like(some))
    assert lse.isposinf().all()
    _, lse = fused(version, some, some, some, num_heads=2, input_layout="BNSD")
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("scores", [1, 20, 100])
def test_scores_are_held_in_parts(generator, monkeypatch, scores):
    """What is computed at once has no influence on what is computed."""
    query, key, value = rand(generator, 4, 7, 16), rand(generator, 2, 9, 16), rand(generator, 2, 9, 8)
    arguments = {"hidden": torch.ones(7, 9, dtype=torch.bool).triu(2), "bias": rand(generator, 4, 7, 9)}
    grad = rand(generator, 4, 7, 8)

    def step():
        attended = attention_kernel.attend(query, key, value, 0.3, **arguments)
        return attended, attention_kernel.attend_backward(query, key, value, 0.3, attended, grad, **arguments)

    whole = step()
    monkeypatch.setattr(attention_kernel, "_SCORES", scores)
    assert len(list(attention_kernel._tiles(query, key))) > 1
    torch.testing.assert_close(step(), whole, rtol=1e-5, atol=1e-5)


# --- Packed layouts ----------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Requests with K/V that are not in blocks, heads first, one ``[N, S, D]`` each."""

    query: list
    key: list
    value: list


def packed(generator, heads, kv_heads, head_dim, value_dim, rows, columns, dtype=torch.float16):
    return Packed(
        [rand(generator, heads, each, head_dim, dtype=dtype) for each in rows],
        [rand(generator, kv_heads, each, head_dim, dtype=dtype) for each in columns],
        [rand(generator, kv_heads, each, value_dim, dtype=dtype) for each in columns],
    )


def pack(parts, axes="TND"):
    together = torch.cat(parts, dim=1)
    return (together.transpose(0, 1) if axes == "TND" else together).contiguous()


def running(lengths):
    return list(itertools.accumulate(lengths))


def each_oracle(data, scale, mode, before=UNBOUNDED, after=UNBOUNDED, sink=None):
    """Outputs ``[N, T, D]`` and LSE ``[N, T]`` of all requests, one after the other."""
    results = [
        oracle(q, k, v, scale, sees_of(mode, q.shape[1], k.shape[1], before, after), sink=sink)
        for q, k, v in zip(*data, strict=True)
    ]
    return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 1)


@pytest.mark.parametrize(
    ("version", "layout", "heads", "kv_heads", "head_dim", "value_dim"),
    [
        (1, "TND", 4, 2, 128, 128),
        (1, "TND", 2, 2, 192, 192),
        (1, "NTD_TND", 2, 1, 192, 128),
        (2, "TND", 2, 2, 64, 64),
        (2, "TND", 4, 1, 192, 128),
        (2, "NTD_TND", 2, 2, 128, 128),
        (2, "NTD", 4, 2, 128, 128),
    ],
)
@pytest.mark.parametrize("mode", [0, 3, 4])
def test_packed_layouts(generator, version, layout, heads, kv_heads, head_dim, value_dim, mode):
    rows, columns = (3, 0, 1, 6), (5, 2, 4, 6)
    data = packed(generator, heads, kv_heads, head_dim, value_dim, rows, columns, torch.bfloat16)
    axes, _, out_axes = layout.partition("_")
    out, lse = fused(
        version,
        *(pack(parts, axes) for parts in data),
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=0.1,
        input_layout=layout,
        actual_seq_lengths=running(rows),
        actual_seq_lengths_kv=running(columns),
        sparse_mode=mode,
        atten_mask=COMPRESSED if mode else None,
        pre_tokens=2,
        next_tokens=1,
        softmax_lse_flag=True,
    )
    expected, expected_lse = each_oracle(data, 0.1, mode, before=2, after=1)
    assert_near(out if (out_axes or axes) == "NTD" else out.transpose(0, 1), expected, torch.bfloat16)
    assert_lse(lse, expected_lse.T[..., None])


def test_a_packed_request_may_have_no_keys(generator):
    data = packed(generator, 2, 2, 128, 128, (2, 3), (4, 0))
    out, lse = npu_fused_infer_attention_score(
        *(pack(parts) for parts in data),
        num_heads=2,
        scale=0.1,
        input_layout="TND",
        actual_seq_lengths=[2, 5],
        actual_seq_lengths_kv=[4, 4],
        softmax_lse_flag=True,
    )
    expected, _ = each_oracle(data, 0.1, 0)
    assert_near(out.transpose(0, 1), expected, torch.float16)
    assert (out[2:] == 0).all()
    assert lse[2:].isposinf().all()


def test_learnable_sink_takes_its_share(generator):
    data = packed(generator, 4, 2, 128, 128, (3, 1), (5, 2), torch.bfloat16)
    sink = rand(generator, 4, dtype=torch.bfloat16)
    out, lse = npu_fused_infer_attention_score_v2(
        *(pack(parts) for parts in data),
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=0.1,
        input_layout="TND",
        actual_seq_qlen=[3, 4],
        actual_seq_kvlen=[5, 7],
        sparse_mode=3,
        atten_mask=COMPRESSED,
        learnable_sink=sink,
        return_softmax_lse=True,
    )
    expected, _ = each_oracle(data, 0.1, 3, sink=sink)
    assert_near(out.transpose(0, 1), expected, torch.bfloat16)
    # The LSE is of the keys alone.
    assert_lse(lse, each_oracle(data, 0.1, 3)[1].T[..., None])


# --- K/V in blocks -----------------------------------------------------------------------------------------------


class Cache:
    """K/V of requests in scattered blocks of a pool; slots that hold nothing are NaN."""

    def __init__(self, generator, parts, block_size, heads_second=False):
        lengths = [part.shape[1] for part in parts]
        counts = [-(-length // block_size) for length in lengths]
        self.blocks = sum(counts) + 3
        ids = torch.randperm(self.blocks, generator=generator)
        kv_heads, _, head_dim = parts[0].shape
        pool = torch.full((self.blocks, kv_heads, block_size, head_dim), torch.nan, dtype=parts[0].dtype)
        # More columns than any request needs, and ids out of range where none is needed.
        self.table = torch.full((len(parts), max(counts, default=0) + 1), -7, dtype=torch.int32)
        taken = 0
        for request, (part, count) in enumerate(zip(parts, counts, strict=True)):
            mine = ids[taken : taken + count]
            taken += count
            self.table[request, :count] = mine
            for block, chunk in zip(mine, part.split(block_size, dim=1), strict=False):
                pool[block, :, : chunk.shape[1]] = chunk
        self.lengths = lengths
        self._pool, self._heads_second, self._ids = pool, heads_second, (ids, counts)

    def tensor(self):
        if self._heads_second:
            return self._pool
        return self._pool.transpose(1, 2).flatten(2).contiguous()


def caches(generator, data, block_size, heads_second=False):
    """Caches of keys and values with one block table."""
    seed = int(torch.randint(1 << 30, (1,), generator=generator))
    return [
        Cache(torch.Generator().manual_seed(seed), parts, block_size, heads_second) for parts in (data.key, data.value)
    ]


BOUNDARIES = (1, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("heads_second", [False, True])
@pytest.mark.parametrize("mode", [0, 3, 4])
def test_paged_packed_at_block_boundaries(generator, version, heads_second, mode):
    rows = [1, 2, 1, 3, 1, 2, 4]
    data = packed(generator, 2, 1, 128, 128, rows, BOUNDARIES)
    keys, values = caches(generator, data, 128, heads_second)
    out, lse = fused(
        version,
        pack(data.query),
        keys.tensor(),
        values.tensor(),
        num_heads=2,
        num_key_value_heads=1,
        scale=0.1,
        input_layout="TND",
        actual_seq_lengths=running(rows),
        actual_seq_lengths_kv=list(BOUNDARIES),
        block_table=keys.table,
        block_size=128,
        sparse_mode=mode,
        atten_mask=COMPRESSED if mode else None,
        pre_tokens=130,
        next_tokens=0,
        softmax_lse_flag=True,
    )
    expected, expected_lse = each_oracle(data, 0.1, mode, before=130, after=0)
    assert_near(out.transpose(0, 1), expected, torch.float16)
    assert_lse(lse, expected_lse.T[..., None])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("layout", "heads_second"), [("BSH", False), ("BSND", False), ("BNSD", False), ("BNSD", True), ("BNSD_BSND", True)]
)
@pytest.mark.parametrize("block_size", [128, 256])
def test_paged_prefill_in_dense_layouts(generator, version, layout, heads_second, block_size):
    rows, columns = [3, 1, 4, 2], [129, 257, 128, 2]
    parts = packed(generator, 4, 2, 32, 32, [4] * 4, columns)
    keys, values = caches(generator, parts, block_size, heads_second)
    axes, _, out_axes = layout.partition("_")
    query = torch.stack(parts.query)
    out, lse = fused(
        version,
        laid_out(query, axes),
        keys.tensor(),
        values.tensor(),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.2,
        input_layout=layout,
        actual_seq_lengths=rows,
        actual_seq_lengths_kv=columns,
        block_table=keys.table,
        block_size=block_size,
        sparse_mode=3,
        atten_mask=COMPRESSED.to(torch.int8),
        softmax_lse_flag=True,
    )
    found = heads_first(out, out_axes or axes, 4)
    for request, (row, column) in enumerate(zip(rows, columns, strict=True)):
        expected, expected_lse = oracle(
            query[request, :, :row], parts.key[request], parts.value[request], 0.2, sees_of(3, row, column)
        )
        assert_near(found[request, :, :row], expected, torch.float16)
        assert_lse(lse[request, :, :row, 0], expected_lse)
        assert (found[request, :, row:] == 0).all()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("block_size", [16, 128, 512])
@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_paged_decode(generator, version, block_size, layout):
    columns = [1, 15, 16, 0, 17, 130]
    parts = packed(generator, 4, 2, 32, 32, [1] * 6, columns)
    keys, values = caches(generator, parts, block_size, layout == "BNSD")
    query = torch.stack(parts.query)
    out, _ = fused(
        version,
        laid_out(query, layout),
        keys.tensor(),
        values.tensor(),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.2,
        input_layout=layout,
        actual_seq_lengths_kv=columns,
        block_table=keys.table,
        block_size=block_size,
    )
    expected = [oracle(*each, 0.2, lambda i, j: True)[0] for each in zip(*parts, strict=True)]
    assert_near(heads_first(out, layout, 4), torch.stack(expected), torch.float16)


@pytest.mark.parametrize("layout", ["TND", "TND_NTD", "BNSD", "BNSD_NBSD", "BSH"])
@pytest.mark.parametrize("version", [1, 2])
def test_latent_attention(generator, version, layout):
    """MLA: query and key have a rope part of their own; K and V are one latent vector, in blocks."""
    rows, columns = [2, 2, 2], [130, 5, 128]
    data = packed(generator, 4, 1, 512, 512, rows, columns)
    data = data._replace(value=data.key)
    query_rope, key_rope = (
        [rand(generator, *each.shape[:2], 64) for each in parts] for parts in (data.query, data.key)
    )
    keys, ropes = caches(generator, Packed([], data.key, key_rope), 128)
    axes, _, out_axes = layout.partition("_")
    lay = pack if axes == "TND" else lambda parts: laid_out(torch.stack(parts), axes)
    out, _ = fused(
        version,
        lay(data.query),
        keys.tensor(),
        keys.tensor(),
        query_rope=lay(query_rope),
        key_rope=ropes.tensor(),
        num_heads=4,
        num_key_value_heads=1,
        scale=0.05,
        input_layout=layout,
        actual_seq_lengths=running(rows) if axes == "TND" else rows,
        actual_seq_lengths_kv=columns,
        block_table=keys.table,
        block_size=128,
        sparse_mode=3,
        atten_mask=COMPRESSED,
    )
    roped = [
        [torch.cat(pair, -1) for pair in zip(parts, ropes, strict=True)]
        for parts, ropes in ((data.query, query_rope), (data.key, key_rope))
    ]
    expected, _ = each_oracle(Packed(*roped, data.value), 0.05, 3)
    out_axes = out_axes or axes
    if "T" in out_axes:
        found = out if out_axes == "NTD" else out.transpose(0, 1)
    else:
        found = heads_first(out, out_axes, 4).transpose(0, 1).flatten(1, 2)
    assert_near(found, expected, torch.float16)


@pytest.mark.parametrize("layout", ["TND", "BSND", "BSH_BNSD"])
def test_rope_apart_with_heads_of_128(generator, layout):
    rows, columns = [3, 3], [4, 4]
    data = packed(generator, 2, 2, 128, 128, rows, columns)
    ropes = [[rand(generator, *each.shape[:2], 64) for each in parts] for parts in (data.query, data.key)]
    axes, _, out_axes = layout.partition("_")
    lay = pack if axes == "TND" else lambda parts: laid_out(torch.stack(parts), axes)
    out, _ = npu_fused_infer_attention_score(
        *(lay(parts) for parts in data),
        query_rope=lay(ropes[0]),
        key_rope=lay(ropes[1]),
        num_heads=2,
        scale=0.05,
        input_layout=layout,
        actual_seq_lengths=running(rows) if axes == "TND" else None,
        actual_seq_lengths_kv=running(columns) if axes == "TND" else None,
    )
    roped = [
        [torch.cat(pair, -1) for pair in zip(parts, rope, strict=True)]
        for parts, rope in zip((data.query, data.key), ropes, strict=True)
    ]
    expected, _ = each_oracle(Packed(*roped, data.value), 0.05, 0)
    found = (
        out.transpose(0, 1) if axes == "TND" else heads_first(out, out_axes or axes, 2).transpose(0, 1).flatten(1, 2)
    )
    assert_near(found, expected, torch.float16)


# --- Merging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_merged_by_their_lse_are_the_whole(generator, dtype):
    columns, cuts = 300, [0, 1, 128, 128, 300]
    data = packed(generator, 4, 2, 128, 128, [5], [columns], dtype)
    arguments = {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.1,
        "softmax_lse_flag": True,
        "input_layout": "TND",
    }
    parts = [
        npu_fused_infer_attention_score(
            pack(data.query),
            *(pack([parts[0][:, start:stop]]) for parts in (data.key, data.value)),
            actual_seq_lengths=[5],
            actual_seq_lengths_kv=[stop - start],
            **arguments,
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    assert parts[2][1].isposinf().all()  # the part without keys
    out, lse = npu_attention_update([lse.flatten() for _, lse in parts], [out.flatten(0, 1) for out, _ in parts], 1)
    expected, expected_lse = each_oracle(data, 0.1, 0)
    assert_near(out.view(5, 4, 128).transpose(0, 1), expected, dtype)
    assert_lse(lse.view(5, 4).T, expected_lse)


def test_update_without_any_result_is_zero(generator):
    lse = [torch.full((3,), math.inf), torch.full((3,), math.inf)]
    out, merged = npu_attention_update(lse, [torch.randn(3, 8, generator=generator) for _ in range(2)], 1)
    assert torch.equal(out, torch.zeros(3, 8))
    assert merged.isposinf().all()
    assert npu_attention_update(lse, [torch.zeros(3, 8)] * 2, 0)[1] is None


def test_update_does_not_read_a_row_without_a_result(generator):
    found, lse = torch.randn(3, 8, generator=generator), torch.randn(3, generator=generator)
    unset = torch.full((3, 8), math.nan)
    out, merged = npu_attention_update([lse, torch.full((3,), math.inf)], [found, unset], 1)
    assert torch.equal(out, found)
    assert torch.equal(merged, lse)
    assert npu_attention_update([lse, lse], [found, unset], 0)[0].isnan().all()  # a result that is wrong is seen


# --- Prompt and incremental attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("mode", [*MODES, "0 with a mask"])
def test_prompt(generator, layout, mode):
    data = dense(generator)
    number, band = MODES.get(mode, (0, {"before": 3, "after": 0}))
    masks = None
    if mode == "0 with a mask":
        masks = torch.rand(3, 7, 9, generator=generator) < 0.4
        masks[:, range(7), range(7)] = False  # no row may be hidden altogether
        data = data._replace(columns=[9, 9, 9])
    axes, _, out_axes = layout.partition("_")
    out = npu_prompt_flash_attention(
        *(laid_out(each, axes) for each in data[:3]),
        num_heads=4,
        num_key_value_heads=2,
        scale_value=0.3,
        input_layout=layout,
        actual_seq_lengths=data.rows,
        actual_seq_lengths_kv=data.columns,
        sparse_mode=number,
        atten_mask=COMPRESSED if number else masks,
        pre_tokens=band.get("before", UNBOUNDED),
        next_tokens=band.get("after", 0),
    )
    expected, _ = expect(data, 0.3, number, **band, masks=masks)
    assert_near(heads_first(out, out_axes or axes, 4), expected, torch.float16)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("paged", [False, True])
def test_incremental(generator, layout, paged):
    columns = [9, 1, 17]
    parts = packed(generator, 4, 2, 16, 16, [1] * 3, columns)
    query = torch.stack(parts.query)
    if paged:
        keys, values = caches(generator, parts, 16, layout == "BNSD")
        arguments = {"block_table": keys.table, "block_size": 16}
        key, value = keys.tensor(), values.tensor()
    else:
        arguments = {}
        key, value = (
            laid_out(
                torch.stack([torch.nn.functional.pad(each, (0, 0, 0, 17 - each.shape[1])) for each in side]), layout
            )
            for side in (parts.key, parts.value)
        )
    out = npu_incre_flash_attention(
        laid_out(query, layout),
        key,
        value,
        num_heads=4,
        num_key_value_heads=2,
        scale_value=0.3,
        input_layout=layout,
        actual_seq_lengths=columns,
        **arguments,
    )
    expected = [oracle(*each, 0.3, lambda i, j: True)[0] for each in zip(*parts, strict=True)]
    assert_near(heads_first(out, layout, 4), torch.stack(expected), torch.float16)


def test_incremental_mask(generator):
    query, key, value = (rand(generator, 2, 1 if i == 0 else 8, 32) for i in range(3))
    mask = torch.rand(2, 1, 1, 8, generator=generator) < 0.5
    out = npu_incre_flash_attention(query, key, value, num_heads=2, scale_value=0.3, atten_mask=mask)
    for request in range(2):
        heads = [each[request].view(-1, 2, 16).transpose(0, 1) for each in (query, key, value)]
        expected, _ = oracle(*heads, 0.3, lambda i, j, row=mask[request, 0, 0]: not row[j])
        assert_near(out[request].view(1, 2, 16).transpose(0, 1), expected, torch.float16)


# --- Writing into tensors given ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "write", "outputs"), [(1, _first_out, _first_outputs), (2, _second_out, _second_outputs)]
)
@pytest.mark.parametrize("layout", ["BSH", "BNSD_BSND", "TND"])
def test_out(generator, version, write, outputs, layout):
    names = {"num_heads": 2, "softmax_lse_flag": True}
    names = names if version == 1 else {SECOND_NAMES[name]: given for name, given in names.items()}
    shape = {"BSH": (2, 3, 256), "BNSD_BSND": (2, 2, 3, 128), "TND": (6, 2, 128)}[layout]
    lengths = (
        ("actual_seq_lengths", "actual_seq_lengths_kv") if version == 1 else ("actual_seq_qlen", "actual_seq_kvlen")
    )
    arguments = {
        **dict.fromkeys(lengths, [3, 6] if layout == "TND" else None),
        **{name: rand(generator, *shape) for name in ("query", "key", "value")},
        **names,
        "input_layout": layout,
    }
    operator = npu_fused_infer_attention_score if version == 1 else npu_fused_infer_attention_score_v2
    expected = operator(**arguments)
    out = outputs(arguments["query"], arguments["value"], input_layout=layout, **names)
    assert [(each.shape, each.dtype) for each in out] == [(each.shape, each.dtype) for each in expected]
    results = write(workspace=torch.zeros(1), out=out, **arguments)
    assert all(result is into for result, into in zip(results, out, strict=True))
    assert all(torch.equal(into, each) for into, each in zip(out, expected, strict=True))
    # An LSE not asked for leaves what is there.
    arguments["softmax_lse_flag" if version == 1 else "return_softmax_lse"] = False
    before = out[1].clone()
    write(out=(torch.zeros_like(out[0]), out[1]), **arguments)
    assert torch.equal(out[1], before)
    with pytest.raises(RuleViolation, match="attention_out has the dtype and shape of the result"):
        write(out=(torch.zeros(1).half(), out[1]), **arguments)


# --- Training ----------------------------------------------------------------------------------------------------


def attention_float64(query, key, value, scale, hidden, pse=None, sink=None):
    """``[N, S, D]`` in float64 by plain operators, for autograd."""
    group = query.shape[0] // key.shape[0]
    key, value = (each.repeat_interleave(group, 0) for each in (key, value))
    scores = scale * (query @ key.transpose(1, 2) + (0 if pse is None else pse))
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0, scores).softmax(-1)
    weights = torch.where(scores.isneginf(), 0, weights)
    return weights[..., : key.shape[1]] @ value


class Step(NamedTuple):
    """A forward and backward step, for the operators and for autograd."""

    arguments: dict
    hidden: list
    """``[N, S1, S2]`` of each request."""


def training_mask(generator, mode, requests, heads, rows, columns):
    """The argument ``atten_mask``, the others a mode takes, and what is hidden, ``[B, N, S1, S2]``."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    late = columns - rows
    prefix = torch.tensor([late + 1, late + 3])[:requests, None, None, None]
    hidden = {
        "none": torch.zeros(rows, columns, dtype=torch.bool),
        "0": (j > i + 1) | (torch.rand(requests, heads, rows, columns, generator=generator) < 0.3),
        "1": torch.rand(rows, columns, generator=generator) < 0.3,
        "2": j > i,
        "3": j > i + late,
        "4": (j > i + late + 1) | (j < i + late - 2),
        "5": (j > i + late) & (j >= prefix),
        "6": (j > i + late) & (j >= prefix),
    }[mode]
    halves = torch.cat((COMPRESSED, (torch.arange(2048) >= 1024).expand(1024, -1)))
    given = {"none": None, "0": hidden, "1": hidden, "5": hidden, "6": halves}.get(mode, COMPRESSED)
    arguments = {"sparse_mode": 2 if mode == "none" else int(mode), "atten_mask": given}
    if arguments["atten_mask"] is not None:
        arguments["atten_mask"] = arguments["atten_mask"].contiguous()
    if mode in "04":
        arguments |= {"pre_tockens": 2 if mode == "4" else UNBOUNDED, "next_tockens": 1}
    if mode in "56":
        arguments["prefix"] = prefix.flatten().tolist()
    return arguments, hidden.expand(requests, heads, rows, columns)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("mode", ["none", "0", "1", "2", "3", "4", "5", "6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_dense(generator, layout, mode, dtype):
    requests, heads, kv_heads, rows, columns = 2, 4, 2, 6, 9
    query = rand(generator, requests, heads, rows, 16, dtype=dtype)
    key = rand(generator, requests, kv_heads, columns, 16, dtype=dtype)
    value = rand(generator, requests, kv_heads, columns, 8, dtype=dtype)
    arguments, hidden = training_mask(generator, mode, requests, heads, rows, columns)
    arguments |= {"head_num": heads, "input_layout": layout}
    tensors = [laid_out(each, layout) for each in (query, key, value)]
    out, maximum, total, empty, seed, offset, scores = npu_fusion_attention(*tensors, scale=0.3, seed=5, **arguments)
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    expected = torch.stack([attention_float64(*each, 0.3, mask) for *each, mask in zip(*leaves, hidden, strict=True)])
    assert_near(heads_first(out, layout, heads), expected.detach(), dtype)
    assert maximum.shape == total.shape == (requests, heads, rows, 8)
    assert maximum.dtype == total.dtype == torch.float32
    all_scores = torch.where(hidden, -math.inf, 0.3 * query.double() @ key.double().repeat_interleave(2, 1).mT)
    seen = ~hidden.all(-1)
    torch.testing.assert_close(
        (maximum.double() + total.double().log())[seen],
        all_scores.logsumexp(-1)[seen][:, None].expand(-1, 8),
        rtol=1e-5,
        atol=1e-5,
    )
    assert (empty.numel(), seed, offset, scores) == (0, 5, 0, requests * heads * rows * columns)
    grad = rand(generator, *expected.shape, dtype=dtype)
    expected.backward(grad.double())
    found = npu_fusion_attention_grad(
        *tensors,
        laid_out(grad, layout),
        scale_value=0.3,
        softmax_max=maximum,
        softmax_sum=total,
        attention_in=out,
        **arguments,
    )
    assert found[3] is None
    assert found[4].shape == (0,)
    for part, leaf, name in zip(found, leaves, ("query", "key", "value"), strict=False):
        count = heads if name == "query" else kv_heads
        # The output that the backward starts from is rounded to dtype, so errors are those of dtype, of the sum's size.
        torch.testing.assert_close(
            heads_first(part, layout, count).double(), leaf.grad, rtol=4 * EPSILON[dtype], atol=8 * EPSILON[dtype]
        )


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_training_packed(generator, softmax_layout, mode):
    rows, columns = (3, 0, 1, 4), (5, 2, 1, 4)
    data = packed(generator, 4, 2, 16, 16, rows, columns, torch.float32)
    mask = torch.rand(4, 5, generator=generator) < 0.4
    mask[:, 0] = False
    arguments = {
        "head_num": 4,
        "input_layout": "TND",
        # Two requests at the end take no part, and neither do the tokens after.
        "actual_seq_qlen": [*running(rows), 0, 0],
        "actual_seq_kvlen": [*running(columns), 0, 0],
        "sparse_mode": mode,
        "softmax_layout": softmax_layout,
        "atten_mask": mask if mode == 1 else COMPRESSED if mode else None,
        "pre_tockens": 1,
        "next_tockens": 0,
    }
    tensors = [torch.nn.functional.pad(pack(parts), (0, 0, 0, 0, 0, 2), value=math.nan) for parts in data]
    out, maximum, total, *_ = npu_fusion_attention(*tensors, scale=0.3, **arguments)
    expected, expected_lse = [], []
    for query, key, value in zip(*data, strict=True):
        sees = sees_of(mode, query.shape[1], key.shape[1], 1, 0, mask if mode == 1 else None)
        part, lse = oracle(query, key, value, 0.3, sees)
        expected.append(part)
        expected_lse.append(lse)
    assert_near(out[:8].transpose(0, 1), torch.cat(expected, 1), torch.float32)
    assert (out[8:] == 0).all()
    stats = maximum.double() + total.double().log()
    if softmax_layout == "TND":
        found = stats[:8, :, 0].T
    else:
        flat, found, taken = stats[..., 0].flatten(), [], 0
        for count in rows:
            found.append(flat[taken : taken + 4 * count].view(4, count))
            taken += 4 * count
        found = torch.cat(found, 1)
    shown = ~torch.cat(expected_lse, 1).isinf()
    torch.testing.assert_close(found[shown], torch.cat(expected_lse, 1)[shown], rtol=1e-5, atol=1e-5)
    grad = torch.randn(10, 4, 16, generator=generator)
    gradients = npu_fusion_attention_grad(
        *tensors, grad, scale_value=0.3, softmax_max=maximum, softmax_sum=total, attention_in=out, **arguments
    )
    for request, parts in enumerate(zip(*data, strict=True)):
        leaves = [part.double().requires_grad_() for part in parts]
        sees = sees_of(mode, rows[request], columns[request], 1, 0, mask if mode == 1 else None)
        hidden = torch.tensor([[not sees(i, j) for j in range(columns[request])] for i in range(rows[request])])
        if not rows[request]:
            continue
        spans = [slice(sum(lengths[:request]), sum(lengths[: request + 1])) for lengths in (rows, columns, columns)]
        attention_float64(*leaves, 0.3, hidden).backward(grad[spans[0]].transpose(0, 1).double())
        for part, leaf, span in zip(gradients, leaves, spans, strict=False):
            torch.testing.assert_close(part[span].transpose(0, 1).double(), leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["BNSS", "1NSS", "BN1S"])
def test_training_with_pse_and_sink(generator, shape):
    requests, heads, rows, columns = 2, 4, 5, 7
    query = rand(generator, requests, heads, rows, 16, dtype=torch.float32)
    key, value = (rand(generator, requests, 2, columns, 16, dtype=torch.float32) for _ in range(2))
    pse = rand(generator, {"1": 1}.get(shape[0], requests), heads, {"1": 1}.get(shape[2], rows), columns).float()
    sink = rand(generator, heads).float()
    arguments = {"head_num": heads, "input_layout": "BNSD", "pse": pse, "sink": sink}
    out, maximum, total, *_ = npu_fusion_attention(query, key, value, scale=0.3, **arguments)
    leaves = [each.double().requires_grad_() for each in (query, key, value, pse, sink)]
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    expected = torch.stack(
        [
            attention_float64(
                *(leaf[b] for leaf in leaves[:3]), 0.3, hidden, leaves[3].expand(2, -1, -1, -1)[b], leaves[4]
            )
            for b in range(requests)
        ]
    )
    assert_near(out, expected.detach(), torch.float32)
    grad = torch.randn(out.shape, generator=generator)
    expected.backward(grad.double())
    found = npu_fusion_attention_grad(
        query,
        key,
        value,
        grad,
        scale_value=0.3,
        softmax_max=maximum,
        softmax_sum=total,
        attention_in=out,
        **arguments,
    )
    for part, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(part.double(), leaf.grad, rtol=1e-4, atol=1e-4)


def test_training_over_a_part_of_the_keys(generator):
    """With the statistics and the output of the whole, gradients of parts add up: ring attention."""
    query, grad = (rand(generator, 1, 2, 4, 16, dtype=torch.float32) for _ in range(2))
    key, value = (rand(generator, 1, 2, 9, 16, dtype=torch.float32) for _ in range(2))
    arguments = {"head_num": 2, "input_layout": "BNSD"}
    out, maximum, total, *_ = npu_fusion_attention(query, key, value, scale=0.3, **arguments)

    def gradients(part):
        return npu_fusion_attention_grad(
            query,
            key[:, :, part],
            value[:, :, part],
            grad,
            scale_value=0.3,
            softmax_max=maximum,
            softmax_sum=total,
            attention_in=out,
            **arguments,
        )

    whole, first, second = gradients(slice(0, 9)), gradients(slice(0, 4)), gradients(slice(4, 9))
    torch.testing.assert_close(first[0] + second[0], whole[0])
    for side in (1, 2):
        torch.testing.assert_close(torch.cat((first[side], second[side]), 2), whole[side])
