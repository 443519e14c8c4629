"""Which operators of torch and torch_npu are served on the simulated device, and by what.

torch_npu registers its operators for the dispatch keys PrivateUse1 (compute) and AutogradPrivateUse1 (gradients).
Every one of them that computes is replaced, because its own kernels call a compiler and a library that the
simulator does not have:

* "kept": it only allocates, makes a view or reads one number, with calls of the runtime that the simulator serves;
* "aten kernel": torch's own CPU kernel, or composite, computes it over the same memory;
* "reference": a plain-torch function of this package does;
* "not served": calling it raises `NotServed`, which names it.

An operator that torch_npu leaves to the host by its own fallback still goes there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from npu_prompt_cache.sim.ops.copies import Copy
from npu_prompt_cache.sim.ops.kernels import Kernel, Parameters
from npu_prompt_cache.sim.ops.overrides import COMPUTE, DRAWING, filling_out
from npu_prompt_cache.sim.ops.registry import guards, references
from npu_prompt_cache.sim.ops.special_kernels import make_kernel

__all__ = ["KEPT", "NotServed", "install", "served"]

KEPT = {
    "aten::_copy_from_and_resize",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::_to_copy",
    "aten::as_strided",
    "aten::as_strided_",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::squeeze",
    "aten::squeeze.dim",
    "aten::unfold",
    "aten::unsqueeze",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
    "npu::copy_memory_",
    "npu::get_npu_format",
    "npu::get_storage_size",
    "npu::npu_change_data_ptr",
    "npu::npu_format_cast",
    "npu::npu_format_cast.Tensor",
    "npu::npu_reshape",
    "npu::npu_reshape.out",
    "npu::set_op_timeout_ms",
    "npu::super_kernel_scope_begin",
    "npu::super_kernel_scope_end",
}

# Composites that must see npu tensors, because some of their tensors may be on the host or change size.
_DECOMPOSED = {"aten::_foreach_copy_", "aten::resize_as_"}

# Served although torch_npu has no kernel of them: composites of torch call them on npu tensors.
_ADDED = {
    "aten::_thnn_fused_gru_cell_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}

# Composites that draw random numbers where this argument, by name, is not 0, and so must then see npu tensors: what
# they call draws from an npu generator. On CPU tensors they would draw from the CPU's.
_DROPPING = {
    "aten::gru.input": "dropout",
    "aten::lstm.data": "dropout",
    "aten::lstm.input": "dropout",
    "aten::scaled_dot_product_attention": "dropout_p",
}

_NAMESPACES = ("aten", "atb", "npu")  # torch_npu's collectives and the like are left as they are
_UPSTREAM_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)

_served: dict[str, str] = {}
_libraries: dict[str, torch.library.Library] = {}  # by namespace; a registration lives as long as its library


class NotServed(NotImplementedError):
    """The simulator has no implementation of an operator that a program called on the device."""


def served() -> dict[str, str]:
    """Every operator torch_npu registers, by qualified name, and what serves it: see the module.

    Empty until :func:`install`.
    """
    return dict(sorted(_served.items()))


def install() -> None:
    """Serves every operator that torch_npu registered; call it once, after torch_npu's import."""
    copies = Copy(torch.library.get_kernel("aten::copy_", "PrivateUse1"))
    for name in _operators("PrivateUse1"):
        kind, kernel = _choose(name)
        _served[name] = kind
        if kernel is not None and name in _DROPPING:
            _register(name, _dropping(name, kernel), "PrivateUse1", with_keys=True)
        elif kernel is not None:
            _register(name, kernel, "PrivateUse1")
    for name in _DECOMPOSED:
        _register(name, _upstream(name, "CPU"), "PrivateUse1", with_keys=True)
    _register("aten::copy_", copies.copy_, "PrivateUse1", with_keys=True)
    for name, guard in guards().items():
        _register(name, _guarded(name, guard), "PrivateUse1", with_keys=True)
    for name in _ADDED:
        _register(name, _kernel(name), "PrivateUse1")
    _install_gradients()


def _install_gradients() -> None:
    """Lets torch differentiate its own operators; torch_npu's gradients of ``npu::`` operators stay."""
    replaced = [name for name in _operators("AutogradPrivateUse1") if name.startswith("aten::")]
    composites = [name for name in _served if name.startswith("aten::") and _has(name, "CompositeImplicitAutograd")]
    for name in sorted({*replaced, *composites}):
        _register(name, _Differentiable(name), "AutogradPrivateUse1", with_keys=True)


def _operators(key: str) -> list[str]:
    """Names of operators with a kernel for a dispatch key; torch_npu also registers some that nobody defined."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return sorted(name for name in registered if name.split("::")[0] in _NAMESPACES and _is_defined(name))


def _is_defined(name: str) -> bool:
    try:
        _schema(name)
    except RuntimeError:
        return False
    return True


def _choose(name: str) -> tuple[str, Callable[..., Any] | None]:
    if name in KEPT or name in guards():
        return "kept", None
    compute = _reference(name)
    if compute is not None:
        return "reference", _kernel(name, compute)
    is_upstream = name.startswith("aten::") and any(_has(name, key) for key in _UPSTREAM_KEYS)
    if is_upstream or name in COMPUTE or name in DRAWING:
        return "aten kernel", _kernel(name)
    return "not served", _refusal(name)


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _schema(name: str) -> torch._C.FunctionSchema:
    operator, _, overload = name.partition(".")
    return torch._C._get_schema(operator, overload)


def _register(name: str, function: Callable[..., Any], key: str, with_keys: bool = False) -> None:
    namespace = name.split("::")[0]
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    _libraries[namespace].impl(name, function, key, with_keyset=with_keys)  # type: ignore[no-untyped-call]


def _kernel(name: str, compute: Callable[..., Any] | None = None) -> Kernel:
    operator, _, overload = name.partition(".")
    call, _, tags = torch._C._get_operation_overload(operator, overload)
    compute = compute or COMPUTE.get(name) or DRAWING.get(name) or call
    is_reference, draws = name in references(), name in DRAWING
    return make_kernel(name, _schema(name), compute, set(tags), fills_outs=is_reference, draws=draws)


def _upstream(name: str, key: str) -> Callable[..., Any]:
    return torch.library.get_kernel(name, key).call_boxed


def _decomposed(name: str, key: str) -> Callable[..., Any]:
    """The kernel of torch for a dispatch key of the CPU, on npu tensors."""
    if name == "aten::scaled_dot_product_attention":  # on npu tensors it would look for a kernel of the device
        return lambda keys, *args, **kwargs: _attention(*args, **kwargs)
    return _upstream(name, key)


def _dropping(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    decomposed, bind = _decomposed(name, "CPU"), Parameters(_schema(name))

    def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        is_empty = any(isinstance(argument, Tensor) and argument.numel() == 0 for argument in args)  # nothing to drop
        if bind(args, kwargs)[_DROPPING[name]] != 0 and not is_empty:
            return decomposed(keys, *args, **kwargs)
        return kernel(*args, **kwargs)

    return call


def _guarded(name: str, guard: Callable[..., None]) -> Callable[..., Any]:
    own, bind = _upstream(name, "PrivateUse1"), Parameters(_schema(name))

    def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        guard(**bind(args, kwargs))
        return own(keys, *args, **kwargs)

    return call


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotServed(
            f"npu_prompt_cache.sim: {name} is not served by the simulated device; run this part on the CPU, or serve "
            f"the operator yourself by torch.library.impl({name!r}, 'PrivateUse1')"
        )

    return refuse


def _reference(name: str) -> Callable[..., Any] | None:
    """What computes an operator by its reference, called as the dispatcher calls: without trailing defaults."""
    function = references().get(name)
    if function is not None:
        return _calling(function, _schema(name))
    base, _, overload = name.partition(".")
    if overload == "out" and base in references():
        return filling_out(_calling(references()[base], _schema(base)))
    return None


def _calling(function: Callable[..., Any], schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    """Calls a reference by keyword with every parameter, as code that runs outside any kernel."""
    bind = Parameters(schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), torch._C._ForceDispatchKeyGuard(*_PLAIN_KEYS):
            return function(**bind(args, kwargs))

    return call


_PLAIN_KEYS = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


class _Differentiable:
    """The AutogradPrivateUse1 kernel of an operator of torch.

    Where a gradient is wanted it does what the CPU's would, on npu tensors: composites decompose, others record
    torch's derivative. Where none is, a composite without side effects is computed at once, as on the CPU.
    """

    def __init__(self, name: str) -> None:
        self._with_gradient = _decomposed(name, "AutogradCPU")
        schema = _schema(name)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self._is_pure_composite = _has(name, "CompositeImplicitAutograd") and not writes
        self._compute = torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name).redispatch_boxed

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        wants_gradient = torch.is_grad_enabled() and _wants_gradient([*args, *kwargs.values()])
        wants_tangent = forward_ad._current_level >= 0
        if wants_gradient or wants_tangent or not self._is_pure_composite:
            return self._with_gradient(keys, *args, **kwargs)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._compute(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)


def _wants_gradient(arguments: list[Any]) -> bool:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                return True
        elif isinstance(argument, (list, tuple)) and _wants_gradient(list(argument)):
            return True
    return False


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` on npu tensors: by the operator that the CPU would choose."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    choice = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return torch._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return torch._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
