"""The simulated Ascend runtime: running programs on it, and what a test may set on it and read from it.

The simulator is a shared library of our own with the C interface of ``libascendcl``, on host memory and
stricter than the real one. This module steers it; it loads no torch and touches no device. All of it is state
of the process: one simulated machine, whoever loaded the library. The contract of each call stands in
``csrc/sim/control.h``.

A torch-npu program runs on it by ``python -m npu_prompt_cache.sim run -- CMD``, by :func:`activate`, or by
``pytest -p npu_prompt_cache.sim.pytest_plugin``.

Units: sizes are bytes, counts are counts, devices are counted from 0.

Errors: a value the simulator refuses is a ``ValueError`` that says what was asked and what the limit is, and
changes nothing. In a process forked after the runtime was initialised everything raises ``RuntimeError``.
Without the built library, ``FileNotFoundError``.

Example:
    >>> from npu_prompt_cache import sim
    >>> sim.configure(hbm_bytes=1 << 30, device_count=2)
    >>> with sim.late_streams(seed=7), sim.failing("aclrtMalloc", call=3, error=207001):
    ...     run_the_program()
    >>> sim.counters().copy_bytes["D2H"]
    0
    >>> sim.violations()
    []
"""

from npu_prompt_cache.sim.activation import activate
from npu_prompt_cache.sim.machine import (
    Configuration,
    Counters,
    LateStreams,
    Memory,
    clear_faults,
    clear_violations,
    configuration,
    configure,
    counters,
    fail,
    failing,
    functions,
    late_streams,
    library_path,
    memory,
    prompt_streams,
    reset_counters,
    run_stream,
    violations,
)

__all__ = [
    "Configuration",
    "Counters",
    "LateStreams",
    "Memory",
    "activate",
    "clear_faults",
    "clear_violations",
    "configuration",
    "configure",
    "counters",
    "fail",
    "failing",
    "functions",
    "late_streams",
    "library_path",
    "memory",
    "prompt_streams",
    "reset_counters",
    "run_stream",
    "violations",
]
