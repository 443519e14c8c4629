"""Tests that need torch_npu. They run on the simulator:

    PYTHONPATH=DIR python -m npu_prompt_cache.sim run -- pytest tests/npu

with DIR the folder that torch-npu was installed to; scripts/test.sh does so. Elsewhere they are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from npu_prompt_cache import sim

ON_SIMULATOR = bool(os.environ.get("NPU_PROMPT_CACHE_SIM"))
LATE_SEED = os.environ.get("NPU_PROMPT_CACHE_SIM_LATE_STREAMS")

collect_ignore_glob = [] if ON_SIMULATOR else ["test_*.py"]

# Tiny models gain nothing from threads, and threads that spin while they wait lose minutes on a busy machine.
torch.set_num_threads(1)

if ON_SIMULATOR and sim.configuration().device_count < 2:
    sim.configure(device_count=2)  # before torch_npu has counted them


def pytest_report_header() -> str | None:
    return None if ON_SIMULATOR else "tests/npu: left out, not on the simulator (see its conftest.py)"


def streams_as_asked() -> None:
    """Late with the seed of ``sim run --late-streams``, else prompt."""
    if LATE_SEED:
        sim.late_streams(int(LATE_SEED))
    else:
        sim.prompt_streams()


@pytest.fixture(autouse=True)
def _runtime_is_left_clean() -> Iterator[None]:
    """No fault and no violation is left. Memory is not compared: torch_npu's allocator keeps what it has."""
    sim.clear_faults()
    streams_as_asked()
    sim.clear_violations()
    yield
    sim.clear_faults()
    sim.prompt_streams()  # runs what is queued
    assert sim.violations() == []
    streams_as_asked()
