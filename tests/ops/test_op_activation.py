"""References of the activations against float64 loops, and every documented rule broken once."""

import math
from typing import Any

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops import activation as ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-6}


def naive(x: torch.Tensor, dim: int) -> torch.Tensor:
    a, b = x.double().chunk(2, dim)
    flat = [v / (1 + math.exp(-v)) * w for v, w in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)]
    return torch.tensor(flat, dtype=torch.float64).view(a.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"), [((8,), -1), ((3, 8), 1), ((4, 3), 0), ((2, 6, 3), -2), ((1, 2, 1, 1, 1, 1, 1, 2), 7)]
)
def test_swiglu_and_its_backward(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = (torch.randn(shape) * 2).to(dtype)
    y = ops.npu_swiglu(x, dim)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), naive(x, dim), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    dy = torch.randn(y.shape).to(dtype)
    got = ops.npu_swiglu_backward(dy, x, dim)
    expected = torch.empty(shape, dtype=torch.float64)
    for i in range(x.numel()):
        ends = []
        for step in (1e-6, -1e-6):
            moved = x.double().clone()
            moved.view(-1)[i] += step
            ends.append((naive(moved, dim) * dy.double()).sum())
        expected.view(-1)[i] = (ends[0] - ends[1]) / 2e-6
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=max(1e-6, TOLERANCE[dtype]))


def swiglu(*shape: int, **changes: Any) -> dict[str, Any]:
    return {"input": torch.randn(shape or (2, 4))} | changes


SWIGLU_RULES = {
    "strides": ({"input": torch.randn(4, 4).t()[:2]}, "input is contiguous"),
    "empty": (swiglu(0, 4), "input is not empty"),
    "integers": ({"input": torch.ones(2, 4).int()}, "input is float16 or bfloat16 or float32"),
    "9 dimensions": (swiglu(*[1] * 8, 2), "input has 1 to 8 dimensions"),
    "dim": (swiglu(dim=2), "dim is in [-2, 2); found 2"),
    "negative dim": (swiglu(dim=-3), "dim is in [-2, 2); found -3"),
    "odd": (swiglu(2, 3), "the size of input along dim is even; found 3 of (2, 3) along -1"),
}


@pytest.mark.parametrize("rule", SWIGLU_RULES)
def test_swiglu_rules(rule: str) -> None:
    violates(ops.npu_swiglu, *SWIGLU_RULES[rule])


def test_swiglu_backward_rules() -> None:
    wrong = {"grad_output": torch.ones(2, 4), "input": torch.ones(2, 4)}
    violates(ops.npu_swiglu_backward, wrong, "grad_output has shape [input's dimensions, half along dim] = (2, 2)")
    wrong = {"grad_output": torch.ones(2, 2).half(), "input": torch.ones(2, 4)}
    violates(ops.npu_swiglu_backward, wrong, "grad_output, input have one dtype")
    wrong = {"grad_output": torch.ones(2, 1), "input": torch.ones(2, 3)}
    violates(ops.npu_swiglu_backward, wrong, "the size of input along dim is even")


def slope_of(function: Any, x: torch.Tensor) -> torch.Tensor:
    """The derivative of a function of one number, at each number, in float64."""
    return torch.tensor([(function(v + 1e-6) - function(v - 1e-6)) / 2e-6 for v in x.double().flatten().tolist()]).view(
        x.shape
    )


def silu(v: float) -> float:
    return v / (1 + math.exp(-v))


def quick_gelu(v: float) -> float:
    return v / (1 + math.exp(-1.702 * v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_gelu_and_its_backward(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(4, 5) * 3).to(dtype), torch.randn(4, 5).to(dtype)
    expected = torch.tensor([quick_gelu(v) for v in x.double().flatten().tolist()]).view(4, 5)
    for y in (ops.npu_fast_gelu(x), ops.fast_gelu(x)):
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    dx = ops.npu_fast_gelu_backward(dy, x)
    assert dx.dtype == dtype
    torch.testing.assert_close(dx.float(), dy.float() * slope_of(quick_gelu, x), rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_silu_and_its_backward(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(4, 5) * 3).to(dtype), torch.randn(4, 5).to(dtype)
    y = ops.npu_silu(x)
    expected = torch.tensor([silu(v) for v in x.double().flatten().tolist()]).view(4, 5)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    dx = ops.npu_silu_backward(dy, x, y)
    assert dx.dtype == dtype
    torch.testing.assert_close(dx.float(), dy.float() * slope_of(silu, x), rtol=TOLERANCE[dtype], atol=1e-5)
    assert ops.npu_silu_(x) is x
    assert torch.equal(x, y)


def test_rules_of_the_pointwise_activations() -> None:
    violates(ops.npu_fast_gelu, {"input": torch.ones(2).int()}, "input is float16 or bfloat16 or float32")
    violates(ops.npu_fast_gelu, {"input": torch.ones([1] * 9)}, "input has 0 to 8 dimensions")
    wrong = {"grad": torch.ones(3), "input": torch.ones(2)}
    violates(ops.npu_fast_gelu_backward, wrong, "grad has shape input.shape")
    wrong = {"grad": torch.ones(2).half(), "input": torch.ones(2)}
    violates(ops.npu_fast_gelu_backward, wrong, "grad, input have one dtype")
    for function in (ops.npu_silu, ops.npu_silu_):
        violates(function, {"input": torch.ones(2).bfloat16()}, "input is float16 or float32; found bfloat16")
    x = torch.ones(2)
    violates(ops.npu_silu_backward, {"grad_output": torch.ones(3), "x0": x, "x1": x}, "grad_output has shape x0.shape")
    violates(ops.npu_silu_backward, {"grad_output": x.half(), "x0": x, "x1": x}, "grad_output, x0, x1 have one dtype")
    b = x.bfloat16()
    violates(ops.npu_silu_backward, {"grad_output": b, "x0": b, "x1": b}, "x0 is float16 or float32")
