"""Rules of torch_npu's attention operators: each is broken once and quoted; what is not served is refused by name."""

import ast
import inspect
import traceback

import pytest
import torch
from attention_calls import COMPRESSED, fused

from npu_prompt_cache.sim.ops import (
    attention_call,
    attention_infer,
    attention_lengths,
    attention_mask,
    attention_pages,
)
from npu_prompt_cache.sim.ops.attention_fusion import npu_fusion_attention, npu_fusion_attention_grad
from npu_prompt_cache.sim.ops.attention_incre import npu_incre_flash_attention
from npu_prompt_cache.sim.ops.attention_prompt import npu_prompt_flash_attention
from npu_prompt_cache.sim.ops.attention_update import npu_attention_update
from npu_prompt_cache.sim.ops.registry import RuleViolation


def half(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


# --- Every rule of the fused operators, violated once ------------------------------------------------------------


def table(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def bools(*shape):
    return torch.zeros(*shape, dtype=torch.bool)


def meta(*shape):
    """A tensor of any size that takes no memory: what is wrong with it has to show before anything reads it."""
    return torch.empty(*shape, dtype=torch.float16, device="meta")


# Calls that keep every rule, one of each kind; names as of v1.
CALLS = {
    "TND": {
        "query": half(4, 4, 128),
        "key": half(6, 128, 256),
        "value": half(6, 128, 256),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [3, 4],
        "actual_seq_lengths_kv": [200, 128],
        "block_table": table([4, 1], [2, 0]),
        "block_size": 128,
        "sparse_mode": 3,
        "atten_mask": COMPRESSED,
    },
    "TND, not paged": {
        "query": half(4, 4, 128),
        "key": half(9, 2, 128),
        "value": half(9, 2, 128),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [3, 4],
        "actual_seq_lengths_kv": [6, 9],
    },
    "MHA TND": {
        "query": half(4, 2, 128),
        "key": half(6, 128, 256),
        "value": half(6, 128, 256),
        "num_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [4],
        "actual_seq_lengths_kv": [200],
        "block_table": table([4, 1]),
        "block_size": 128,
    },
    "BNSD": {
        "query": half(2, 4, 3, 32),
        "key": half(6, 128, 64),
        "value": half(6, 128, 64),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
        "actual_seq_lengths_kv": [200, 128],
        "block_table": table([4, 1], [2, 0]),
        "block_size": 128,
    },
    "BNSD, not paged": {
        "query": half(2, 4, 3, 32),
        "key": half(2, 2, 9, 32),
        "value": half(2, 2, 9, 32),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
    },
    "BSH": {
        "query": half(2, 3, 128),
        "key": half(6, 128, 64),
        "value": half(6, 128, 64),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BSH",
        "actual_seq_lengths_kv": [200, 128],
        "block_table": table([4, 1], [2, 0]),
        "block_size": 128,
    },
    "decode": {
        "query": half(2, 1, 128),
        "key": half(6, 16, 64),
        "value": half(6, 16, 64),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BSH",
        "actual_seq_lengths_kv": [20, 16],
        "block_table": table([4, 1], [2, 0]),
        "block_size": 16,
    },
    "MLA": {
        "query": half(3, 4, 512),
        "key": half(6, 16, 512),
        "value": half(6, 16, 512),
        "query_rope": half(3, 4, 64),
        "key_rope": half(6, 16, 64),
        "num_heads": 4,
        "num_key_value_heads": 1,
        "input_layout": "TND",
        "actual_seq_lengths": [3],
        "actual_seq_lengths_kv": [20],
        "block_table": table([4, 1]),
        "block_size": 16,
    },
    "prefix": {
        "query": half(2, 3, 4, 32),
        "key": half(2, 9, 2, 32),
        "value": half(2, 9, 2, 32),
        "key_shared_prefix": half(1, 5, 2, 32),
        "value_shared_prefix": half(1, 5, 2, 32),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BSND",
    },
    "sink": {
        "query": half(4, 4, 128).bfloat16(),
        "key": half(9, 2, 128).bfloat16(),
        "value": half(9, 2, 128).bfloat16(),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [3, 4],
        "actual_seq_lengths_kv": [6, 9],
        "learnable_sink": half(4).bfloat16(),
    },
}
ONLY = {"prefix": 1, "sink": 2}

# Of each rule: the call that keeps it, what breaks it, words of the rule. Both versions, unless a version comes last.
RULES = [
    # Layout, dtypes, sizes.
    ("TND", {"input_layout": "NSD"}, "input_layout is one of BSH, BSND, BNSD, TND"),
    ("TND", {"input_layout": "BNSD"}, "query has the axes of input_layout, which are BNSD"),
    ("TND", {"num_heads": 0}, "is at least 1"),
    ("TND", {"num_key_value_heads": -1}, "num_key_value_heads is at least 0"),
    ("TND", {"query": half(4, 4, 128).float()}, "query is float16 or bfloat16"),
    ("TND", {"key": half(6, 128, 256).bfloat16()}, "key and value have query's dtype"),
    ("TND", {"query": half(4, 128, 4).mT}, "query, key and value are contiguous"),
    ("TND", {"key": half(6, 256, 128).mT}, "query, key and value are contiguous"),
    ("TND", {"num_heads": 2}, "are the N of query and of key and value"),
    ("BSH", {"num_heads": 3}, "H is the number of heads times D"),
    ("TND, not paged", {"key": half(2, 9, 2, 128)}, "key and value that are not in blocks have query's axes"),
    ("TND, not paged", {"value": half(8, 2, 128)}, "key and value have the same shape"),
    ("BNSD, not paged", {"value": half(2, 2, 9, 16)}, "key and value have the same shape"),
    ("BNSD, not paged", {"key": half(3, 2, 9, 32), "value": half(3, 2, 9, 32)}, "as many requests B as query"),
    ("BNSD", {"query": half(2, 4, 3, 48)}, "query and key have heads of one size D"),
    ("BNSD, not paged", {"query": meta(2, 257, 3, 32), "num_heads": 257}, "N is at most 256"),
    ("BNSD, not paged", {"query": half(2, 3, 3, 32), "num_heads": 3}, "is a multiple of num_key_value_heads"),
    (
        "BNSD, not paged",
        {
            "query": half(1, 65, 3, 32),
            "key": half(1, 1, 9, 32),
            "value": half(1, 1, 9, 32),
            "num_heads": 65,
            "num_key_value_heads": 1,
        },
        "is at most 64 times num_key_value_heads",
    ),
    ("BNSD", {"query": half(2, 4, 3, 528), "key": half(6, 128, 1056), "value": half(6, 128, 1056)}, "D is at most 512"),
    ("BNSD", {"query": half(2, 4, 3, 40), "key": half(6, 128, 80), "value": half(6, 128, 80)}, "a multiple of 16"),
    (
        "BNSD, not paged",
        {"query": meta(65537, 4, 1, 32), "key": meta(65537, 2, 9, 32), "value": meta(65537, 2, 9, 32)},
        "B is at most 65536",
    ),
    (
        "BNSD, not paged",
        {"query": half(2, 4, 1, 32), "key": meta(2, 2, 262145, 32), "value": meta(2, 2, 262145, 32)},
        "of key and value at most 262144 where query's is 1",
    ),
    ("BNSD", {"query": half(2, 4, 1, 32), "input_layout": "BNSD_BSND"}, "BNSD_BSND is for a query with S > 1"),
    ("BNSD", {"query": half(2, 4, 17, 32), "input_layout": "BNSD_NBSD"}, "NBSD is for a query with 1 < S <= 16"),
    # Sizes of heads in packed layouts.
    (
        "TND",
        {"query": half(4, 4, 96), "key": half(6, 128, 192), "value": half(6, 128, 192)},
        "packed layouts need D = 128",
    ),
    ("MHA TND", {"query": half(4, 2, 64), "key": half(6, 128, 128), "value": half(6, 128, 128)}, "need D = 128", 1),
    (
        "TND",
        {"query": half(4, 4, 64), "key": half(6, 128, 128), "value": half(6, 128, 128)},
        "K/V heads as query heads",
        2,
    ),
    (
        "TND, not paged",
        {
            "query": half(4, 4, 192),
            "key": half(4, 9, 192),
            "value": half(4, 9, 192),
            "input_layout": "NTD",
            "num_heads": 4,
        },
        "NTD and NTD_TND need a value D of 128",
        "NTD",
    ),
    (
        "TND, not paged",
        {"query": half(4, 4, 192), "key": half(9, 2, 192), "value": half(9, 2, 192)},
        "a packed value D of 192 goes neither with fewer K/V heads",
        2,
    ),
    ("TND", {"input_layout": "TND_NTD"}, "TND_NTD is for D = 512"),
    ("MHA TND", {"inner_precise": 2}, "inner_precise is 0 or 1 for float16, 0 for bfloat16", 2),
    ("MHA TND", {"key": half(6, 2, 128, 128), "value": half(6, 2, 128, 128)}, "a paged key or value is \\[blocks", 2),
    # The cache.
    ("TND", {"key": meta(1 << 16, 128, 256), "value": meta(1 << 16, 128, 256)}, r"at most 2\*\*31 - 1 elements"),
    ("BSH", {"key": half(6, 2, 128, 32), "value": half(6, 2, 128, 32)}, "or, with a BNSD or TND query"),
    ("TND", {"block_size": 256}, "the block axis of a paged key or value has block_size slots"),
    (
        "TND",
        {"key": half(6, 128, 257), "value": half(6, 128, 257)},
        r"the last axis of a paged key or value is KV_N \* D",
    ),
    (
        "BSH",
        {
            "query": half(2, 3, 65536),
            "key": half(6, 128, 65536),
            "value": half(6, 128, 65536),
            "num_heads": 128,
            "num_key_value_heads": 128,
        },
        r"KV_N \* D is at most 65535",
    ),
    ("BNSD", {"key": half(6, 4, 128, 32), "value": half(6, 4, 128, 32)}, "the number of K/V heads as its second axis"),
    ("TND", {"value": half(5, 128, 256)}, "a paged key and value have the same shape"),
    # block_size.
    ("TND", {"key": half(6, 64, 256), "value": half(6, 64, 256), "block_size": 64}, "a multiple of 128, 128 to 512"),
    ("BNSD", {"key": half(6, 640, 64), "value": half(6, 640, 64), "block_size": 640}, "a multiple of 128, 128 to 512"),
    ("BSH", {"key": half(6, 192, 64), "value": half(6, 192, 64), "block_size": 192}, "a multiple of 128, 128 to 512"),
    ("decode", {"key": half(6, 24, 64), "value": half(6, 24, 64), "block_size": 24}, r"multiple of 16 \(float16"),
    ("decode", {"key": half(6, 528, 64), "value": half(6, 528, 64), "block_size": 528}, "16 to 512"),
    (
        "MLA",
        {"key": half(6, 1040, 512), "value": half(6, 1040, 512), "key_rope": half(6, 1040, 64), "block_size": 1040},
        "a multiple of 16 and at most 1024",
    ),
    # The block table.
    ("TND", {"block_table": table([4, 1], [2, 0]).long()}, "block_table is int32"),
    ("TND", {"block_table": table([4, 1], [2, 0]).flatten()}, r"block_table is \[B, blocks of the longest request\]"),
    ("TND", {"block_table": table([4, 1])}, "a row for each request"),
    ("TND", {"block_table": table([4], [2])}, "a column for each block that the longest of"),
    ("TND", {"actual_seq_lengths_kv": [200, 328]}, "a column for each block"),  # a running sum is the usual mistake
    ("TND", {"block_table": table([4, -1], [2, 0])}, r"is in \[0, number of blocks\)"),
    ("decode", {"block_table": table([4, 6], [2, 0])}, r"is in \[0, number of blocks\)"),
    (
        "TND",
        {"key": half(2, 128, 256), "value": half(2, 128, 256), "block_table": table([1, 0], [1, 0])},
        "not less than the sum of the blocks of all requests",
    ),
    # Lengths.
    ("TND", {"actual_seq_lengths": None}, "packed layouts \\(T\\) need"),
    ("TND, not paged", {"actual_seq_lengths_kv": None}, "packed layouts \\(T\\) need"),
    ("TND", {"actual_seq_lengths": []}, "has 1 to 4096 elements"),
    ("TND", {"actual_seq_lengths": [3, 1]}, "is a running sum"),  # lengths of requests are the usual mistake
    ("TND", {"actual_seq_lengths": [-1, 4]}, "no element is negative"),
    ("TND", {"actual_seq_lengths": [2, 3]}, "is the number of tokens T of query, which is 4"),
    ("TND, not paged", {"actual_seq_lengths_kv": [6, 8]}, "is the number of tokens T of key, which is 9"),
    ("TND, not paged", {"actual_seq_lengths_kv": [3, 6, 9]}, "have one element a request"),
    ("TND", {"actual_seq_lengths_kv": None}, "a block_table needs"),
    ("TND", {"actual_seq_lengths_kv": [200]}, "has one length per request, not a running sum"),
    ("BSH", {"actual_seq_lengths_kv": None}, "a block_table needs"),
    ("BSH", {"actual_seq_lengths_kv": [200, -1]}, "no length is negative"),
    ("BSH", {"actual_seq_lengths": [4, 1]}, "no length is more than the S of query, which is 3"),
    ("BNSD, not paged", {"actual_seq_lengths_kv": [9, 10]}, "no length is more than the S of key, which is 9"),
    (
        "BNSD, not paged",
        {
            "query": half(3, 4, 3, 32),
            "key": half(3, 2, 9, 32),
            "value": half(3, 2, 9, 32),
            "actual_seq_lengths": [3, 3],
        },
        "one length for all requests, or at least one for each",
    ),
    ("TND", {"actual_seq_lengths": [3, 4], "actual_seq_lengths_kv": [2, 128]}, "at least as many K/V tokens as query"),
    # Masks.
    ("TND", {"sparse_mode": 2}, "need sparse_mode 0, 3 or 4"),
    ("TND", {"sparse_mode": 0}, "sparse_mode 0 of a packed layout goes without atten_mask"),
    ("MLA", {"sparse_mode": 1}, "query_rope with D = 512, need sparse_mode 0, 3 or 4"),
    ("BSH", {"sparse_mode": 5}, "sparse_mode is 0, 1, 2, 3 or 4"),
    ("TND", {"atten_mask": None}, "sparse_mode 2, 3 and 4 need atten_mask in the compressed form"),
    ("BSH", {"sparse_mode": 2, "atten_mask": bools(3, 256)}, r"\(2048, 2048\), \(1, 2048, 2048\)"),
    ("BSH", {"sparse_mode": 1}, "sparse_mode 1 needs atten_mask"),
    ("TND", {"atten_mask": COMPRESSED.half()}, "atten_mask is bool, int8 or uint8"),
    ("TND", {"atten_mask": COMPRESSED.T}, "atten_mask is contiguous"),
    ("TND", {"atten_mask": COMPRESSED.T.contiguous()}, "ones above the diagonal and zeros on and below it"),
    ("TND", {"atten_mask": COMPRESSED.byte() * 255}, "ones above the diagonal"),
    ("BSH", {"atten_mask": bools(3, 256).byte() + 2}, "holds only 0 and 1"),
    ("TND", {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": -3}, "pre_tokens \\+ next_tokens is at least 0"),
    ("BSH", {"atten_mask": bools(3, 2, 3, 256)}, r"atten_mask of sparse_mode 0 and 1 is \(1, Q_S, KV_S\)"),
    ("BSH", {"atten_mask": bools(256)}, r"atten_mask of sparse_mode 0 and 1 is \(1, Q_S, KV_S\)"),
    ("BSH", {"atten_mask": bools(1, 3, 200)}, "with a block_table all slots of its blocks"),
    ("decode", {"atten_mask": bools(2, 31)}, "with a block_table all slots of its blocks"),
    # Precision and bias.
    ("BSH", {"inner_precise": 4}, "inner_precise is 0, 1, 2 or 3"),
    ("decode", {"inner_precise": 2}, "0 or 1 where query's S is 1"),
    ("TND", {"pse_shift": half(1, 4, 4, 256)}, "packed layouts go without pse_shift"),
    ("BSH", {"pse_shift": half(1, 4, 3, 256).bfloat16()}, "pse_shift has query's dtype"),
    ("BSH", {"pse_shift": half(1, 4, 3, 200)}, r"pse_shift is \(B, Q_N, Q_S, KV_S\)"),
    ("BSH", {"pse_shift": half(1, 1, 3, 256)}, r"pse_shift is \(B, Q_N, Q_S, KV_S\)"),
    # Rope.
    ("MLA", {"key_rope": None}, "query_rope and key_rope are given both or neither"),
    ("BSH", {"input_layout": "BSH_BNSD"}, "are for query_rope and key_rope"),
    ("BNSD", {"query_rope": half(2, 4, 3, 64), "key_rope": half(6, 128, 128)}, "with query_rope D is 512 or 128"),
    ("MLA", {"value": half(6, 16, 128)}, "with query_rope value has key's D"),
    ("MLA", {"query_rope": half(3, 4, 32)}, "with a D of 64"),
    ("MLA", {"query_rope": half(3, 4, 64).bfloat16()}, "query_rope and key_rope have the dtype of query and key"),
    ("MLA", {"input_layout": "NTD_TND", "query": half(4, 3, 512), "query_rope": half(4, 3, 64)}, "BNSD_NBSD"),
    (
        "BNSD",
        {
            "query": half(2, 4, 3, 128),
            "key": half(6, 128, 256),
            "value": half(6, 128, 256),
            "query_rope": half(2, 4, 3, 64),
            "key_rope": half(6, 128, 128),
            "pse_shift": half(1, 4, 3, 256),
        },
        "query_rope and key_rope go without pse_shift",
    ),
    (
        "MLA",
        {
            "key": half(6, 16, 1024),
            "value": half(6, 16, 1024),
            "key_rope": half(6, 16, 128),
            "num_key_value_heads": 2,
        },
        "and 1 K/V head",
    ),
    ("MLA", {"softmax_lse_flag": True}, "is not for query_rope with D = 512", 1),
    # Shared prefix (v1) and learnable sink (v2).
    ("prefix", {"value_shared_prefix": None}, "key_shared_prefix and value_shared_prefix are given both or neither"),
    (
        "BSH",
        {"key_shared_prefix": half(1, 5, 64), "value_shared_prefix": half(1, 5, 64)},
        "a shared prefix goes without a block_table",
        1,
    ),
    (
        "TND, not paged",
        {"key_shared_prefix": half(1, 2, 128), "value_shared_prefix": half(1, 2, 128)},
        "a shared prefix goes without packed layouts",
        1,
    ),
    ("prefix", {"key_shared_prefix": half(2, 5, 2, 32)}, "a shared prefix has B = 1"),
    ("prefix", {"value_shared_prefix": half(1, 6, 2, 32)}, "one S for both"),
    ("prefix", {"key_shared_prefix": half(1, 5, 32, 2).mT}, "a shared prefix is contiguous"),
    ("prefix", {"actual_shared_prefix_len": [6]}, "no length is more than the S of key_shared_prefix, which is 5"),
    ("prefix", {"actual_shared_prefix_len": [1, 2]}, "actual_shared_prefix_len has one element"),
    ("sink", {"learnable_sink": half(4)}, "learnable_sink is bfloat16, one element a query head"),
    (
        "sink",
        {"query": half(4, 4, 192).bfloat16(), "key": half(9, 4, 192).bfloat16(), "value": half(9, 4, 192).bfloat16()}
        | {"num_key_value_heads": 4},
        "learnable_sink is for TND and NTD_TND with a value D of at most 128",
    ),
]


def broken():
    """All of the table for both versions: version, the call, what breaks it, words of the rule."""
    for base, change, rule, *only in RULES:
        changed = dict(change)
        if only == ["NTD"]:  # key and value of this layout have other axes than those of the call that is changed
            changed |= {"actual_seq_lengths": [2, 4], "num_key_value_heads": 4}
            only = []
        for version in only or ([ONLY[base]] if base in ONLY else [1, 2]):
            yield version, base, changed, rule


@pytest.mark.parametrize(("version", "base"), [(v, name) for name in CALLS for v in [1, 2] if ONLY.get(name, v) == v])
def test_calls_that_keep_the_rules_are_served(version, base):
    out, _ = fused(version, **CALLS[base])
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(("version", "base", "change", "rule"), list(broken()))
def test_a_broken_rule_is_quoted(version, base, change, rule):
    name = "npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
    with pytest.raises(RuleViolation, match=f"^{name}: .*{rule}.*; found "):
        fused(version, **CALLS[base] | change)


# --- What is not served ------------------------------------------------------------------------------------------

NOT_SERVED = {
    1: (
        *("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2", "antiquant_scale"),
        *("antiquant_offset", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale"),
        *("value_antiquant_offset", "query_padding_size", "kv_padding_size", "key_rope_antiquant_scale"),
    ),
    2: (
        *("dequant_scale_query", "dequant_scale_key", "dequant_offset_key", "dequant_scale_value"),
        *("dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out", "quant_scale_p"),
        *("query_dtype", "key_dtype", "value_dtype", "query_rope_dtype", "key_rope_dtype", "out_dtype"),
        *("key_shared_prefix_dtype", "value_shared_prefix_dtype", "dequant_scale_query_dtype"),
        *("dequant_scale_key_dtype", "dequant_scale_value_dtype", "dequant_scale_key_rope_dtype"),
    ),
}


@pytest.mark.parametrize(("version", "name"), [(v, name) for v, names in NOT_SERVED.items() for name in names])
def test_what_is_not_served_is_refused_by_name(version, name):
    given = 5 if name.endswith("_dtype") else torch.ones(1)
    with pytest.raises(
        NotImplementedError, match=f"npu_fused_infer_attention_score.*: the simulator does not serve {name};"
    ):
        fused(version, **CALLS["BSH"] | {name: given})


@pytest.mark.parametrize(
    ("version", "base", "change", "words"),
    [
        (1, "BSH", {"key": half(6, 128, 64).char(), "value": half(6, 128, 64).char()}, "serve torch.int8 key"),
        (2, "BSH", {"query": half(2, 3, 128).char()}, "serve torch.int8 query"),
        (2, "TND", {"key": half(6, 2, 8, 128, 16), "value": half(6, 2, 8, 128, 16)}, "in the format NZ"),
        (2, "BSH", {"sparse_mode": 9}, "tree mask"),
    ],
)
def test_variants_that_are_not_served_are_refused(version, base, change, words):
    with pytest.raises(NotImplementedError, match=words):
        fused(version, **CALLS[base] | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keep_prob": 0.9}, "dropout"),
        ({"dropout_mask": torch.zeros(32, dtype=torch.uint8)}, "dropout_mask"),
        ({"padding_mask": torch.zeros(1)}, "padding_mask"),
        ({"input_layout": "TND", "sparse_mode": 7, "atten_mask": COMPRESSED}, "sparse_mode 7"),
        ({"input_layout": "TND", "pse": half(1)}, "pse with TND"),
    ],
)
def test_training_variants_that_are_not_served_are_refused(change, words):
    arguments = {"head_num": 4, "input_layout": "BNSD", "actual_seq_qlen": [5], "actual_seq_kvlen": [7]}
    shapes = ((1, 4, 5, 16), (1, 2, 7, 16)) if change.get("input_layout") != "TND" else ((5, 4, 16), (7, 2, 16))
    with pytest.raises(NotImplementedError, match=f"npu_fusion_attention: .*{words}"):
        npu_fusion_attention(half(*shapes[0]), half(*shapes[1]), half(*shapes[1]), **arguments | change)


# --- The other operators


# Of each rule: the operator, what breaks it, words of the rule.
OTHER_RULES = [
    (npu_prompt_flash_attention, {"input_layout": "SBH"}, "input_layout is one of BSH"),
    (npu_prompt_flash_attention, {"num_heads": 3}, "H is the number of heads times D"),
    (npu_prompt_flash_attention, {"atten_mask": bools(2, 8).logical_not()}, "no row of atten_mask hides everything"),
    (npu_prompt_flash_attention, {"sparse_mode": 5}, "sparse_mode is 0, 1, 2, 3 or 4"),
    (npu_prompt_flash_attention, {"sparse_mode": 3}, "need atten_mask in the compressed form"),
    (npu_prompt_flash_attention, {"actual_seq_lengths": [9]}, "no length is more than the S of query, which is 2"),
    (npu_prompt_flash_attention, {"query": half(2, 2, 65536)}, r"N \* D is less than 65535"),
    (npu_incre_flash_attention, {"query": half(2, 2, 32)}, "query has one token a request"),
    (npu_incre_flash_attention, {"actual_seq_lengths": [9]}, "no length is more than the S of key, which is 8"),
    (npu_incre_flash_attention, {"input_layout": "TND"}, "input_layout is one of BSH, BNSD, BSND"),
    (
        npu_incre_flash_attention,
        {"block_table": table([1], [0]), "block_size": 8},
        "a block_table needs actual_seq_lengths",
    ),
    (
        npu_incre_flash_attention,
        {"query": half(2, 1, 24), "key": half(2, 8, 24), "value": half(2, 8, 24), "pse_shift": half(2, 2, 1, 8)},
        "with pse_shift D is a multiple of 16",
    ),
    (
        npu_incre_flash_attention,
        {"block_table": table([1], [0]), "block_size": 16, "actual_seq_lengths": [8, 8]}
        | {"key": half(2, 32, 16).mT, "value": half(2, 16, 32)},
        "paged key and value are contiguous",
    ),
]


def other_call(operator):
    """A call that keeps the rules."""
    tokens = 2 if operator is npu_prompt_flash_attention else 1
    return {"query": half(2, tokens, 32), "key": half(2, 8, 32), "value": half(2, 8, 32), "num_heads": 2}


@pytest.mark.parametrize(("operator", "change", "rule"), OTHER_RULES)
def test_rules_of_prompt_and_incremental(operator, change, rule):
    operator(**other_call(operator))
    with pytest.raises(RuleViolation, match=f"{operator.__name__}: .*{rule}"):
        operator(**other_call(operator) | change)


def rules_in_the_code():
    """File, first and last line of each rule of inference attention."""
    modules = (attention_call, attention_infer, attention_lengths, attention_mask, attention_pages)
    return {
        (module.__file__, node.lineno, node.end_lineno)
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
    }


def test_every_rule_in_the_code_is_broken_by_the_tables():
    rules = rules_in_the_code()
    calls = [lambda v=v, b=b, c=c: fused(v, **CALLS[b] | c) for v, b, c, _ in broken()]
    calls += [lambda o=o, c=c: o(**other_call(o) | c) for o, c, _ in OTHER_RULES]
    for call in calls:
        with pytest.raises(RuleViolation) as caught:
            call()
        rule = traceback.extract_tb(caught.value.__traceback__)[-2]
        rules -= {each for each in rules if each[0] == rule.filename and each[1] <= rule.lineno <= each[2]}
    assert rules == set()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"update_type": 2}, "update_type is 0"),
        ({"lse": [], "local_out": []}, "there are 1 to 16 parts"),
        ({"lse": [torch.zeros(3)]}, "equally long"),
        ({"lse": [torch.zeros(3).half()] * 2}, "lse is float32"),
        ({"local_out": [torch.zeros(3, 8).double()] * 2}, "local_out is float32, float16 or bfloat16"),
        ({"local_out": [torch.zeros(3, 8), torch.zeros(3, 8).half()]}, "one of them in all parts"),
        ({"local_out": [torch.zeros(4, 8)] * 2}, "rows being B"),
        ({"local_out": [torch.zeros(3, 12)] * 2}, "a multiple of 8"),
        ({"local_out": [torch.zeros(3, 520)] * 2}, "8 to 512"),
    ],
)
def test_rules_of_update(change, rule):
    arguments = {"lse": [torch.zeros(3)] * 2, "local_out": [torch.zeros(3, 8)] * 2, "update_type": 0}
    npu_attention_update(**arguments)
    with pytest.raises(RuleViolation, match=f"npu_attention_update: .*{rule}"):
        npu_attention_update(**arguments | change)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"input_layout": "BSD"}, "input_layout is one of BSH, SBH, BSND, BNSD, TND"),
        ({"head_num": 0}, "head_num is at least 1"),
        ({"head_num": 3}, "head_num is the N of query"),
        ({"keep_prob": 0.0}, r"keep_prob is in \(0, 1\]"),
        ({"softmax_layout": "TND"}, "softmax_layout is empty, or TND with input_layout TND"),
        ({"query": half(1, 4, 5, 16).double()}, "float16, bfloat16 or float32"),
        ({"query": half(1, 4, 5)}, "have the axes of input_layout"),
        ({"key": half(1, 3, 7, 16), "value": half(1, 3, 7, 16)}, "query's N is a multiple of key's"),
        ({"value": half(1, 2, 6, 16)}, "key and value have the same shape"),
        ({"key": half(2, 2, 7, 16), "value": half(2, 2, 7, 16)}, "B is the same for all"),
        ({"value": half(1, 2, 7, 32)}, "not more of value"),
        ({"sparse_mode": 7}, "sparse_mode is 0 to 6"),
        ({"sparse_mode": 3, "atten_mask": torch.zeros(5, 7, dtype=torch.bool)}, "compressed form"),
        ({"sparse_mode": 2, "atten_mask": COMPRESSED.T.contiguous()}, "ones above the diagonal"),
        ({"atten_mask": torch.zeros(5, 7)}, "atten_mask is bool or uint8"),
        ({"atten_mask": torch.zeros(5, 8, dtype=torch.bool)}, r"atten_mask is \(B, N, S1, S2\)"),
        ({"atten_mask": torch.zeros(5, 7, dtype=torch.bool), "next_tockens": 0}, "hides all that lies outside"),
        ({"sparse_mode": 6, "atten_mask": COMPRESSED, "prefix": [2]}, r"needs atten_mask \(3072, 2048\)"),
        ({"sparse_mode": 5, "atten_mask": torch.zeros(1, 1, 5, 7, dtype=torch.bool)}, "need prefix"),
        (
            {"sparse_mode": 5, "atten_mask": torch.zeros(1, 1, 5, 7, dtype=torch.bool), "prefix": [1]},
            "at least S2 - S1",
        ),
        ({"pse": half(1, 4, 5, 8)}, r"pse is \(B, N, S1, S2\)"),
        ({"pse": half(1, 4, 5, 7).float()}, "pse has query's dtype"),
        ({"sink": half(4)}, "sink is float32"),
    ],
)
def test_rules_of_training(change, rule):
    arguments = {
        "query": half(1, 4, 5, 16),
        "key": half(1, 2, 7, 16),
        "value": half(1, 2, 7, 16),
        "head_num": 4,
        "input_layout": "BNSD",
    }
    npu_fusion_attention(**arguments)
    with pytest.raises(RuleViolation, match=f"npu_fusion_attention: .*{rule}"):
        npu_fusion_attention(**arguments | change)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"actual_seq_qlen": None}, "TND needs actual_seq_qlen and actual_seq_kvlen, equally long"),
        ({"actual_seq_kvlen": [7]}, "equally long"),
        ({"actual_seq_qlen": [4, 3]}, "actual_seq_qlen is a running sum"),
        ({"actual_seq_kvlen": [2, 8]}, "actual_seq_kvlen ends within the 7 tokens"),
        ({"sparse_mode": 5, "atten_mask": torch.zeros(5, 7, dtype=torch.bool)}, "with TND 0 to 8 but 5"),
        ({"sparse_mode": 1, "atten_mask": torch.ones(3, 5, dtype=torch.bool)}, "no row of atten_mask hides everything"),
        ({"sparse_mode": 1, "atten_mask": torch.ones(1, 1, 3, 5, dtype=torch.bool)[0]}, r"\(S1, S2\) of the longest"),
    ],
)
def test_rules_of_packed_training(change, rule):
    arguments = {
        "query": half(5, 4, 16),
        "key": half(7, 2, 16),
        "value": half(7, 2, 16),
        "head_num": 4,
        "input_layout": "TND",
        "actual_seq_qlen": [2, 5],
        "actual_seq_kvlen": [2, 7],
    }
    npu_fusion_attention(**arguments)
    with pytest.raises(RuleViolation, match=f"npu_fusion_attention: .*{rule}"):
        npu_fusion_attention(**arguments | change)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"softmax_max": None}, "are what the forward operator returned; found no softmax_max"),
        ({"dy": half(1, 4, 5, 8)}, "dy has the output's shape"),
        ({"softmax_sum": torch.zeros(1, 4, 5)}, "softmax_sum is float32"),
    ],
)
def test_rules_of_training_backward(change, rule):
    tensors = (half(1, 4, 5, 16), half(1, 2, 7, 16), half(1, 2, 7, 16))
    out, maximum, total, *_ = npu_fusion_attention(*tensors, 4, "BNSD")
    arguments = {"dy": out, "softmax_max": maximum, "softmax_sum": total, "attention_in": out}
    npu_fusion_attention_grad(*tensors, head_num=4, input_layout="BNSD", **arguments)
    with pytest.raises(RuleViolation, match=f"npu_fusion_attention_grad: .*{rule}"):
        npu_fusion_attention_grad(*tensors, head_num=4, input_layout="BNSD", **arguments | change)
