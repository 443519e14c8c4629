"""The import hook that gives torch_npu its operators: they are installed when torch_npu has been imported.

Standard library only, and nothing is imported before torch_npu is: the hook is part of every Python program that
runs on the simulator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]

_MODULE = "torch_npu"
_NAME = "npu_prompt_cache simulator"


class _Finder:
    """Finds torch_npu where it is anyway, and adds to its import."""

    name = _NAME

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            _extend(spec)
        return spec


def _extend(spec: ModuleSpec) -> None:
    loader = spec.loader
    assert loader is not None
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # What torch_npu prints while it starts (that no CANN is installed) is not the program's output.
        with contextlib.redirect_stdout(sys.stderr):
            run(module)
        from npu_prompt_cache.sim import ops

        ops.install()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def install() -> None:
    """Installs the hook in this interpreter, once."""
    if all(getattr(finder, "name", None) != _NAME for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
