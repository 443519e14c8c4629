"""Runs when a Python program starts under ``python -m npu_prompt_cache.sim run``; see ``npu_prompt_cache/sim/hook.py``.

Python imports one ``sitecustomize``, the first on its path: this one goes on to the one it hides.
"""

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_HERE = os.path.dirname(os.path.realpath(__file__))
_SIM = os.path.dirname(_HERE)


def _install_hook() -> None:
    # By its file: importing the package would cost every Python program that starts here.
    loader = SourceFileLoader("_npu_prompt_cache_sim_hook", os.path.join(_SIM, "hook.py"))
    hook = ModuleType(loader.name)
    loader.exec_module(hook)
    hook.install()
    if find_spec("npu_prompt_cache") is None:  # not installed for this interpreter
        sys.path.append(os.path.dirname(os.path.dirname(_SIM)))


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.realpath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_install_hook()
_run_hidden()
