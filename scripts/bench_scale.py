"""The index alone at 1,000 and at 1,000,000 entries of 128 tokens: what a block costs, and whether that grows.

Compiles ``scripts/bench_scale.cpp`` with the C++ core (no Python, no device: the pool is virtual) and runs it at each
number of entries, with prompts of random tokens that share nothing. Figures are medians, in nanoseconds a block:

    acquire       full hits of random prompts of all that are cached
    acquire few   full hits among the prompts of 1,000 entries: what is left of the above once the processor's own
                  caches, that hold 1,000 entries and not 1,000,000, are taken out
    memcmp        of as many tokens, at random places in as much memory: the least that a hit can cost
    release       of the leases of full hits
    evict         an acquire of a new prompt in a full pool: evicts as many entries as the prompt has blocks
    commit        of that prompt

and the time to build the index, its resident bytes an entry besides the tokens, and the longest single call: by the
wall, and by the time of its own thread, which does not count while other programs run.

    python scripts/bench_scale.py
    python scripts/bench_scale.py --prompt-blocks 32 --calls 20000
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = ("acquire", "acquire_few", "memcmp", "release", "evict", "commit")
REST = ("build_s", "bytes_an_entry", "calls", "p9999_us", "own_p9999_us", "max_us", "own_max_us")


def build() -> Path:
    program = ROOT / "build" / "bench_scale"
    program.parent.mkdir(exist_ok=True)
    sources = [ROOT / "scripts" / "bench_scale.cpp", *sorted((ROOT / "csrc" / "cache").glob("*.cpp"))]
    options = ["-std=c++17", "-O3", "-pthread", f"-I{ROOT / 'csrc'}", "-o", str(program)]
    subprocess.run(["c++", *options, *map(str, sources)], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs=2, default=(1_000, 1_000_000), help="a few, and many")
    parser.add_argument("--prompt-blocks", type=int, default=250, help="blocks of 128 tokens in a prompt")
    parser.add_argument("--calls", type=int, default=4_000, help="of each kind")
    arguments = parser.parse_args()
    program = build()
    few, many = (
        json.loads(
            subprocess.run(
                [str(program), str(entries), str(arguments.prompt_blocks), str(arguments.calls)],
                check=True,
                capture_output=True,
            ).stdout
        )
        for entries in arguments.entries
    )
    print(f"prompts of {arguments.prompt_blocks} blocks; ns a block")
    print(f"{'entries':<16}{few['entries']:>12,}{many['entries']:>12,}{'ratio':>8}")
    for name in COSTS:
        before, after = few[f"{name}_ns"], many[f"{name}_ns"]
        print(f"{name.replace('_', ' '):<16}{before:>12.1f}{after:>12.1f}{after / before:>8.2f}")
    for name in REST:
        print(f"{name:<16}{few[name]:>12,}{many[name]:>12,}")


if __name__ == "__main__":
    main()
