"""Putting the simulator in the place of the Ascend runtime in a process that runs already."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from npu_prompt_cache.sim import environment, hook, machine

__all__ = ["activate"]

_SONAME = "libascendcl.so"


def activate(*, devices: int | None = None, hbm_gb: float | None = None, late_streams: int | None = None) -> None:
    """From here on ``import torch_npu`` finds the simulator, in this process and in those it starts.

    Call it before anything imports torch_npu. With a torch-npu in the environment ``import torch`` does so itself:
    call it before that too. Processes started later inherit it through the environment (``LD_LIBRARY_PATH``,
    ``PYTHONPATH`` and others of ``npu_prompt_cache/sim/environment.py``), ``spawn`` ed children of multiprocessing
    among them.

    Args:
        devices: simulated devices, 1 to 1024. None: as it is, at first 1.
        hbm_gb: GiB of HBM of each. None: as it is, at first 16.
        late_streams: seed of streams that run late, as :func:`npu_prompt_cache.sim.late_streams`. None: as it is.

    Raises:
        RuntimeError: torch_npu, or a libascendcl.so that is not ours, is loaded already.
        ValueError: a value is out of range.
        FileNotFoundError: the simulator is not built.

    Example:
        >>> from npu_prompt_cache import sim
        >>> sim.activate(devices=2)
        >>> import torch, torch_npu
        >>> torch.npu.device_count()
        2
    """
    wanted = environment.Machine(devices, hbm_gb, late_streams)
    folder = environment.library_folder()
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "torch_npu is imported already: call activate() before it, and before torch where torch imports it"
        )
    foreign = [path for path in _loaded(_SONAME) if path.parent != folder]
    if foreign:
        raise RuntimeError(f"{foreign[0]} is loaded already: one process has one Ascend runtime")
    inherited = environment.merged(os.environ, wanted)
    for name in set(os.environ) - set(inherited):
        del os.environ[name]
    os.environ.update(inherited)
    read_already = bool(_loaded(Path(machine.library_path()).name))
    # The shells, by their paths: whoever wants one of those names from now on gets it. They read the environment.
    for library in sorted(folder.glob("*.so")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if read_already:
        machine.configure(device_count=wanted.devices, hbm_bytes=wanted.hbm_bytes)
        if late_streams is not None:
            machine.late_streams(late_streams)
    hook.install()


def _loaded(name: str) -> list[Path]:
    """Files of that name, or of a version of it, which this process has loaded."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    return sorted(Path(file) for file in files if Path(file).name == name or Path(file).name.startswith(name + "."))
