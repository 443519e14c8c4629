"""References of RMSNorm and its fusions against float64 loops, and every documented rule broken once."""

import math
from typing import Any

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops import norm as ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One rounding to the dtype, and what float32 loses before it.
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}


def rows(x: torch.Tensor, normed: int) -> list[tuple[tuple[int, ...], list[float]]]:
    """The index of each row and the numbers that are normalised together."""
    leading = x.shape[: x.dim() - normed]
    flat = x.double().reshape(math.prod(leading), -1)
    return [(divmod_all(i, leading), flat[i].tolist()) for i in range(len(flat))]


def divmod_all(i: int, sizes: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(sizes):
        i, r = divmod(i, size)
        index.insert(0, r)
    return tuple(index)


def naive(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, plus: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    normed = gamma.dim()
    y = torch.empty(x.shape, dtype=torch.float64)
    rstd = torch.empty(*x.shape[: x.dim() - normed], *[1] * normed, dtype=torch.float64)
    weights = gamma.double().flatten().tolist()
    for index, row in rows(x, normed):
        r = 1 / math.sqrt(sum(v * v for v in row) / len(row) + epsilon)
        rstd[index] = r
        scaled = [v * r * (w + plus) for v, w in zip(row, weights, strict=True)]
        y[index] = torch.tensor(scaled, dtype=torch.float64).view(gamma.shape)
    return y, rstd


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, times: int = 1) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    tolerance = times * TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 1e-2 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("shape", "normed"), [((8,), 1), ((3, 8), 1), ((2, 3, 8), 2), ((2, 3, 8), 3), ((2, 1, 3, 5), 1)]
)
def test_rms_norm(dtype: torch.dtype, mixed: bool, shape: tuple[int, ...], normed: int) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    gamma = torch.randn(shape[-normed:]).to(torch.float32 if mixed else dtype)
    y, rstd = ops.npu_rms_norm(x, gamma, epsilon=1e-2)
    expected_y, expected_rstd = naive(x, gamma, 1e-2)
    close(y, expected_y, dtype)
    close(rstd, expected_rstd, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rms_norm_adds_one_to_the_weight(dtype: torch.dtype) -> None:
    x, gamma = torch.randn(4, 6).to(dtype), torch.randn(6).to(dtype)
    y, rstd = ops.npu_gemma_rms_norm(x, gamma)
    expected_y, expected_rstd = naive(x, gamma, 1e-6, plus=1.0)
    close(y, expected_y, dtype)
    close(rstd, expected_rstd, torch.float32)


def test_rms_norm_takes_strides_and_nothing() -> None:
    x, gamma = torch.randn(6, 4).t(), torch.randn(6)
    assert torch.equal(ops.npu_rms_norm(x, gamma)[0], ops.npu_rms_norm(x.contiguous(), gamma)[0])
    y, rstd = ops.npu_rms_norm(torch.empty(0, 6), gamma)
    assert (y.shape, rstd.shape) == ((0, 6), (0, 1))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_rms_norm_spreads_what_is_not_finite(bad: float) -> None:
    x = torch.ones(2, 4)
    x[0, 1] = bad
    y, _ = ops.npu_rms_norm(x, torch.ones(4))
    assert y[0].isnan().any()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [1, 2])
def test_rms_norm_backward(dtype: torch.dtype, normed: int) -> None:
    """Against differences of the float64 loop."""
    shape = (2, 3, 4)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    gamma = torch.randn(shape[-normed:]).to(dtype)
    _, rstd = ops.npu_rms_norm(x, gamma, epsilon=1e-2)
    dx, dgamma = ops.npu_rms_norm_backward(dy, x, gamma, rstd)

    def loss(x: torch.Tensor, gamma: torch.Tensor) -> float:
        return float((naive(x, gamma, 1e-2)[0] * dy.double()).sum())

    def slope(which: int) -> torch.Tensor:
        inputs = [x.double(), gamma.double()]
        out = torch.empty_like(inputs[which])
        for i in range(out.numel()):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [t.clone() for t in inputs]
                moved[which].view(-1)[i] += step
                ends.append(loss(*moved))
            out.view(-1)[i] = (ends[0] - ends[1]) / 2e-5
        return out

    for got, expected, expected_dtype in ((dx, slope(0), dtype), (dgamma, slope(1), torch.float32)):
        assert got.dtype == expected_dtype
        torch.testing.assert_close(got.double(), expected, rtol=2 * TOLERANCE[dtype], atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x1, x2, gamma = torch.randn(3, 5, 8).to(dtype), torch.randn(3, 5, 8).to(dtype), torch.randn(8).to(dtype)
    y, rstd, x = ops.npu_add_rms_norm(x1, x2, gamma, epsilon=1e-3)
    assert torch.equal(x, (x1.double() + x2.double()).to(dtype))
    expected_y, expected_rstd = naive(x, gamma, 1e-3)  # of the rounded sum
    close(y, expected_y, dtype, times=2)  # rounded before the weight and after
    close(rstd, expected_rstd, torch.float32)
    for got, expected in zip(ops.npu_add_rms_norm_v2_functional(x1, x2, gamma, 1e-3), (rstd, y, x), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(ops.npu_add_rms_norm_v2(x1, x2, gamma, 1e-3), rstd)
    assert torch.equal(x1, y)
    assert torch.equal(x2, x)


def test_add_rms_norm_rounds_before_the_weight() -> None:
    x1, gamma = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    y, rstd, x = ops.npu_add_rms_norm(x1, torch.zeros_like(x1), gamma)
    twice = ((x.float() * rstd).bfloat16().float() * gamma.float()).bfloat16()
    once = (x.float() * rstd * gamma.float()).bfloat16()
    assert not torch.equal(once, twice)
    assert torch.equal(y, twice)


def rms(**changes: Any) -> dict[str, Any]:
    return {"input": torch.randn(2, 4), "gamma": torch.randn(4)} | changes


RMS_RULES = {
    "no dimension": (rms(input=torch.tensor(1.0)), "input has 1 to 8 dimensions"),
    "9 dimensions": (rms(input=torch.zeros([1] * 8 + [4])), "input has 1 to 8 dimensions"),
    "float64": (rms(input=torch.zeros(2, 4).double()), "input is float16 or bfloat16 or float32; found float64"),
    "weight's dtype": (rms(gamma=torch.zeros(4).half()), "gamma has input's dtype or float32"),
    "weight's shape": (rms(gamma=torch.zeros(2)), "gamma has the last dimensions of input; found (2,) for (2, 4)"),
    "weight of more dimensions": (rms(gamma=torch.zeros(1, 2, 4)), "gamma has the last dimensions of input"),
    "weight of no dimension": (rms(gamma=torch.tensor(1.0)), "gamma has the last dimensions of input"),
}


@pytest.mark.parametrize("rule", RMS_RULES)
def test_rms_norm_rules(rule: str) -> None:
    violates(ops.npu_rms_norm, *RMS_RULES[rule])


def test_gemma_weight_is_not_mixed() -> None:
    arguments = {"input": torch.zeros(2, 4).half(), "gamma": torch.zeros(4)}
    violates(ops.npu_gemma_rms_norm, arguments, "gamma has input's dtype; found torch.float32 for torch.float16")


def backward(**changes: Any) -> dict[str, Any]:
    x = torch.randn(2, 4)
    return {"dy": torch.randn(2, 4), "input": x, "gamma": torch.randn(4), "rstd": torch.ones(2, 1)} | changes


BACKWARD_RULES = {
    "1 dimension": (backward(input=torch.randn(4)), "input has 2 to 8 dimensions"),
    "weight's shape": (backward(gamma=torch.randn(2)), "gamma has the last dimensions of input"),
    "gradient's shape": (backward(dy=torch.randn(2, 2)), "dy has shape input.shape = (2, 4)"),
    "gradient's dtype": (backward(dy=torch.randn(2, 4).half()), "dy, input have one dtype"),
    "rstd's dtype": (backward(rstd=torch.ones(2, 1).half()), "rstd is float32"),
    "rstd's shape": (backward(rstd=torch.ones(2)), "rstd has shape [input's dimensions or 1] = (2, 1)"),
}


@pytest.mark.parametrize("rule", BACKWARD_RULES)
def test_rms_norm_backward_rules(rule: str) -> None:
    violates(ops.npu_rms_norm_backward, *BACKWARD_RULES[rule])


def add(**changes: Any) -> dict[str, Any]:
    return {"x1": torch.randn(2, 4), "x2": torch.randn(2, 4), "gamma": torch.randn(4)} | changes


ADD_RULES = {
    "dimensions": (add(x1=torch.tensor(1.0)), "x1 has 1 to 8 dimensions"),
    "integers": (add(x1=torch.ones(2, 4).int()), "x1 is float16 or bfloat16 or float32"),
    "weight mixed": (add(x1=torch.ones(2, 4).half(), x2=torch.ones(2, 4).half()), "gamma has x1's dtype; found"),
    "weight's shape": (add(gamma=torch.ones(2)), "gamma has the last dimensions of x1"),
    "x2's shape": (add(x2=torch.ones(4)), "x2 has shape x1.shape = (2, 4)"),
    "x2's dtype": (add(x2=torch.ones(2, 4).half()), "x1, x2, gamma have one dtype"),
    "epsilon": (add(epsilon=-1e-6), "epsilon is not negative; found -1e-06"),
}


@pytest.mark.parametrize("rule", ADD_RULES)
def test_add_rms_norm_rules(rule: str) -> None:
    for function in (ops.npu_add_rms_norm, ops.npu_add_rms_norm_v2, ops.npu_add_rms_norm_v2_functional):
        violates(function, *ADD_RULES[rule])
