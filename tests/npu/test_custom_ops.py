"""torch_npu's own operators on npu tensors: the references behind them, and the wheel's signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from npu_prompt_cache.sim.ops.registry import RuleViolation, guards, references

EMPTY = inspect.Parameter.empty


def schema(name: str) -> torch._C.FunctionSchema:
    operator, _, overload = name.partition(".")
    return torch._C._get_schema(operator, overload)


@pytest.mark.parametrize("name", sorted({**references(), **guards()}))
def test_parameters_are_those_of_the_wheel(name: str) -> None:
    """Names, order, keyword-only and defaults; a function that takes any keyword is held to those it names."""
    wanted = [
        (a.name, a.kwarg_only, a.default_value if a.has_default_value() else EMPTY) for a in schema(name).arguments
    ]
    parameters = list(inspect.signature({**references(), **guards()}[name]).parameters.values())
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if takes_any:
        defaults = {argument: default for argument, _, default in wanted}
        assert {p.name: p.default for p in named}.items() <= defaults.items()
    else:
        assert [(p.name, p.kind is inspect.Parameter.KEYWORD_ONLY, p.default) for p in named] == wanted


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def cache(size: int) -> torch.Tensor:
    return half(6, 16, 1, size)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_tokens() -> dict[str, torch.Tensor]:
    return {"kv": half(2, 1, 3, 576), "gamma": half(512), "cos": half(2, 1, 3, 64), "sin": half(2, 1, 3, 64)}


Case = tuple[Callable[..., Any], dict[str, Any]]


def cases() -> dict[str, Case]:
    """An operator as programs call it, and arguments by its names."""
    kv = {"key": half(5, 1, 8), "value": half(5, 1, 16), "key_cache": cache(8), "value_cache": cache(16)}
    slots = int32(3, 95, 0, 17, 40)
    paged = {
        "key_cache": cache(8),
        "value_cache": cache(16),
        "block_table": int32(5, 1)[None],
        "context_lens": int32(20),
    }
    gathered = {
        "key_cache": paged["key_cache"],
        "value_cache": paged["value_cache"],
        "block_tables": paged["block_table"],
        "seq_lens": paged["context_lens"],
        "key": half(20, 1, 8),
        "value": half(20, 1, 16),
    }
    nd = {"input": half(4, 5, 6), "indices": torch.tensor([[0, 1], [3, 4]]), "updates": half(2, 6)}
    x = half(2, 3, 4, 64)
    rotary = {"input": x, "r1": half(1, 3, 1, 64), "r2": half(1, 3, 1, 64)}
    embedded = {"query": x, "key": half(2, 3, 1, 64), "cos": half(2, 3, 1, 64), "sin": half(2, 3, 1, 64)}
    latent = {
        **new_tokens(),
        "index": torch.tensor([3, 80, 95, 1, 0, 20]),
        "k_cache": cache(64),
        "ckv_cache": cache(512),
    }
    ops = torch.ops.npu
    return {
        "scatter_pa_kv_cache": (ops.npu_scatter_pa_kv_cache, {**kv, "slot_mapping": slots, "cache_mode": "Norm"}),
        "scatter_pa_kv_cache_functional": (
            ops.npu_scatter_pa_kv_cache_functional,
            {**kv, "slot_mapping": slots, "cache_mode": None},
        ),
        "reshape_and_cache": (torch.ops.atb._npu_reshape_and_cache, {**kv, "slot_indices": slots}),
        "reshape_and_cache_siso": (
            torch.ops.atb._npu_reshape_and_cache_siso,
            {"key": kv["key"], "key_cache": kv["key_cache"], "slot_indices": slots},
        ),
        "gather_pa_kv_cache": (ops.npu_gather_pa_kv_cache, gathered),
        "gather_pa_kv_cache_functional": (ops.npu_gather_pa_kv_cache_functional, gathered),
        "paged_cache_load": (torch.ops.atb.npu_paged_cache_load, paged),
        "paged_cache_load.out": (
            torch.ops.atb.npu_paged_cache_load,
            {**paged, "key": half(20, 1, 8), "value": half(20, 1, 16)},
        ),
        "scatter_nd_update": (ops.npu_scatter_nd_update, nd),
        "scatter_nd_update_": (ops.npu_scatter_nd_update_, nd),
        "rms_norm": (ops.npu_rms_norm, {"input": half(3, 8), "gamma": torch.randn(8)}),
        "gemma_rms_norm": (ops.npu_gemma_rms_norm, {"input": half(3, 8), "gamma": half(8)}),
        "add_rms_norm": (ops.npu_add_rms_norm, {"x1": half(3, 8), "x2": half(3, 8), "gamma": half(8)}),
        "add_rms_norm_v2": (ops.npu_add_rms_norm_v2, {"x1": half(3, 8), "x2": half(3, 8), "gamma": half(8)}),
        "rotary_mul": (ops.npu_rotary_mul, {**rotary, "rotary_mode": "interleave"}),
        "apply_rotary_pos_emb": (ops.npu_apply_rotary_pos_emb, embedded),
        "swiglu": (ops.npu_swiglu, {"input": x}),
        "fast_gelu": (ops.npu_fast_gelu, {"input": x}),
        "silu_": (ops.npu_silu_, {"input": x}),
        "kv_rmsnorm_rope_cache": (
            ops.npu_kv_rmsnorm_rope_cache,
            {**latent, "cache_mode": "PA_BNSD", "is_output_kv": True},
        ),
        "dtype_cast": (ops.npu_dtype_cast, {"input": x, "dtype": torch.bfloat16}),
        "moe_gating_top_k_softmax": (ops.npu_moe_gating_top_k_softmax, {"x": half(5, 8), "k": 3}),
        "prefetch": (ops.npu_prefetch, {"input": x, "dependency": None, "max_size": 64}),
    }


def reference_of(operator: Any, arguments: dict[str, Any]) -> Callable[..., Any]:
    name = operator._qualified_op_name
    out = f"{name}.out"
    return references()[out if name.startswith("atb::npu_paged") and "key" in arguments else name]


def results(returned: Any) -> list[torch.Tensor]:
    return [] if returned is None else list(returned) if isinstance(returned, (tuple, list)) else [returned]


@pytest.mark.parametrize("name", cases())
def test_an_operator_on_npu_does_what_its_reference_does(name: str) -> None:
    """The same results, and the same left in every argument."""
    operator, arguments = cases()[name]
    on_npu = {k: v.npu() if torch.is_tensor(v) else v for k, v in arguments.items()}
    on_cpu = {k: v.clone() if torch.is_tensor(v) else v for k, v in arguments.items()}
    if name == "dtype_cast":
        on_cpu["dtype"] = 15
    found = results(operator(**on_npu))
    expected = results(reference_of(operator, arguments)(**on_cpu))
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.is_npu
        assert torch.equal(got.cpu(), want)
    changed = []
    for key, value in on_cpu.items():
        if torch.is_tensor(value):
            assert torch.equal(on_npu[key].cpu(), value), key
            if not torch.equal(value, arguments[key]):
                changed.append(key)
                for got, want in zip(found, expected, strict=True):
                    if want is value:
                        assert got.data_ptr() == on_npu[key].data_ptr()
    written = {argument.name for argument in schema_of(operator, arguments).arguments if argument.is_write}
    unmarked = {"apply_rotary_pos_emb": {"query", "key"}, "kv_rmsnorm_rope_cache": {"k_cache", "ckv_cache"}}
    assert set(changed) == unmarked.get(name, written)


def schema_of(operator: Any, arguments: dict[str, Any]) -> torch._C.FunctionSchema:
    name = operator._qualified_op_name
    return schema(f"{name}.out" if name.startswith("atb::npu_paged") and "key" in arguments else name)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def rotated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * w + torch.cat((-b, a), -1) * w.square()


def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = (x * w).chunk(2, -1)
    return torch.nn.functional.silu(a) * b


GRADIENTS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "rms_norm": (lambda x, w: torch_npu.npu_rms_norm(x, w)[0], rms_norm),
    "rotary_mul": (
        lambda x, w: torch_npu.npu_rotary_mul(x[None, None], *(r.expand(1, 1, *x.shape) for r in (w, w.square())))[
            0, 0
        ],
        rotated,
    ),
    "swiglu": (lambda x, w: torch_npu.npu_swiglu(x * w), gated),
    "fast_gelu": (lambda x, w: torch_npu.npu_fast_gelu(x * w), lambda x, w: x * w * torch.sigmoid(1.702 * x * w)),
    "silu": (lambda x, w: torch_npu.npu_silu(x * w), lambda x, w: torch.nn.functional.silu(x * w)),
    "dtype_cast": (lambda x, w: torch_npu.npu_dtype_cast(x * w, torch.float64).float(), lambda x, w: x * w),
    "format_cast": (lambda x, w: torch_npu.npu_format_cast(x * w, 2), lambda x, w: x * w),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_formula(name: str) -> None:
    """torch_npu's own derivatives call the backward operators."""
    x, w = torch.randn(3, 8), torch.randn(8)
    found = []
    for function, device in zip(GRADIENTS[name], ("npu", "cpu"), strict=True):
        inputs = [t.to(device).requires_grad_() for t in (x, w)]
        y = function(*inputs)
        found.append([y.detach().cpu(), *(g.cpu() for g in torch.autograd.grad((y * y.detach().sin()).sum(), inputs))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_torch_npus_own_names_of_the_atb_operators() -> None:
    """They are looked up in a library of the wheel that loads only where libatb is found."""
    for name, function in (
        ("reshape_and_cache", torch_npu._npu_reshape_and_cache),
        ("reshape_and_cache_siso", torch_npu._npu_reshape_and_cache_siso),
        ("paged_cache_load", torch_npu.atb.npu_paged_cache_load),
    ):
        operator, arguments = cases()[name]
        found, expected = (
            [f(**on_npu), *on_npu.values()]
            for f, on_npu in ((f, {k: v.npu() for k, v in arguments.items()}) for f in (function, operator))
        )
        flat = [[t.cpu() for r in side for t in results(r)] for side in (found, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def test_a_broken_rule_raises_at_the_call() -> None:
    operator, arguments = cases()["scatter_pa_kv_cache"]
    on_npu = {k: v.npu() if torch.is_tensor(v) else v for k, v in arguments.items()}
    with pytest.raises(RuleViolation, match=r"slot_mapping is in \[0, num_blocks \* block_size = 96\); found 98"):
        operator(**on_npu | {"slot_mapping": on_npu["slot_mapping"] + 3})
    assert torch.equal(on_npu["key_cache"].cpu(), arguments["key_cache"])


def test_format_casts() -> None:
    x = torch.randn(2, 3, 4, 5).npu()
    before = x.cpu()
    formats = []
    for cast in (torch_npu.npu_format_cast, torch_npu.npu_format_cast_):
        for number in (2, 0):
            y = cast(x, number)
            formats.append(int(torch_npu.get_npu_format(y)))
            assert torch.equal(y.cpu(), before)
        with pytest.raises(RuleViolation, match=r"FRACTAL_NZ \(29\)"):
            cast(x, 29)
    assert formats == [2, 0, 2, 0]
    with pytest.raises(RuleViolation, match="src is a number"):
        torch_npu.npu_format_cast_(x, torch.zeros(2).npu())


def test_modules_move_to_the_device_in_plain_formats() -> None:
    """torch_npu casts weights to internal formats where its options say so; by default on Ascend910B they do not."""
    for module in (torch.nn.Linear(3, 4), torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(3)):
        assert module.to("npu").weight.is_npu
