"""References of the rotary embeddings against loops, and every documented rule broken once."""

import itertools
from typing import Any

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops import rotary as ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-6}


def partner(d: int, size: int, mode: str) -> tuple[int, int]:
    """Which number takes part in the rotation of number d, and with which sign."""
    if mode == "half":
        return (d + size // 2, -1) if d < size // 2 else (d - size // 2, 1)
    return (d + 1, -1) if d % 2 == 0 else (d - 1, 1)


def naive(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float64)
    x, cos, sin = x.double(), cos.double().expand(x.shape), sin.double().expand(x.shape)
    for index in itertools.product(*map(range, x.shape[:-1])):
        for d in range(x.shape[-1]):
            other, sign = partner(d, x.shape[-1], mode)
            at = (*index, d)
            out[at] = x[at] * cos[at] + sign * x[(*index, other)] * sin[at]
    return out


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, atol: float = 0) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=max(atol, TOLERANCE[dtype]))


# x is BNSD = BSND = SBND = (2, 3, 4, 8) or TND = (3, 2, 8): all that the page lists, at once.
HALF = [(1, 1, 4, 8), (2, 1, 4, 8), (2, 3, 4, 8), (1, 3, 1, 8), (2, 3, 1, 8), (2, 1, 1, 8)]
INTERLEAVE = [(1, 1, 4, 8), (1, 3, 1, 8), (2, 1, 1, 8)]
CASES = [("half", r) for r in [*HALF, (3, 1, 8), (3, 2, 8)]] + [("interleave", r) for r in [*INTERLEAVE, (3, 1, 8)]]


def case(r_shape: tuple[int, ...], dtype: torch.dtype, r_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    x_shape = (2, 3, 4, 8) if len(r_shape) == 4 else (3, 2, 8)
    return [torch.randn(x_shape).to(dtype), *(torch.rand(r_shape).to(r_dtype or dtype) for _ in range(2))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "r_shape"), CASES)
def test_rotary_mul(mode: str, r_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, cos, sin = case(r_shape, dtype)
    close(ops.npu_rotary_mul(x, cos, sin, mode), naive(x, cos, sin, mode), dtype)


def naive_backward(
    dy: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str
) -> list[torch.Tensor]:
    """What each product of the loop above passes back to its two factors."""
    gradients = [torch.zeros(t.shape, dtype=torch.float64) for t in (x, cos, sin)]
    dx, dcos, dsin = (g.expand(x.shape) for g in gradients)  # broadcast dimensions accumulate in one place
    dy, x, cos, sin = dy.double(), x.double(), cos.double().expand(x.shape), sin.double().expand(x.shape)
    for index in itertools.product(*map(range, x.shape[:-1])):
        for d in range(x.shape[-1]):
            other, sign = partner(d, x.shape[-1], mode)
            at, beside = (*index, d), (*index, other)
            dx[at] += dy[at] * cos[at]
            dcos[at] += dy[at] * x[at]
            dx[beside] += sign * dy[at] * sin[at]
            dsin[at] += sign * dy[at] * x[beside]
    return gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "r_shape"), CASES)
def test_rotary_mul_backward(mode: str, r_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, cos, sin = case(r_shape, dtype)
    dy = torch.randn(x.shape).to(dtype)
    results = ops.npu_rotary_mul_backward(dy, x, cos, sin, mode)
    for got, want in zip(results, naive_backward(dy, x, cos, sin, mode), strict=True):
        close(got, want, dtype, atol=1e-5)


def test_cosines_are_cast_to_the_dtype_of_the_input() -> None:
    x, cos, sin = case((1, 3, 1, 8), torch.bfloat16, torch.float32)
    dy = torch.randn(x.shape)
    cast = (cos.bfloat16(), sin.bfloat16())
    assert torch.equal(ops.npu_rotary_mul(x, cos, sin), ops.npu_rotary_mul(x, *cast))
    expected = ops.npu_rotary_mul_backward(dy.bfloat16(), x, *cast)
    for got, want in zip(ops.npu_rotary_mul_backward(dy, x, cos, sin), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_a_rotation_matrix_replaces_the_mode(mode: str) -> None:
    x, cos, sin = case((1, 3, 1, 8), torch.float32)
    rotate = torch.zeros(8, 8)
    for d in range(8):
        other, sign = partner(d, 8, mode)
        rotate[other, d] = sign
    close(ops.npu_rotary_mul(x, cos, sin, "half", rotate), naive(x, cos, sin, mode), torch.float32)


def mul(*x_shape: int, r: tuple[int, ...] | None = None, **changes: Any) -> dict[str, Any]:
    x = torch.zeros(x_shape or (2, 3, 4, 8))
    cos = torch.zeros(r if r is not None else (1, 1, *x.shape[2:]))
    return {"input": x, "r1": cos, "r2": cos.clone()} | changes


MUL_RULES = {
    "mode": (
        mul(rotary_mode="quarter"),
        "The rotary_mode of npu_rotary_mul should be half or interleave, but got quarter",
    ),
    "dimensions": (mul(2, 8, r=(2, 8)), "input has 3 to 4 dimensions"),
    "dtype": (mul(input=torch.zeros(2, 3, 4, 8).int()), "input is float16 or bfloat16 or float32"),
    "cosines' dtype": (mul(r1=torch.zeros(1, 1, 4, 8).double()), "r1 is float16 or bfloat16 or float32"),
    "D odd": (mul(2, 3, 4, 7), "the last dimension (D) of input is even and below 896; found 7"),
    "D 896": (mul(1, 1, 1, 896), "the last dimension (D) of input is even and below 896; found 896"),
    "sines' shape": (mul(r2=torch.zeros(2, 1, 4, 8)), "r2 has shape r1.shape"),
    "broadcast": (
        mul(r=(1, 3, 4, 8)),
        "11SD, B1SD, BNSD for BNSD; 1S1D, BS1D, BSND for BSND; S11D, SB1D, SBND for SBND",
    ),
    "interleaved broadcast": (
        mul(r=(2, 1, 4, 8), rotary_mode="interleave"),
        "mode 'interleave' are 11SD for BNSD; 1S1D for BSND; S11D for SBND; found (2, 1, 4, 8) for (2, 3, 4, 8)",
    ),
    "TND broadcast": (mul(5, 3, 8, r=(1, 1, 8)), "r1 and r2 in mode 'half' are T1D, TND for TND"),
    "B": (mul(1000, 3, 4, 8), "input in mode 'half' has B < 1000 and N < 1000; found (1000, 3, 4, 8) as BNSD"),
    "N": (mul(2, 1000, 4, 8), "B < 1000 and N < 1000"),
    "TND's N": (mul(5, 1000, 8, r=(5, 1, 8)), "B < 1000 and N < 1000; found (5, 1000, 8) as TND"),
    "B · N": (mul(25, 40, 4, 8, rotary_mode="interleave"), "input in mode 'interleave' has B * N < 1000"),
    "matrix's shape": (mul(rotate=torch.zeros(8, 4)), "rotate has shape [D, D] = (8, 8)"),
    "matrix's dtype": (mul(rotate=torch.zeros(8, 8).int()), "rotate is float16"),
}


@pytest.mark.parametrize("rule", MUL_RULES)
def test_rotary_mul_rules(rule: str) -> None:
    violates(ops.npu_rotary_mul, *MUL_RULES[rule])


@pytest.mark.parametrize(("x_shape", "r_shape"), [((4, 999, 3, 8), (1, 1, 3, 8)), ((1000, 2, 3, 8), (1000, 1, 1, 8))])
def test_rotary_mul_at_its_limits(x_shape: tuple[int, ...], r_shape: tuple[int, ...]) -> None:
    ops.npu_rotary_mul(torch.zeros(x_shape), torch.zeros(r_shape), torch.zeros(r_shape))


@pytest.mark.parametrize("rule", ["D odd", "broadcast", "B", "sines' shape", "dtype"])
def test_rotary_mul_backward_has_the_rules_of_forward(rule: str) -> None:
    arguments, text = MUL_RULES[rule]
    violates(ops.npu_rotary_mul_backward, arguments | {"grad": arguments["input"]}, text)


def test_rotary_mul_backward_rules() -> None:
    arguments = mul() | {"grad": torch.zeros(2, 3, 4, 4)}
    violates(ops.npu_rotary_mul_backward, arguments, "grad has shape input.shape")
    arguments = mul() | {"grad": torch.zeros(2, 3, 4, 8), "rotary_mode": "x"}
    violates(ops.npu_rotary_mul_backward, arguments, "The rotary_mode of npu_rotary_mul_backward should be half or")


def pos_emb(*leading: int, size: int = 64, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    leading = leading or (2, 3)
    return {
        "query": torch.randn(*leading, 3, size).to(dtype),
        "key": torch.randn(*leading, 1, size).to(dtype),
        "cos": torch.rand(*leading, 1, size).to(dtype),
        "sin": torch.rand(*leading, 1, size).to(dtype),
    } | changes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_apply_rotary_pos_emb_writes_in_place(dtype: torch.dtype, size: int, layout: str) -> None:
    a = pos_emb(*(2, 3)[: len(layout) - 2], size=size, dtype=dtype)
    expected = [naive(a[name], a["cos"], a["sin"], "half") for name in ("query", "key")]
    results = ops.npu_apply_rotary_pos_emb(**a, layout=layout)
    for got, name, want in zip(results, ("query", "key"), expected, strict=True):
        assert got is a[name]
        close(got, want, dtype)


POS_EMB_RULES = {
    "layout": (pos_emb(layout="BNSD"), "layout is 'BSND' or 'TND' on A2/A3; found 'BNSD'"),
    "mode": (pos_emb(rotary_mode="interleave"), "rotary_mode is 'half' on A2/A3; found 'interleave'"),
    "dtype": (pos_emb(dtype=torch.float64), "query is float16 or bfloat16 or float32"),
    "dtypes differ": (pos_emb(cos=torch.zeros(2, 3, 1, 64).half()), "query, key, cos, sin have one dtype"),
    "empty": (pos_emb(2, 0), "query is not empty"),
    "query's dimensions": (pos_emb(6), "query in layout BSND has 4 dimensions"),
    "key's dimensions": (pos_emb(key=torch.zeros(6, 1, 64)), "key in layout BSND has 4 dimensions"),
    "TND's dimensions": (pos_emb(layout="TND"), "query in layout TND has 3 dimensions"),
    "D": (pos_emb(size=32), "the last dimension (D) of query is 64 or 128; found 32"),
    "key's batch": (pos_emb(key=torch.zeros(1, 3, 1, 64)), "key has shape [query's B, S, key's N, query's D]"),
    "key's D": (pos_emb(key=torch.zeros(2, 3, 1, 128)), "key has shape [query's B, S, key's N, query's D]"),
    "cos of heads": (pos_emb(cos=torch.zeros(2, 3, 3, 64)), "cos has shape [query's B, S, 1, D]"),
    "sin's batch": (pos_emb(sin=torch.zeros(1, 3, 1, 64)), "sin has shape [query's B, S, 1, D]"),
    "heads": (
        pos_emb(dtype=torch.bfloat16, query=torch.zeros(2, 3, 152, 64).bfloat16()),
        "need at most 196608 bytes of the unified buffer",
    ),
}


@pytest.mark.parametrize("rule", POS_EMB_RULES)
def test_apply_rotary_pos_emb_rules(rule: str) -> None:
    violates(ops.npu_apply_rotary_pos_emb, *POS_EMB_RULES[rule])


@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 151), (torch.float16, 305), (torch.float32, 151)])
def test_apply_rotary_pos_emb_at_its_limit_of_heads(dtype: torch.dtype, heads: int) -> None:
    """With one head more, and one of the key, five rows of them and four of D are over 192 KiB."""
    fits = pos_emb(1, 1, dtype=dtype, query=torch.zeros(1, 1, heads, 64).to(dtype))
    ops.npu_apply_rotary_pos_emb(**fits)
    over = pos_emb(1, 1, dtype=dtype, query=torch.zeros(1, 1, heads + 1, 64).to(dtype))
    violates(ops.npu_apply_rotary_pos_emb, over, "the unified buffer")
