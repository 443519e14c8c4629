"""Runs a test suite that uses torch_npu on the simulator: ``pytest -p npu_prompt_cache.sim.pytest_plugin``.

The plugin has to be named with ``-p``, on the command line or in ``addopts``: in a ``conftest.py`` it would come too
late. It activates the simulator before any conftest or test module is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_prompt_cache.sim import activate

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the simulated machine."""
    group = parser.getgroup("npu_prompt_cache", "the simulated Ascend runtime")
    group.addoption("--sim-devices", type=int, metavar="N", help="simulated devices (default: 1)")
    group.addoption("--sim-hbm-gb", type=float, metavar="GIB", help="GiB of HBM of each device (default: 16)")
    group.addoption(
        "--sim-late-streams", type=int, metavar="SEED", help="run asynchronous work late (default: at once)"
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Activates the simulator, before the first conftest."""
    import pytest

    options = early_config.known_args_namespace
    try:
        activate(devices=options.sim_devices, hbm_gb=options.sim_hbm_gb, late_streams=options.sim_late_streams)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        raise pytest.UsageError(f"{__name__}: {error}") from error
