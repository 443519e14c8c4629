"""The environment of a program that runs on the simulator: what its processes inherit.

- ``LD_LIBRARY_PATH``: the folder of our libraries first, so that whoever wants CANN's finds ours
- ``PYTHONPATH``: first the folder whose ``sitecustomize`` installs the import hook
- ``NPU_PROMPT_CACHE_SIM=1``, for programs that want to know
- ``NPU_PROMPT_CACHE_SIM_*``, which the simulator reads when it is loaded (``csrc/sim/control.h``)
- not ``ASCEND_HOME_PATH`` and the like, by which torch_npu would load operators of a CANN that is installed
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ACTIVE", "SITE", "Machine", "library_folder", "merged"]

ACTIVE = "NPU_PROMPT_CACHE_SIM"
SITE = Path(__file__).resolve().parent / "site"

_MAX_DEVICES = 1024
_GIB = 1 << 30
_REAL_CANN = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH")


@dataclass(frozen=True)
class Machine:
    """What is asked of the simulated machine; None leaves what is."""

    devices: int | None = None
    """1 to 1024."""
    hbm_gb: float | None = None
    """GiB of HBM of each device, more than 0."""
    late_streams: int | None = None
    """Seed, 0 to 2**64 - 1: asynchronous work runs late, as ``sim.late_streams(seed)``."""

    def __post_init__(self) -> None:
        if self.devices is not None and not 1 <= self.devices <= _MAX_DEVICES:
            raise ValueError(f"devices={self.devices} is not in [1, {_MAX_DEVICES}]")
        if self.hbm_gb is not None and not 1 <= self.hbm_gb * _GIB < 1 << 64:
            raise ValueError(f"hbm_gb={self.hbm_gb} is not between one byte and 2**64 bytes")
        if self.late_streams is not None and not 0 <= self.late_streams < 1 << 64:
            raise ValueError(f"late_streams={self.late_streams} is not in [0, 2**64)")

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes of HBM of each device."""
        return None if self.hbm_gb is None else int(self.hbm_gb * _GIB)

    def variables(self) -> dict[str, str]:
        """The environment variables that ask for it."""
        wanted = {
            "NPU_PROMPT_CACHE_SIM_DEVICES": self.devices,
            "NPU_PROMPT_CACHE_SIM_HBM_BYTES": self.hbm_bytes,
            "NPU_PROMPT_CACHE_SIM_LATE_STREAMS": self.late_streams,
        }
        return {name: str(value) for name, value in wanted.items() if value is not None}


def library_folder() -> Path:
    """The folder of the simulator's libraries.

    Raises:
        FileNotFoundError: they are not built.
    """
    folder = Path(__file__).resolve().parent / "lib"
    if not folder.is_dir():
        raise FileNotFoundError(f"the simulator is not built: there is no {folder}; install npu_prompt_cache again")
    return folder


def merged(base: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """`base`, changed so that a program started with it runs on the simulator. Merging twice changes nothing more."""
    environment = {name: value for name, value in base.items() if name not in _REAL_CANN}
    environment.update(machine.variables())
    environment["LD_LIBRARY_PATH"] = _first(str(library_folder()), base.get("LD_LIBRARY_PATH", ""))
    environment["PYTHONPATH"] = _first(str(SITE), base.get("PYTHONPATH", ""))
    environment[ACTIVE] = "1"
    return environment


def _first(folder: str, path: str) -> str:
    entries = path.split(os.pathsep) if path else []  # an empty entry of a path is the current folder
    named = [entry or os.getcwd() for entry in entries]
    return os.pathsep.join([folder, *(entry for entry in named if entry != folder)])
