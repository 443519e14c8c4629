"""Guards of the format casts: only between formats that lie in memory as plain rows.

Such a cast moves nothing: torch_npu's own kernel notes the new format on the storage, where ``get_npu_format`` reads
it. So those kernels stay, behind a guard. Any other format (FRACTAL_NZ, NC1HWC0, NHWC, …) is an order of elements that
only device kernels know, and is refused. Source: the op-plugin pages of npu_format_cast and npu_format_cast_.
"""

import torch

from npu_prompt_cache.sim.ops.registry import guard, require

_PLAIN = {0: "NCHW", 2: "ND", 30: "NCDHW"}
_OTHERS = {
    -1: "UNDEFINED",
    1: "NHWC",
    3: "NC1HWC0",
    4: "FRACTAL_Z",
    12: "NC1HWC0_C04",
    16: "HWCN",
    27: "NDHWC",
    29: "FRACTAL_NZ",
    32: "NDC1HWC0",
    33: "FRACTAL_Z_3D",
    35: "NC",
    47: "NCL",
    50: "FRACTAL_NZ_C0_16",
    51: "FRACTAL_NZ_C0_32",
    52: "FRACTAL_NZ_C0_2",
    53: "FRACTAL_NZ_C0_4",
    54: "FRACTAL_NZ_C0_8",
}


@guard("_npu_format_cast")
def check_format_cast(input: torch.Tensor, acl_format: int) -> None:
    """Refuses a cast to a format that is not plain; ``npu_format_cast`` comes through here too.

    Args:
        input: the tensor to cast.
        acl_format: the number of the format, a ``torch_npu.Format``.
    """
    _require_plain("npu_format_cast", acl_format)


@guard("_npu_format_cast.aclnn")
def check_format_cast_customized(input: torch.Tensor, acl_format: int, customize_dtype: int) -> None:
    """As :func:`check_format_cast`; ``customize_dtype`` is about FRACTAL_NZ alone."""
    _require_plain("npu_format_cast", acl_format)


@guard("_npu_format_cast.input_dtype")
def check_format_cast_of_dtype(input: torch.Tensor, acl_format: int, customize_dtype: int, input_dtype: int) -> None:
    """As :func:`check_format_cast`; the dtypes are about FRACTAL_NZ alone."""
    _require_plain("npu_format_cast", acl_format)


@guard("npu_format_cast_.acl_format")
def check_format_cast_in_place(
    input: torch.Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> None:
    """As :func:`check_format_cast`, of the cast in place."""
    _require_plain("npu_format_cast_", acl_format)


@guard("npu_format_cast_")
def refuse_format_cast_like(
    input: torch.Tensor, src: torch.Tensor, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> None:
    """Refuses the cast in place to another tensor's format.

    The page says that only ``input``'s format changes; torch_npu 2.13's kernel copies ``src`` over it.
    """
    rule = (
        "src is a number: to a tensor's format, torch_npu would also copy that tensor over input; pass get_npu_format"
    )
    require(False, "npu_format_cast_", rule, "a tensor")


def _require_plain(op: str, acl_format: int) -> None:
    known = ", ".join(f"{name} ({number})" for number, name in _PLAIN.items())
    rule = f"acl_format is one of {known}: other orders of elements are not simulated"
    name = {**_PLAIN, **_OTHERS}.get(int(acl_format), "no format")
    require(acl_format in _PLAIN, op, rule, f"{name} ({int(acl_format)})")
