"""References of the paged-cache operators against loops, and every documented rule broken once."""

from typing import Any

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops import kv_cache as ops
from npu_prompt_cache.sim.ops import scatter
from npu_prompt_cache.sim.ops.registry import RuleViolation

BLOCKS, BLOCK_SIZE, HEADS, K_SIZE, V_SIZE, TOKENS = 5, 16, 2, 8, 4, 11
DTYPES = [torch.float16, torch.bfloat16, torch.int8]


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randint(-100, 100, shape).to(dtype)


def writing(dtype: torch.dtype = torch.float16, slot_dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    """Arguments of a write, by the names of npu_scatter_pa_kv_cache."""
    return {
        "key": numbers(TOKENS, HEADS, K_SIZE, dtype=dtype),
        "value": numbers(TOKENS, HEADS, V_SIZE, dtype=dtype),
        "key_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS, K_SIZE, dtype=dtype),
        "value_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS, V_SIZE, dtype=dtype),
        "slot_mapping": torch.randperm(BLOCKS * BLOCK_SIZE)[:TOKENS].to(slot_dtype),
    }


def written(cache: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    expected = cache.clone()
    for token, slot in zip(tokens, slots.tolist(), strict=True):
        if slot >= 0:
            expected[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = token
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["Norm", None])
def test_scatter_pa_kv_cache(dtype: torch.dtype, slot_dtype: torch.dtype, mode: str | None) -> None:
    a = writing(dtype, slot_dtype)
    keys = written(a["key_cache"], a["key"], a["slot_mapping"])
    values = written(a["value_cache"], a["value"], a["slot_mapping"])
    copies = ops.npu_scatter_pa_kv_cache_functional(**a, cache_mode=mode)
    assert not torch.equal(a["key_cache"], keys)
    ops.npu_scatter_pa_kv_cache(**a, cache_mode=mode)
    for got, expected in zip((*copies, a["key_cache"], a["value_cache"]), (keys, values, keys, values), strict=True):
        assert torch.equal(got, expected)


def test_scatter_of_no_tokens_writes_nothing() -> None:
    a = writing()
    a |= {name: a[name][:0] for name in ("key", "value", "slot_mapping")}
    before = a["key_cache"].clone()
    ops.npu_scatter_pa_kv_cache(**a, cache_mode="Norm")
    assert torch.equal(a["key_cache"], before)


SCATTER_RULES = {
    "the default mode is NZ": ({"cache_mode": "PA_NZ"}, "cache_mode is 'Norm' for ND caches"),
    "mode unknown": ({"cache_mode": "ND"}, "found 'ND'"),
    "compressed scene": (
        {"key": numbers(2, 3, HEADS, K_SIZE), "value": numbers(2, 3, HEADS, V_SIZE)},
        "A2/A3 have no scene with 4",
    ),
    "compress_lens": ({"compress_lens": torch.zeros(TOKENS, dtype=torch.int32)}, "are None for ND ones"),
    "seq_lens": ({"seq_lens": torch.zeros(TOKENS, dtype=torch.int32)}, "are None for ND ones"),
    "compress_seq_offsets": ({"compress_seq_offsets": torch.zeros(1, dtype=torch.int32)}, "are None for ND ones"),
    "dtypes differ": ({"value": numbers(TOKENS, HEADS, V_SIZE).bfloat16()}, "have one dtype"),
    "key strided": ({"key": numbers(HEADS, TOKENS, K_SIZE).transpose(0, 1)}, "key is contiguous"),
    "cache strided": (
        {"key_cache": numbers(BLOCKS, HEADS, BLOCK_SIZE, K_SIZE).transpose(1, 2)},
        "key_cache is contiguous",
    ),
    "slots strided": ({"slot_mapping": torch.arange(2 * TOKENS)[::2]}, "slot_mapping is contiguous"),
    "slots' dtype": ({"slot_mapping": torch.arange(TOKENS).short()}, "slot_mapping is int32 or int64"),
    "heads differ": ({"value": numbers(TOKENS, HEADS + 1, V_SIZE)}, "[key's tokens, key's heads, v_head_size]"),
    "cache of other heads": (
        {"key_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS + 1, K_SIZE)},
        "key_cache has shape [num_blocks, block_size, num_heads, head_size]",
    ),
    "cache of other size": (
        {"value_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS, K_SIZE)},
        "value_cache has shape [num_blocks, block_size, num_heads, head_size]",
    ),
    "cache of 3 dimensions": ({"key_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS * K_SIZE)}, "key_cache has 4 dimensions"),
    "value cache of other blocks": (
        {"value_cache": numbers(BLOCKS + 1, BLOCK_SIZE, HEADS, V_SIZE)},
        "[key_cache's …, v_head_size]",
    ),
    "slots' shape": ({"slot_mapping": torch.arange(TOKENS + 1)}, "slot_mapping has shape [tokens]"),
    "slot past the end": (
        {"slot_mapping": torch.arange(TOKENS) + BLOCKS * BLOCK_SIZE - TOKENS + 1},
        f"slot_mapping is in [0, num_blocks * block_size = {BLOCKS * BLOCK_SIZE}); found {BLOCKS * BLOCK_SIZE}",
    ),
    "slot negative": ({"slot_mapping": torch.arange(TOKENS) - 1}, "slot_mapping is in [0"),
    "slot twice": ({"slot_mapping": torch.arange(TOKENS) // 2}, "slot_mapping holds no slot twice; found 0 twice"),
}


@pytest.mark.parametrize("rule", SCATTER_RULES)
def test_scatter_rules(rule: str) -> None:
    changes, text = SCATTER_RULES[rule]
    violates(ops.npu_scatter_pa_kv_cache, writing() | {"cache_mode": "Norm"} | changes, text)


def test_scatter_takes_no_float32_on_a2() -> None:
    arguments = writing(torch.float32) | {"cache_mode": "Norm"}
    violates(ops.npu_scatter_pa_kv_cache, arguments, "key (on A2/A3) is float16 or bfloat16 or int8; found float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_reshape_and_cache_skips_negative_slots(dtype: torch.dtype) -> None:
    a = writing(dtype)
    a["slot_indices"] = a.pop("slot_mapping")
    a["slot_indices"][[2, 5]] = -1  # twice: nothing is written, so nothing collides
    a["key"] = a["key"].transpose(0, 1).contiguous().transpose(0, 1)  # the operator makes its inputs contiguous
    keys = written(a["key_cache"], a["key"], a["slot_indices"])
    values = written(a["value_cache"], a["value"], a["slot_indices"])
    alone = a["key_cache"].clone()
    ops._npu_reshape_and_cache_siso(a["key"], alone, a["slot_indices"])
    ops._npu_reshape_and_cache(**a)
    assert torch.equal(a["key_cache"], keys)
    assert torch.equal(a["value_cache"], values)
    assert torch.equal(alone, keys)


RESHAPE_RULES = {
    "int64 slots": ({"slot_indices": torch.arange(TOKENS)}, "slot_indices is int32"),
    "slot past the end": ({"slot_indices": torch.full((TOKENS,), 80, dtype=torch.int32)}, "is in (-2^31, num_blocks"),
    "slot twice": ({"slot_indices": torch.zeros(TOKENS, dtype=torch.int32)}, "holds no slot twice"),
    "slots' shape": ({"slot_indices": torch.arange(2, dtype=torch.int32)}, "slot_indices has shape [tokens]"),
    "dtypes differ": ({"key": numbers(TOKENS, HEADS, K_SIZE).bfloat16()}, "have one dtype"),
    "heads differ": ({"key": numbers(TOKENS, HEADS + 1, K_SIZE)}, "[value's tokens, value's heads, k_head_size]"),
    "key's dimensions": ({"value": numbers(TOKENS, V_SIZE)}, "value has 3 dimensions"),
    "cache strided": (
        {"key_cache": numbers(BLOCKS, HEADS, BLOCK_SIZE, K_SIZE).transpose(1, 2)},
        "key_cache is contiguous",
    ),
    "value cache strided": (
        {"value_cache": numbers(BLOCKS, HEADS, BLOCK_SIZE, V_SIZE).transpose(1, 2)},
        "value_cache is contiguous",
    ),
    "cache of other heads": ({"key_cache": numbers(BLOCKS, BLOCK_SIZE, 1, K_SIZE)}, "key_cache has shape"),
    "value cache of other heads": ({"value_cache": numbers(BLOCKS, BLOCK_SIZE, 1, V_SIZE)}, "value_cache has shape"),
    "value cache of other blocks": (
        {"value_cache": numbers(BLOCKS + 1, BLOCK_SIZE, HEADS, V_SIZE)},
        "[key_cache's …, v_head_size]",
    ),
}


@pytest.mark.parametrize("rule", RESHAPE_RULES)
def test_reshape_and_cache_rules(rule: str) -> None:
    changes, text = RESHAPE_RULES[rule]
    arguments = writing()
    arguments["slot_indices"] = arguments.pop("slot_mapping")
    violates(ops._npu_reshape_and_cache, arguments | changes, text)


def test_reshape_and_cache_takes_no_float32() -> None:
    arguments = writing(torch.float32)
    arguments["slot_indices"] = arguments.pop("slot_mapping")
    violates(ops._npu_reshape_and_cache, arguments, "key is float16 or bfloat16 or int8")


def test_reshape_and_cache_siso_rules() -> None:
    a = writing()
    arguments = {"key": a["key"], "key_cache": a["key_cache"], "slot_indices": a["slot_mapping"]}
    function = ops._npu_reshape_and_cache_siso
    violates(function, arguments | {"key": a["key"].bfloat16()}, "key, key_cache have one dtype")
    violates(function, arguments | {"key": a["key"][0]}, "key has 3 dimensions")


LENGTHS = [7, 0, 33, 16]


def reading(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Arguments of a read of four requests, by the names of npu_gather_pa_kv_cache."""
    return {
        "key_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS, K_SIZE, dtype=dtype),
        "value_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS, V_SIZE, dtype=dtype),
        "block_tables": torch.randint(0, BLOCKS, (len(LENGTHS), 4), dtype=torch.int32),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "key": numbers(sum(LENGTHS), HEADS, K_SIZE, dtype=dtype),
        "value": numbers(sum(LENGTHS), HEADS, V_SIZE, dtype=dtype),
    }


def gathered(cache: torch.Tensor, tables: torch.Tensor, starts: list[int]) -> torch.Tensor:
    rows = []
    for table, length, start in zip(tables.tolist(), LENGTHS, starts, strict=True):
        for token in range(length):
            rows.append(cache[table[start // BLOCK_SIZE + token // BLOCK_SIZE], token % BLOCK_SIZE])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", [None, [0, 63, 16, 47]])
@pytest.mark.parametrize("cumulative", [False, True])
def test_gather_pa_kv_cache(dtype: torch.dtype, starts: list[int] | None, cumulative: bool) -> None:
    a = reading(dtype)
    keys = gathered(a["key_cache"], a["block_tables"], starts or [0] * 4)
    values = gathered(a["value_cache"], a["block_tables"], starts or [0] * 4)
    if cumulative:
        a["seq_lens"] = torch.tensor([0, 7, 7, 40, 56], dtype=torch.int32)
    offset = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    more = {"seq_offset": offset, "is_seq_lens_cumsum": cumulative}
    copies = ops.npu_gather_pa_kv_cache_functional(**a, **more)
    ops.npu_gather_pa_kv_cache(**a, **more)
    loaded = ops.npu_paged_cache_load(
        a["key_cache"], a["value_cache"], a["block_tables"], a["seq_lens"], seq_starts=offset, cumsum=cumulative
    )
    outs = {"key": torch.empty(0, dtype=dtype), "value": torch.empty_like(a["value"])}
    into = ops.npu_paged_cache_load_out(
        a["key_cache"], a["value_cache"], a["block_tables"], a["seq_lens"], seq_starts=offset, cumsum=cumulative, **outs
    )
    assert into[0] is outs["key"]
    assert into[1] is outs["value"]
    for got_keys, got_values in (copies, (a["key"], a["value"]), loaded, into):
        assert torch.equal(got_keys, keys)
        assert torch.equal(got_values, values)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


GATHER_RULES = {
    "int64 lengths": ({"seq_lens": torch.tensor(LENGTHS)}, "seq_lens is int32"),
    "lengths' dimensions": ({"seq_lens": torch.tensor([LENGTHS], dtype=torch.int32)}, "seq_lens has 1 dimensions"),
    "length negative": ({"seq_lens": int32(7, -1, 33, 17)}, "the lengths in seq_lens are not negative"),
    "sums without 0": ({"is_seq_lens_cumsum": True}, "seq_lens as running sums begins with 0; found [7]"),
    "sums that fall": (
        {"seq_lens": int32(0, 40, 7, 7, 56), "is_seq_lens_cumsum": True},
        "the lengths in seq_lens are not negative",
    ),
    "output too short": ({"seq_lens": int32(7, 1, 33, 16)}, "key has shape [tokens of all requests"),
    "value of other heads": ({"value": numbers(56, HEADS + 1, V_SIZE)}, "value has shape [tokens of all requests"),
    "caches differ in dtype": (
        {
            "value_cache": numbers(BLOCKS, BLOCK_SIZE, HEADS, V_SIZE).bfloat16(),
            "value": numbers(56, HEADS, V_SIZE).bfloat16(),
        },
        "key_cache, value_cache have one dtype",
    ),
    "output of other dtype": ({"key": numbers(56, HEADS, K_SIZE).bfloat16()}, "key_cache, key have one dtype"),
    "cache of 3 dimensions": ({"key_cache": numbers(BLOCKS, BLOCK_SIZE, K_SIZE)}, "key_cache has 4 dimensions"),
    "caches differ in blocks": (
        {"value_cache": numbers(BLOCKS + 1, BLOCK_SIZE, HEADS, V_SIZE)},
        "[key_cache's …, v_head_size]",
    ),
    "cache strided": (
        {"key_cache": numbers(BLOCKS, HEADS, BLOCK_SIZE, K_SIZE).transpose(1, 2)},
        "key_cache is contiguous",
    ),
    "output strided": ({"key": numbers(HEADS, 56, K_SIZE).transpose(0, 1)}, "key is contiguous"),
    "table strided": ({"block_tables": torch.zeros(4, 4, dtype=torch.int32).t()}, "block_tables is contiguous"),
    "table's dtype": ({"block_tables": torch.zeros(4, 4, dtype=torch.int64)}, "the block table is int32"),
    "table's dimensions": ({"block_tables": int32(0, 1, 2, 3)}, "the block table has 2 dimensions"),
    "table's rows": ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "has a row a request; found 3 rows for 4"),
    "id too high": ({"block_tables": torch.full((4, 4), 5, dtype=torch.int32)}, "in [0, num_blocks = 5); found 5"),
    "id negative": ({"block_tables": torch.full((4, 4), -1, dtype=torch.int32)}, "block ids are in [0"),
    "table too narrow": ({"block_tables": torch.zeros(4, 2, dtype=torch.int32)}, "covers its request; found blocks 0"),
    "offset past the table": ({"seq_offset": int32(0, 0, 32, 0)}, "covers its request; found blocks 2 to 5"),
    "offset negative": ({"seq_offset": int32(-1, 0, 0, 0)}, "covers its request"),
    "offset's dtype": ({"seq_offset": torch.zeros(4)}, "the offsets into the block table is int32"),
    "offset's shape": ({"seq_offset": int32(0)}, "the offsets into the block table has shape [batch]"),
}


@pytest.mark.parametrize("rule", GATHER_RULES)
def test_gather_rules(rule: str) -> None:
    changes, text = GATHER_RULES[rule]
    arguments = reading()
    if "table strided" in rule:
        arguments["seq_lens"] = int32(*LENGTHS)
        changes = {"block_tables": torch.zeros(8, 4, dtype=torch.int32)[::2]}
    violates(ops.npu_gather_pa_kv_cache, arguments | changes, text)


def test_paged_cache_load_takes_caches_of_any_strides() -> None:
    a = reading()
    strided = [a[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("key_cache", "value_cache")]
    found = ops.npu_paged_cache_load(*strided, a["block_tables"], a["seq_lens"])
    assert torch.equal(found[0], gathered(a["key_cache"], a["block_tables"], [0] * 4))
    assert torch.equal(found[1], gathered(a["value_cache"], a["block_tables"], [0] * 4))


def test_paged_cache_load_rules() -> None:
    a = reading()
    arguments = {
        "key_cache": a["key_cache"],
        "value_cache": a["value_cache"],
        "block_table": a["block_tables"],
        "context_lens": a["seq_lens"],
    }
    for name in ("key_cache", "value_cache"):
        violates(ops.npu_paged_cache_load, arguments | {name: a[name].flatten(2)}, f"{name} has 4 dimensions")
    violates(ops.npu_paged_cache_load, arguments | {"context_lens": a["seq_lens"].long()}, "context_lens is int32")


def test_gather_takes_no_float32_on_a2() -> None:
    violates(ops.npu_gather_pa_kv_cache, reading(torch.float32), "key_cache (on A2/A3) is float16 or bfloat16 or int8")


def test_gather_takes_tokens_of_148_kib() -> None:
    """148 KiB of float16 is 75,776 numbers; one head more is refused."""
    for heads, fits in ((592, True), (593, False)):
        cache = torch.zeros(1, 1, heads, 128, dtype=torch.float16)
        arguments = [cache, cache, int32(0)[None], int32(1), torch.ones_like(cache[0]), torch.ones_like(cache[0])]
        if fits:
            ops.npu_gather_pa_kv_cache(*arguments)
            assert not arguments[4].any()
        else:
            with pytest.raises(RuleViolation, match="a token of key takes at most 148 KiB"):
                ops.npu_gather_pa_kv_cache(*arguments)


def updated(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    expected = target.clone()
    depth = indices.shape[-1]
    flat = updates.reshape(-1, *target.shape[depth:])
    for index, value in zip(indices.reshape(-1, depth).tolist(), flat, strict=True):
        expected[tuple(index)] = value
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd_update(dtype: torch.dtype, index_dtype: torch.dtype, depth: int) -> None:
    target = numbers(6, 5, 4).to(dtype)
    # 2 · 9 indices into as few as 6 places: some repeat, and the last one stands.
    indices = torch.stack([torch.randint(0, n, (2, 9)) for n in (6, 5, 4)[:depth]], -1).to(index_dtype)
    updates = numbers(2, 9, *(6, 5, 4)[depth:]).to(dtype)
    expected = updated(target, indices, updates)
    before = target.clone()
    assert torch.equal(scatter.npu_scatter_nd_update(target, indices, updates), expected)
    assert torch.equal(target, before)
    assert scatter.npu_scatter_nd_update_(target, indices, updates) is target
    assert torch.equal(target, expected)


def test_scatter_nd_update_writes_through_strides() -> None:
    base = numbers(4, 6)
    expected = updated(base.t(), torch.tensor([[1], [3]]), numbers(2, 4).fill_(7))
    scatter.npu_scatter_nd_update_(base.t(), torch.tensor([[1], [3]]), numbers(2, 4).fill_(7))
    assert torch.equal(base.t(), expected)


def nd(**changes: Any) -> dict[str, Any]:
    return {
        "input": numbers(4, 5, 6),
        "indices": torch.tensor([[0, 1], [3, 4], [2, 2]]),
        "updates": numbers(3, 6),
    } | changes


ND_RULES = {
    "no dimension": (nd(input=torch.tensor(1.0)), "input has 1 to 8 dimensions"),
    "int32": (nd(input=numbers(4, 5, 6).int(), updates=numbers(3, 6).int()), "input (on A2/A3) is float32 or float16"),
    "dtypes differ": (nd(updates=numbers(3, 6).float()), "input, updates have one dtype"),
    "indices' dtype": (nd(indices=torch.zeros(3, 2)), "indices is int32 or int64"),
    "indices' dimensions": (nd(indices=torch.tensor([0, 1])), "indices has at least 2 dimensions"),
    "too deep": (nd(indices=torch.zeros(3, 4, dtype=torch.int64)), "the last dimension of indices is 1 to 3"),
    "no depth": (nd(indices=torch.zeros(3, 0, dtype=torch.int64)), "the last dimension of indices is 1 to 3"),
    "updates' shape": (nd(updates=numbers(3, 5)), "updates has shape indices.shape[:-1] + input.shape"),
    "index too high": (nd(indices=torch.tensor([[0, 1], [3, 5], [2, 2]])), "indices are in [0, (4, 5)) in each"),
    "index negative": (nd(indices=torch.tensor([[0, 1], [-1, 4], [2, 2]])), "in each dimension; found [-1, 4]"),
}


@pytest.mark.parametrize("rule", ND_RULES)
def test_scatter_nd_update_rules(rule: str) -> None:
    arguments, text = ND_RULES[rule]
    violates(scatter.npu_scatter_nd_update_, arguments, text)


def test_scatter_nd_update_indexes_at_most_7_dimensions() -> None:
    arguments = {
        "input": torch.zeros(1, 1, 1, 1, 1, 1, 1, 1),
        "indices": torch.zeros(1, 8, dtype=torch.int64),
        "updates": torch.ones(1),
    }
    violates(scatter.npu_scatter_nd_update_, arguments, "the last dimension of indices is 1 to 7")
