"""The command ``npu-prompt-cache``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from npu_prompt_cache.config import DEVICE

#: Where ``--json`` without a file writes.
_STDOUT = "-"


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv`, by default the process's own. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npu-prompt-cache",
        description="A prompt (prefix) cache for LLM inference on Ascend NPUs.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    return parser


# ---- demo ----


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from npu_prompt_cache.demo import shop

    customers = len(shop.QUESTIONS)
    turns = min(len(questions) for questions in shop.QUESTIONS.values())
    parser = commands.add_parser(
        "demo",
        help="a support bot on a small model, with and without the cache, every figure checked",
        description=(
            "A bookshop's support bot talks to its customers. Every request runs twice, without and with the "
            "prompt cache, on SmolLM2-135M-Instruct: on the CPU over the simulated Ascend runtime, or on an NPU. "
            "Prints what was computed, what was cached and how long it took, and checks all of it; the exit status is "
            "0 only if every answer is the same and every figure is right."
        ),
        epilog="example: npu-prompt-cache demo --customers 2 --turns 3 --output out",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--customers", type=_integer(1, customers), default=customers, metavar="N", help=f"1 to {customers}"
    )
    parser.add_argument(
        "--turns",
        type=_integer(1, turns),
        default=turns,
        metavar="N",
        help=f"questions of each, 1 to {turns}",
    )
    parser.add_argument(
        "--new-tokens",
        type=_integer(1, 512),
        default=40,
        metavar="N",
        help="the most tokens of an answer, 1 to 512",
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        metavar="DEVICE",
        help="cpu, or npu:N with torch-npu; with no NPU under `python -m npu_prompt_cache.sim run --`",
    )
    parser.add_argument("--max-gb", type=_positive, default=1.0, metavar="GIB", help="size of the cache's pool in GiB")
    parser.add_argument(
        "--threads",
        type=_integer(1, 1024),
        default=argparse.SUPPRESS,
        metavar="N",
        help="threads that compute; 1 is steadier on a busy machine (default: what torch chooses)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        metavar="DIR",
        help="folder for the plot and the JSON",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write the figures as JSON to FILE too; without FILE to stdout, and nothing else there",
    )
    parser.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from npu_prompt_cache.demo import main as demo
    except ModuleNotFoundError as error:
        return _fail(f"the package {error.name} is missing: run `pip install 'npu-prompt-cache[demo]'`")
    from npu_prompt_cache.demo.errors import DemoError
    from npu_prompt_cache.demo.figures import Settings
    from npu_prompt_cache.errors import PromptCacheError

    json_file: str | None = getattr(arguments, "json", None)
    try:
        return demo.main(
            Settings(arguments.customers, arguments.turns, arguments.new_tokens, arguments.max_gb, arguments.device),
            threads=getattr(arguments, "threads", None),
            output=arguments.output,
            json_file=None if json_file in (None, _STDOUT) else Path(json_file or ""),
            json_to_stdout=json_file == _STDOUT,
        )
    except (DemoError, PromptCacheError, OSError) as error:
        return _fail(str(error))


# ---- small parts ----


def _fail(message: str) -> int:
    print(f"npu-prompt-cache: {message}", file=sys.stderr)
    return 1


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}")
        return value

    return parse


def _device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, npu or npu:N")
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
