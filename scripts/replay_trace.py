"""Replays a public trace of requests through the index, and prints what would have been hit.

A trace is a file of JSON lines with ``hash_ids`` (of the prompt's blocks of 512 tokens, each id standing for a block
and all before it) and ``input_length`` (tokens), as Mooncake's are. Each request is `acquire`, `commit` and `release`
of a real `PromptCache` with a block for each of the trace's; a capacity is what it holds after each request. A request
has one more token, which it never commits, so that all its blocks can be hit. A block is hit where all before it are.

Beside each policy stand two others. The plain list drops the block that was touched least recently; a request touches
its blocks from first to last. The optimum knows the future and drops what is used again last, of equals the ends of
prompts first; no cache of as many blocks hits more of them. (Each use of a block but its first is a hit if it was kept
since the one before. Of more such intervals than there is room for, dropping the one that ends last leaves the most.
And the blocks before one that is kept are kept too, since they are used again no later.)

    python scripts/replay_trace.py conversation_trace.jsonl
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

import npu_prompt_cache as npc
from npu_prompt_cache.config import ADMISSIONS, POLICIES

TRACE_BLOCK = 512  # tokens of a block of the trace
LAYOUT = npc.KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float16, block_size=16)
LAST_TOKEN = 2**31 - 1  # of every request; never committed


class Trace(NamedTuple):
    """Requests in the order of the file."""

    ids: list[list[int]]
    lengths: npt.NDArray[np.int64]  # tokens

    @property
    def blocks(self) -> int:
        """Of all requests together."""
        return sum(map(len, self.ids))

    @property
    def distinct(self) -> int:
        """Different blocks."""
        return len({block for ids in self.ids for block in ids})

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return max(map(len, self.ids))


def read(path: Path) -> Trace:
    """Raises ValueError where a line is no request."""
    ids, lengths = [], []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                request = json.loads(line)
                ids.append([int(block) for block in request["hash_ids"]])
                lengths.append(int(request["input_length"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: no request with hash_ids and input_length: {error!r}") from error
    if not ids:
        raise ValueError(f"{path}: no requests")
    return Trace(ids, np.array(lengths))


def progress(ids: list[list[int]], name: str) -> Iterator[list[int]]:
    return iter(tqdm(ids, desc=name, unit="request", delay=2, leave=False, disable=None))


def make_cache(capacity: int, longest: int, **options: str) -> npc.PromptCache:
    """A cache that holds `capacity` blocks when a request has been committed: its own last one comes on top."""
    pool_bytes = (capacity + longest + 3) * LAYOUT.block_bytes + (8 << 20)
    with npc.PromptCache(LAYOUT, pool_bytes=pool_bytes) as cache:
        usable_bytes = cache.stats().pool_bytes
    watermark_bytes = usable_bytes - (capacity + 1) * LAYOUT.block_bytes
    return npc.PromptCache(LAYOUT, pool_bytes=pool_bytes, watermark_bytes=watermark_bytes, **options)


def replay(trace: Trace, capacity: int, **options: str) -> tuple[list[int], float]:
    """Blocks hit by each request, and seconds that the index took."""
    numbers: dict[int, int] = {}  # token ids are small; the trace's may not be
    size = LAYOUT.block_size
    prompts = []
    for ids in trace.ids:
        tokens = np.repeat([numbers.setdefault(block, len(numbers)) for block in ids], size)
        prompts.append(np.append(tokens, LAST_TOKEN).astype(np.int32))
    hits = []
    with make_cache(capacity, trace.longest, **options) as cache:
        start = time.perf_counter()
        for prompt in progress(prompts, options["policy"]):  # type: ignore[arg-type]
            lease = cache.acquire(prompt)
            hits.append(lease.cached_tokens // size)
            lease.commit(prompt[:-1])
            lease.release()
        seconds = time.perf_counter() - start
        cache.check_integrity()
    return hits, seconds


def leading(ids: list[int], cached: Callable[[int], bool]) -> int:
    return next((n for n, block in enumerate(ids) if not cached(block)), len(ids))


def plain_list(trace: Trace, capacity: int) -> list[int]:
    """Blocks hit by each request in a list from which the least recently touched one goes."""
    touched: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ids in progress(trace.ids, "plain list"):
        hits.append(leading(ids, touched.__contains__))
        for block in ids:
            touched[block] = None
            touched.move_to_end(block)
        while len(touched) > capacity:
            touched.popitem(last=False)
    return hits


def optimum(trace: Trace, capacity: int) -> list[int]:
    """Blocks hit by each request if the future is known."""
    never = len(trace.ids)
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []  # of each block of each request, after it
    for at in range(len(trace.ids) - 1, -1, -1):
        next_uses.append([following.get(block, never) for block in trace.ids[at]])
        following.update(dict.fromkeys(trace.ids[at], at))
    next_uses.reverse()
    kept: dict[int, int] = {}  # by block: its next use
    farthest: list[tuple[int, int, int]] = []  # heap of what was kept, with entries that hold no more
    hits = []
    for ids, uses in zip(progress(trace.ids, "optimum"), next_uses, strict=True):
        hits.append(leading(ids, kept.__contains__))
        for place, (block, use) in enumerate(zip(ids, uses, strict=True)):
            kept[block] = use
            heapq.heappush(farthest, (-use, -place, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(farthest)
            if kept.get(block) == -use:
                del kept[block]
    return hits


def rates(trace: Trace, hits: list[int]) -> tuple[float, float]:
    """Percent of blocks and of tokens that were hit."""
    tokens = np.minimum(np.array(hits) * TRACE_BLOCK, trace.lengths).sum()
    return 100 * sum(hits) / trace.blocks, 100 * float(tokens) / float(trace.lengths.sum())


def compare(trace: Trace, capacity: int, policies: list[str], admission: str) -> None:
    name = "unlimited" if capacity >= trace.distinct else f"{capacity:,}"

    def row(policy: str, hits: list[int], seconds: float) -> None:
        blocks, tokens = rates(trace, hits)
        print(f"{name:>10}  {policy:<12} {blocks:>8.2f} {tokens:>8.2f}  {seconds:>8.2f}", flush=True)

    def timed(policy: str, run: Callable[[Trace, int], list[int]]) -> list[int]:
        start = time.perf_counter()
        hits = run(trace, capacity)
        row(policy, hits, time.perf_counter() - start)
        return hits

    found = {}
    for policy in policies:
        found[policy], seconds = replay(trace, capacity, policy=policy, admission=admission)
        row(policy, found[policy], seconds)
    plain = timed("plain list", plain_list)
    timed("optimum", optimum)
    if "lru" in found and admission == "all":
        pairs = list(zip(found["lru"], plain, strict=True))
        fewer, more = sum(ours < theirs for ours, theirs in pairs), sum(ours > theirs for ours, theirs in pairs)
        print(f"{'':>10}  lru hits more than the plain list in {more:,} requests, less in {fewer:,}")


def capacity_of(text: str) -> int:
    return 2**31 if text == "inf" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="file of JSON lines")
    parser.add_argument(
        "--capacity", nargs="+", type=capacity_of, default=[2**31, 30_000, 10_000, 1_000], help="blocks, or inf"
    )
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--admission", choices=ADMISSIONS, default="all")
    options = parser.parse_args()
    start = time.perf_counter()
    trace = read(options.trace)
    for capacity in options.capacity:
        if capacity < trace.longest:
            parser.error(f"a capacity of {capacity} blocks is below the {trace.longest} of the longest request")
    print(
        f"{len(trace.ids):,} requests, {trace.blocks:,} blocks, {trace.distinct:,} different ones, "
        f"{trace.lengths.sum():,} tokens"
    )
    print(f"{'capacity':>10}  {'policy':<12} {'blocks %':>8} {'tokens %':>8}  {'seconds':>8}")
    for capacity in options.capacity:
        compare(trace, min(capacity, trace.distinct), options.policy, options.admission)
    print(f"all in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
