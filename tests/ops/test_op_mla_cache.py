"""Reference of npu_kv_rmsnorm_rope_cache against loops in every cache mode, and every documented rule broken once."""

import math
from typing import Any

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops.mla_cache import npu_kv_rmsnorm_rope_cache

BATCH, SEQ, BLOCK, BLOCKS, LENGTH = 3, 20, 16, 7, 40
PAGED = ["PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]


def arguments(
    mode: str = "PA_BNSD", dtype: torch.dtype = torch.float16, quantised: bool = False, **changes: Any
) -> dict[str, Any]:
    block = 32 if quantised else BLOCK
    blocks_each = math.ceil(SEQ / block)
    if mode == "Norm":
        index = torch.stack([torch.randperm(LENGTH)[:SEQ] for _ in range(BATCH)])
        leading: tuple[int, ...] = (BATCH, 1, LENGTH)
    elif "BLK" in mode:
        index = torch.randperm(BLOCKS)[: BATCH * blocks_each] * block
        leading = (BLOCKS, block, 1)
    else:
        index = torch.randperm(BLOCKS * block)[: BATCH * SEQ]
        leading = (BLOCKS, block, 1)
    cache_dtype = torch.int8 if quantised else dtype
    made: dict[str, Any] = {
        "kv": torch.randn(BATCH, 1, SEQ, 576).to(dtype),
        "gamma": torch.randn(512).to(dtype),
        "cos": torch.rand(BATCH, 1, SEQ, 64).to(dtype),
        "sin": torch.rand(BATCH, 1, SEQ, 64).to(dtype),
        "index": index,
        "k_cache": torch.full((*leading, 64), 9).to(cache_dtype),
        "ckv_cache": torch.full((*leading, 512), 9).to(cache_dtype),
        "cache_mode": mode,
    }
    if quantised:
        made |= {"k_rope_scale": torch.rand(64) * 60, "c_kv_scale": torch.rand(512) * 60}
    return made | changes


def naive_tokens(a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated and normalised tokens, float64."""
    kv = a["kv"].double()
    cos, sin = (a[n].double().expand(BATCH, 1, SEQ, 64) for n in ("cos", "sin"))
    gamma = a["gamma"].double()
    rotated, normalised = torch.empty(BATCH, 1, SEQ, 64).double(), torch.empty(BATCH, 1, SEQ, 512).double()
    for b in range(BATCH):
        for s in range(SEQ):
            token = kv[b, 0, s]
            mean = sum(v * v for v in token[:512].tolist()) / 512
            normalised[b, 0, s] = token[:512] / math.sqrt(mean + 1e-5) * gamma
            for i in range(32):
                even, odd = token[512 + 2 * i], token[512 + 2 * i + 1]
                rotated[b, 0, s, i] = even * cos[b, 0, s, i] - odd * sin[b, 0, s, i]
                rotated[b, 0, s, 32 + i] = odd * cos[b, 0, s, 32 + i] + even * sin[b, 0, s, 32 + i]
    return rotated, normalised


def naive_place(a: dict[str, Any], b: int, s: int) -> tuple[int, int] | None:
    """Block (or request) and offset of a token."""
    mode, index = a["cache_mode"], a["index"]
    if mode == "Norm":
        return None if index[b, s] < 0 else (b, int(index[b, s]))
    block = a["k_cache"].shape[1]
    if "BLK" in mode:
        page = int(index[b * math.ceil(SEQ / block) + s // block])
        return None if page < 0 else (page // block, s % block)
    slot = int(index[b * SEQ + s])
    return None if slot < 0 else divmod(slot, block)


def naive_cache(a: dict[str, Any], cache: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The cache as float64 with the tokens in it, before rounding."""
    expected = cache.double().clone()
    flat = expected.view(-1)
    size, column = cache.shape[-1], 32 if cache.dtype == torch.int8 else 16
    for b in range(BATCH):
        for s in range(SEQ):
            place = naive_place(a, b, s)
            if place is None:
                continue
            outer, offset = place
            per_outer = cache.shape[1] * cache.shape[2]
            for d in range(size):
                if a["cache_mode"].endswith("NZ"):
                    at = ((outer * (size // column) + d // column) * per_outer + offset) * column + d % column
                else:
                    at = (outer * per_outer + offset) * size + d
                flat[at] = tokens[b, 0, s, d]
    return expected


@pytest.fixture(scope="module")
def expected_tokens() -> dict[torch.dtype, tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]]:
    """The slow loop once a dtype: every mode gets the same tokens."""
    torch.manual_seed(1)
    made = {}
    for dtype in (torch.float16, torch.bfloat16):
        a = arguments(dtype=dtype)
        made[dtype] = ({name: a[name] for name in ("kv", "gamma", "cos", "sin")}, naive_tokens(a))
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["Norm", *PAGED])
def test_tokens_land_in_both_caches(mode: str, dtype: torch.dtype, expected_tokens: Any) -> None:
    inputs, (rotated, normalised) = expected_tokens[dtype]
    a = arguments(mode, dtype) | inputs
    a["index"].view(-1)[[1, 2]] = -1  # skipped
    wanted = [naive_cache(a, a[name], t) for name, t in (("k_cache", rotated), ("ckv_cache", normalised))]
    got = npu_kv_rmsnorm_rope_cache(**a, is_output_kv=mode != "Norm")
    assert got[0] is a["k_cache"]
    assert got[1] is a["ckv_cache"]
    tolerance = {"rtol": 2**-10, "atol": 2**-13} if dtype == torch.float16 else {"rtol": 2**-7, "atol": 2**-10}
    for cache, want in zip(got, wanted, strict=False):
        assert cache.dtype == dtype
        torch.testing.assert_close(cache.double(), want, **tolerance)
    for tokens, want in zip(got[2:], (rotated, normalised), strict=True):
        assert tokens.dtype == dtype
        if mode == "Norm":
            assert tokens.isnan().all()
        else:
            torch.testing.assert_close(tokens.double(), want, **tolerance)


@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_NZ", "PA_BLK_NZ"])
def test_int8_caches(mode: str, expected_tokens: Any) -> None:
    inputs, tokens = expected_tokens[torch.float16]
    a = arguments(mode, quantised=True) | inputs
    wanted = []
    for name, scale, t in zip(("k_cache", "ckv_cache"), ("k_rope_scale", "c_kv_scale"), tokens, strict=True):
        wanted.append(naive_cache(a, a[name], (t * a[scale].double()).round().clamp(-128, 127)))
    got = npu_kv_rmsnorm_rope_cache(**a)
    for cache, want in zip(got, wanted, strict=False):
        assert cache.dtype == torch.int8
        difference = (cache.double() - want).abs()
        assert difference.max() <= 1  # a tie that float32 sees on the other side
        assert (difference > 0).double().mean() < 1e-3


def test_one_position_for_all_tokens() -> None:
    a = arguments()
    one = a | {name: a[name][:, :, :1] for name in ("cos", "sin")}
    all_ = a | {name: a[name][:, :, :1].expand(-1, -1, SEQ, -1) for name in ("cos", "sin")}
    caches = [npu_kv_rmsnorm_rope_cache(**(x | {"k_cache": a["k_cache"].clone()}))[0] for x in (one, all_)]
    assert torch.equal(*caches)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


RULES: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"cache_mode": "BNSD"}, "cache_mode is one of Norm, PA, PA_BNSD, PA_NZ, PA_BLK_BNSD, PA_BLK_NZ"),
    "k offset": ({"k_rope_offset": torch.zeros(64)}, "k_rope_offset and c_kv_offset are None"),
    "c offset": ({"c_kv_offset": torch.zeros(512)}, "k_rope_offset and c_kv_offset are None"),
    "v": ({"v": half(BATCH, 1, SEQ, 128)}, "v is None"),
    "kv's dtype": ({"kv": torch.zeros(BATCH, 1, SEQ, 576)}, "kv is float16 or bfloat16"),
    "dtypes differ": ({"gamma": torch.zeros(512)}, "kv, gamma, cos, sin have one dtype"),
    "kv's dimensions": ({"kv": half(BATCH, SEQ, 576)}, "kv has 4 dimensions"),
    "kv's heads": ({"kv": half(BATCH, 2, SEQ, 576)}, "kv has shape [batch, 1, seq_len, 576]"),
    "kv's size": ({"kv": half(BATCH, 1, SEQ, 192)}, "kv has shape [batch, 1, seq_len, 576]"),
    "gamma's shape": ({"gamma": half(576)}, "gamma has shape [512]"),
    "cos's dimensions": ({"cos": half(BATCH, SEQ, 64)}, "cos has 4 dimensions"),
    "cos's batch": ({"cos": half(1, 1, SEQ, 64)}, "cos has shape [batch, 1, seq_len or 1, 64]"),
    "sin's shape": ({"sin": half(BATCH, 1, 1, 64)}, "sin has shape cos.shape"),
    "cache's dimensions": ({"k_cache": half(BLOCKS, BLOCK, 64)}, "k_cache has 4 dimensions"),
    "cache's size": ({"k_cache": half(BLOCKS, BLOCK, 1, 128)}, "k_cache has shape [block_num, block_size, 1, 64]"),
    "other cache's blocks": (
        {"ckv_cache": half(BLOCKS + 1, BLOCK, 1, 512)},
        "ckv_cache has shape [block_num, block_size, 1, 512]",
    ),
    "one scale": ({"k_rope_scale": torch.ones(64)}, "k_rope_scale and c_kv_scale are given together"),
    "int8 without scales": (
        {"k_cache": half(BLOCKS, BLOCK, 1, 64).char()},
        "k_cache without scales is float16; found int8",
    ),
    "cache of the other dtype": (
        {"ckv_cache": half(BLOCKS, BLOCK, 1, 512).bfloat16()},
        "ckv_cache without scales is float16; found bfloat16",
    ),
    "scales without int8": (
        {"k_rope_scale": torch.ones(64), "c_kv_scale": torch.ones(512)},
        "k_cache with scales is int8; found float16",
    ),
    "block_size": (
        {"k_cache": half(20, 8, 1, 64), "ckv_cache": half(20, 8, 1, 512)},
        "block_size is a multiple of 16 for a torch.float16 cache; found 8",
    ),
    "too few blocks": (
        {"k_cache": half(5, BLOCK, 1, 64), "ckv_cache": half(5, BLOCK, 1, 512)},
        "block_num is at least ceil(seq_len / block_size) * batch; found 5 < 6",
    ),
    "index's dtype": ({"index": torch.arange(BATCH * SEQ).int()}, "index is int64"),
    "index's shape": ({"index": torch.arange(BATCH * SEQ).view(BATCH, SEQ)}, "index has shape [batch * seq_len]"),
    "index too high": (
        {"index": torch.arange(BATCH * SEQ) + 53},
        f"index is in [-1, block_num * block_size = {BLOCKS * BLOCK}); found [112]",
    ),
    "index below -1": ({"index": torch.arange(BATCH * SEQ) - 2}, "index is in [-1, block_num"),
    "index twice": ({"index": torch.arange(BATCH * SEQ) // 2}, "index holds no value twice"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    changes, text = RULES[rule]
    violates(npu_kv_rmsnorm_rope_cache, arguments() | changes, text)


def test_rules_of_norm_mode() -> None:
    violates(npu_kv_rmsnorm_rope_cache, arguments("Norm", is_output_kv=True), "is_output_kv is for the PA modes only")
    short = {"k_cache": half(BATCH, 1, 19, 64), "ckv_cache": half(BATCH, 1, 19, 512)}
    violates(npu_kv_rmsnorm_rope_cache, arguments("Norm") | short, "cache_length is at least seq_len; found 19 < 20")
    other = {"k_cache": half(2, 1, LENGTH, 64)}
    violates(npu_kv_rmsnorm_rope_cache, arguments("Norm") | other, "k_cache has shape [batch, 1, cache_length, 64]")
    index = torch.arange(SEQ).expand(BATCH, SEQ)  # the same places in every request: allowed
    npu_kv_rmsnorm_rope_cache(**arguments("Norm", index=index))
    violates(
        npu_kv_rmsnorm_rope_cache, arguments("Norm", index=index // 2), "no place of one request twice; found 0 twice"
    )
    violates(npu_kv_rmsnorm_rope_cache, arguments("Norm", index=index + 21), "index is in [-1, cache_length = 40)")
    violates(npu_kv_rmsnorm_rope_cache, arguments("Norm", index=index.flatten()), "index has shape [batch, seq_len]")


def test_rules_of_block_modes() -> None:
    index = torch.tensor([0, 16, 32, 48, 64, 81])
    violates(npu_kv_rmsnorm_rope_cache, arguments("PA_BLK_NZ", index=index), "multiples of block_size 16; found [81]")
    too_many = torch.arange(BATCH * SEQ)
    text = "index has shape [batch * ceil(seq_len / block_size)] = (6,)"
    violates(npu_kv_rmsnorm_rope_cache, arguments("PA_BLK_BNSD", index=too_many), text)


def test_rules_of_nz_modes() -> None:
    strided = half(BLOCKS, 2 * BLOCK, 1, 64)[:, ::2]
    npu_kv_rmsnorm_rope_cache(**arguments("PA", k_cache=strided))
    violates(npu_kv_rmsnorm_rope_cache, arguments("PA_NZ", k_cache=strided), "k_cache is contiguous")


def test_rules_of_int8() -> None:
    scale = {"k_rope_scale": torch.ones(64).half()}
    violates(npu_kv_rmsnorm_rope_cache, arguments(quantised=True) | scale, "the scale of k_cache is float32")
    scale = {"c_kv_scale": torch.ones(1)}
    text = "the scale of ckv_cache has shape [the cache's last dimension]"
    violates(npu_kv_rmsnorm_rope_cache, arguments(quantised=True) | scale, text)
    caches = {"k_cache": half(BLOCKS, BLOCK, 1, 64).char(), "ckv_cache": half(BLOCKS, BLOCK, 1, 512).char()}
    text = "block_size is a multiple of 32 for a torch.int8 cache; found 16"
    violates(npu_kv_rmsnorm_rope_cache, arguments(quantised=True) | caches, text)
