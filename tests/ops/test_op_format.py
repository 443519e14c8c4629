"""Guards of the format casts."""

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops import format as guards

CASTS = {
    "_npu_format_cast": (guards.check_format_cast, {}),
    "_npu_format_cast.aclnn": (guards.check_format_cast_customized, {"customize_dtype": 3}),
    "_npu_format_cast.input_dtype": (guards.check_format_cast_of_dtype, {"customize_dtype": 3, "input_dtype": 3}),
    "npu_format_cast_.acl_format": (guards.check_format_cast_in_place, {}),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("acl_format", [0, 2, 30])
def test_plain_formats_pass(cast: str, acl_format: int) -> None:
    guard, more = CASTS[cast]
    guard(torch.zeros(2), acl_format, **more)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("acl_format", "name"), [(29, "FRACTAL_NZ"), (3, "NC1HWC0"), (1, "NHWC"), (99, "no format")])
def test_other_formats_are_refused_by_name(cast: str, acl_format: int, name: str) -> None:
    guard, more = CASTS[cast]
    text = (
        f"acl_format is one of NCHW (0), ND (2), NCDHW (30): other orders of elements are not simulated; found {name}"
    )
    violates(guard, {"input": torch.zeros(2), "acl_format": acl_format, **more}, text)


def test_a_cast_in_place_like_a_tensor_is_refused() -> None:
    arguments = {"input": torch.zeros(2), "src": torch.zeros(2)}
    violates(guards.refuse_format_cast_like, arguments, "src is a number")
