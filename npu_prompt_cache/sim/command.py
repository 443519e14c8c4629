"""The command ``python -m npu_prompt_cache.sim``: run programs on the simulator, list the operators it serves."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

from npu_prompt_cache.sim import environment

__all__ = ["main"]

_PROGRAM = "python -m npu_prompt_cache.sim"
_TORCH_NPU = "2.13.0"
_NOT_FOUND = 127  # what a shell says of a command that is not there
_NOT_EXECUTABLE = 126
_LIST = "from npu_prompt_cache.sim.command import print_served; print_served()"


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv`, by default the process's own. Returns the exit status, or does not return."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="The simulated Ascend runtime: torch-npu programs on a machine that has no NPU.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_ops(commands)
    return parser


# ---- run ----


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="run a program on the simulator",
        usage=f"{_PROGRAM} run [--devices N] [--hbm-gb GIB] [--late-streams SEED] [--] CMD ...",
        description=(
            "Starts CMD so that torch_npu, in it and in every process it starts, finds the simulator as the Ascend "
            "runtime. Memory, copies, streams and events are simulated; operators are computed by torch on the CPU, "
            "and one that is not served raises an error that names it. The exit status is CMD's. CMD needs torch-npu "
            f"{_TORCH_NPU} on its path. A Python program started with -S, -I or -E sees no operators."
        ),
        epilog=f'example: {_PROGRAM} run --devices 2 -- python -c "import torch; print(torch.npu.device_count())"',
    )
    parser.add_argument("--devices", type=_checked("devices", int), metavar="N", help="simulated devices (default: 1)")
    parser.add_argument(
        "--hbm-gb", type=_checked("hbm_gb", float), metavar="GIB", help="GiB of HBM of each device (default: 16)"
    )
    parser.add_argument(
        "--late-streams",
        type=_checked("late_streams", int),
        metavar="SEED",
        help="run asynchronous work as late as a device may run it, at times chosen by SEED (default: at once)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="CMD", help="the program and its arguments")
    parser.set_defaults(command=_run, error=parser.error)


def _checked(name: str, kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argument type: a number that `environment.Machine` takes for its field `name`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
            environment.Machine(**{name: value})  # type: ignore[arg-type]
        except (ValueError, OverflowError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse


def _run(arguments: argparse.Namespace) -> int:
    program: list[str] = arguments.program
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        arguments.error("CMD is missing: what is to run?")
    variables = _environment(environment.Machine(arguments.devices, arguments.hbm_gb, arguments.late_streams))
    if variables is None:
        return 1
    sys.stdout.flush()
    try:
        os.execvpe(program[0], program, variables)
    except OSError as error:
        _complain(f"cannot run {program[0]!r}: {error.strerror}")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def _environment(machine: environment.Machine) -> dict[str, str] | None:
    """What the program inherits; None, and a complaint, where it could not run."""
    try:
        variables = environment.merged(os.environ, machine)
    except FileNotFoundError as error:
        _complain(str(error))
        return None
    if not _is_there("torch_npu"):
        _complain(
            f"no torch_npu on the path of {sys.executable}. Install it to a folder of its own (beside torch, it would "
            f"break `import torch` outside the simulator) and name that folder:\n"
            f"  pip install --no-deps --target DIR torch-npu=={_TORCH_NPU}\n"
            f"  PYTHONPATH=DIR {_PROGRAM} run -- ..."
        )
        return None
    return variables


def _is_there(module: str) -> bool:
    """Whether this interpreter finds a module, apart from the folder that it searches first for `python -m` alone."""
    own = [] if getattr(sys.flags, "safe_path", False) else sys.path[:1]  # flag since Python 3.11
    sys.path[: len(own)] = []
    try:
        return importlib.util.find_spec(module) is not None
    finally:
        sys.path[:0] = own


def _complain(text: str) -> None:
    print(f"{_PROGRAM}: error: {text}", file=sys.stderr)


# ---- ops ----


def _add_ops(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ops",
        help="list the operators that are served",
        description=(
            "Lists the operators that torch_npu registers for the NPU, and what computes each on the simulator: "
            "torch's own kernel for the CPU, a reference of ours, or nothing (calling it raises an error)."
        ),
        epilog=f"example: {_PROGRAM} ops | grep -v 'aten kernel'",
    )
    parser.set_defaults(command=_ops)


def _ops(arguments: argparse.Namespace) -> int:
    variables = _environment(environment.Machine())
    if variables is None:
        return 1
    done = subprocess.run([sys.executable, "-c", _LIST], env=variables, stdout=subprocess.PIPE, text=True, check=False)
    try:
        print(done.stdout, end="", flush=True)
    except BrokenPipeError:  # `ops | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return done.returncode


def print_served() -> None:
    """Prints the operators of this process, one a line; to be called on the simulator."""
    import torch_npu  # noqa: F401  (the list is of what it registers)

    from npu_prompt_cache.sim import ops

    served = ops.served()
    width = max(map(len, served), default=0)
    for name in sorted(served):
        print(f"{name:<{width}}  {served[name]}")
