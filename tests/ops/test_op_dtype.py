"""References of the dtype casts."""

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops import dtype as ops

CASTS = {
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    3: torch.int32,
    4: torch.int64,
    11: torch.bool,
    0: torch.uint8,
}


@pytest.mark.parametrize("number", CASTS)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.int32])
def test_casts_are_copies_with_torchs_rounding(number: int, source: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.75, 100.125, 3.0]).to(source)
    for y in (ops.npu_dtype_cast(x, number), ops._npu_dtype_cast(x, CASTS[number])):
        assert y.dtype == CASTS[number]
        assert torch.equal(y, x.to(CASTS[number]))
        assert y.data_ptr() != x.data_ptr()
    for back in (ops.npu_dtype_cast_backward(y, source), ops._npu_dtype_cast_backward(y, source)):
        assert torch.equal(back, y.to(source))


def test_numbers_are_those_of_torch() -> None:
    """torch spells a dtype as its number where a schema says int."""
    for number, dtype in ops._DTYPES.items():
        assert torch.ops.aten.to.prim_dtype(torch.zeros(1), number).dtype == dtype


def test_cast_in_place() -> None:
    x, src = torch.zeros(3, dtype=torch.int32), torch.tensor([1.9, -2.9, 3.0])
    assert ops.npu_dtype_cast_(x, src) is x
    assert x.tolist() == [1, -2, 3]
    same = torch.zeros(3)
    assert ops.npu_dtype_cast_(same, src) is same
    assert same.tolist() == [0, 0, 0]  # as torch_npu: of one dtype, nothing is done


def test_rules() -> None:
    violates(ops.npu_dtype_cast, {"input": torch.zeros(2), "dtype": 290}, "dtype is one of uint8, int8, int16")
    arguments = {"input": torch.zeros(2), "dtype": 5, "input_dtype": 3}
    violates(ops.npu_dtype_cast, arguments, "input_dtype is input's own dtype on A2/A3; found 3 for torch.float32")
    assert torch.equal(ops.npu_dtype_cast(torch.ones(2), 5, 6), torch.ones(2).half())
