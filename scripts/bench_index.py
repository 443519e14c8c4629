"""Times the index on a full hit: ours beside transformers' own paged cache, in one run on one thread.

One request is: find the cached prefix, pin it, give it slots for the rest, and give everything back. Ours is
``acquire`` + ``release``; of transformers' ``PagedAttentionCache`` it is ``search_prefix_match``,
``can_store_request_tokens`` and ``free_blocks``. Both have blocks of 128 tokens, and the same tiny K/V geometry, so
that what is timed is bookkeeping. Rounds alternate; figures are medians, in microseconds.

    python scripts/bench_index.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

import npu_prompt_cache as npc

BLOCK = 128
TOKENS = (600, 8_192, 32_768)


def microseconds(request: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        request()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def ours(prompts: dict[int, list[int]]) -> dict[int, tuple[Callable[[], object], Callable[[], object]]]:
    layout = npc.KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float16, block_size=BLOCK)
    cache = npc.PromptCache(layout, pool_bytes=64 << 20)
    requests = {}
    for count, prompt in prompts.items():
        ids = np.array(prompt)
        with cache.acquire(ids) as lease:
            lease.commit(ids)
        with cache.acquire(ids) as lease:
            assert lease.cached_tokens == count - 1
        requests[count] = (
            lambda ids=ids: cache.acquire(ids).release(),
            lambda ids=prompt: cache.acquire(ids).release(),
        )
    return requests


def transformers_paged(prompts: dict[int, list[int]]) -> dict[int, Callable[[], object]]:
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16, hidden_size=16, vocab_size=100
    )
    config._attn_implementation = "sdpa"
    settings = ContinuousBatchingConfig(
        page_size=BLOCK, num_blocks=1024, max_batch_tokens=1_024, max_memory_percent=0.5
    )
    cache = PagedAttentionCache(config, settings, "cpu", DistributedHelper(None, None), torch.float16)
    requests = {}
    for count, prompt in prompts.items():
        state = RequestState(request_id=f"cold {count}", initial_tokens=prompt)
        complete = cache.count_new_complete_blocks(state, count)
        assert cache.can_store_request_tokens(state, count)
        cache.mark_complete_blocks(state, complete)
        cache.free_blocks(state.request_id)

        def request(count: int = count, prompt: list[int] = prompt) -> int:
            state = RequestState(request_id="hit", initial_tokens=prompt)
            found = cache.search_prefix_match("hit", prompt)
            state.position_offset = found
            cache.can_store_request_tokens(state, count - found)
            cache.free_blocks("hit")
            return found

        assert request() >= count - BLOCK
        requests[count] = request
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of (default 7)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    prompts = {count: rng.integers(0, 100_000, count).tolist() for count in TOKENS}
    mine, theirs = ours(prompts), transformers_paged(prompts)
    rows = []
    for count in TOKENS:
        repeats = max(20, 200_000 // count)
        calls = {"ours, array": mine[count][0], "ours, list": mine[count][1], "transformers, list": theirs[count]}
        rounds = {name: [] for name in calls}
        for _ in range(options.rounds):
            for name, call in calls.items():
                rounds[name].append(microseconds(call, repeats))
        rows.append({"tokens": count, **{name: statistics.median(times) for name, times in rounds.items()}})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'tokens':>8}  {'ours, array':>12}  {'ours, list':>12}  {'transformers':>12}  {'ratio':>7}   (µs, full hit)"
    )
    for row in rows:
        ratio = row["transformers, list"] / row["ours, array"]
        print(
            f"{row['tokens']:>8}  {row['ours, array']:>12.1f}  {row['ours, list']:>12.1f}  "
            f"{row['transformers, list']:>12.1f}  {ratio:>6.0f}x"
        )


if __name__ == "__main__":
    main()
