"""Compute operators of the simulated device: what runs when a torch-npu program computes on ``npu``.

torch_npu itself is the real one; only the kernels behind its operators are replaced, by torch's CPU kernels and by
plain-torch references that enforce the documented rules. Nothing here loads torch_npu until :func:`install`.
"""

import importlib
import pkgutil

__all__ = ["install", "served"]


def install() -> None:
    """Replaces the kernels of torch_npu; called once in a process, right after torch_npu was imported."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)  # references register themselves
    importlib.import_module(f"{__name__}.aten").install()


def served() -> dict[str, str]:
    """Every operator that torch_npu registers, and what serves it.

    Returns:
        By qualified name (``aten::add.Tensor``): ``"aten kernel"`` (torch's own CPU kernel), ``"reference"`` (a
        function of this package), ``"kept"`` (torch_npu's own) or ``"not served"`` (it raises, naming the
        operator). Empty until :func:`install`.
    """
    found: dict[str, str] = importlib.import_module(f"{__name__}.aten").served()
    return found
