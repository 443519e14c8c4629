"""References of torch_npu's own operators: plain torch functions over CPU tensors, by operator name.

A reference is written and tested with CPU tensors alone; nothing here needs torch_npu. Installation wraps each
one so that a program calling the operator on npu tensors runs it over CPU tensors that alias their memory.

Contract of a reference:

* its parameters are those of the operator's schema, by name; it is called by keyword with all of them, defaults
  filled in. Defaults of its own are for direct callers;
* tensors arrive on the CPU in the dtype given, None stays None, and ``ScalarType`` arguments are ``torch.dtype``;
* it returns what the schema says, on the CPU. For an argument the schema marks as written (``Tensor(a!)``) it
  writes into the tensor given, and where the schema returns that argument it returns that very tensor;
* it computes in float32 where the hardware accumulates in float32, then rounds to the documented dtype;
* it checks the documented rules by :func:`require` before it computes: what the device would answer with garbage
  is an error here.

A guard is for an operator whose own kernel stays, because it computes nothing: it sees the arguments first, on the
device, by keyword like a reference, and raises where the kernel may not run.
"""

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar

__all__ = ["RuleViolation", "guard", "guards", "reference", "references", "require"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAME = re.compile(r"(?:(?P<namespace>\w+)::)?(?P<operator>\w+)(?:\.(?P<overload>\w+))?")
_references: dict[str, Callable[..., Any]] = {}
_guards: dict[str, Callable[..., None]] = {}


class RuleViolation(RuntimeError):
    """A call that breaks a documented rule of a torch_npu operator: ``npu_x: <rule>; found <what was given>``."""


def require(condition: bool, op: str, rule: str, found: object) -> None:
    """Raises unless a documented rule holds.

    Args:
        condition: whether it does.
        op: the operator's name, such as ``npu_rms_norm``.
        rule: what its page documents, in our words, values and limits included.
        found: what was given instead.

    Raises:
        RuleViolation: ``condition`` is false.
    """
    if not condition:
        raise RuleViolation(f"{op}: {rule}; found {found}")


def reference(name: str) -> Callable[[_Function], _Function]:
    """Makes the decorated function the reference of one operator; it stays callable as it is.

    Args:
        name: ``operator`` or ``operator.overload``, in the ``npu`` namespace unless it says ``namespace::`` first.
            An ``.out`` overload needs none of its own: it is served by the reference of the overload without it.

    Raises:
        ValueError: the name is not of that form, or has a reference already.
    """
    return _registration(name, _references)


def guard(name: str) -> Callable[[_Function], _Function]:
    """Makes the decorated function the guard of one operator that torch_npu's own kernel serves.

    Args:
        name: as :func:`reference` takes it.

    Raises:
        ValueError: the name is not of that form, or is taken.
    """
    return _registration(name, _guards)


def references() -> MappingProxyType[str, Callable[..., Any]]:
    """Every reference by qualified name, such as ``npu::npu_rms_norm`` or ``npu::npu_x.v2``; a live view."""
    return MappingProxyType(_references)


def guards() -> MappingProxyType[str, Callable[..., None]]:
    """Every guard by qualified name; a live view."""
    return MappingProxyType(_guards)


def _registration(name: str, registered: dict[str, Callable[..., Any]]) -> Callable[[_Function], _Function]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not an operator's name: [namespace::]operator[.overload]")
    overload = f".{match['overload']}" if match["overload"] else ""
    qualified = f"{match['namespace'] or 'npu'}::{match['operator']}{overload}"

    def register(function: _Function) -> _Function:
        taken = _references.get(qualified, _guards.get(qualified))
        if taken is not None:
            raise ValueError(f"{qualified} has one already: {taken}")
        registered[qualified] = function
        return function

    return register
