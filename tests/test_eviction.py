"""The watermark, and which entries go: the least recently used ones, never a pinned one (P4)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from layouts import blocks_of, small_layout

import npu_prompt_cache as npc

BLOCK = 16
Prompt = tuple[int, ...]


def tiny_pool(make_cache, watermark_blocks: int) -> npc.PromptCache:
    """32 blocks, of which one is padding."""
    layout = small_layout(num_layers=1, num_kv_heads=64, head_dim=32)
    return make_cache(layout, pool_bytes=4 << 20, watermark_bytes=watermark_blocks * layout.block_bytes)


class Oracle:
    """The cache's bookkeeping by a dict and a list. An entry is named by all tokens from the root to its last."""

    def __init__(self, usable: int, watermark: int) -> None:
        self.usable, self.watermark = usable, watermark
        self.order: list[Prompt] = []  # unpinned entries, the next to be evicted first
        self.pinned: dict[Prompt, int] = {}

    def entries(self) -> list[Prompt]:
        return [*self.order, *self.pinned]

    def path(self, tokens: Prompt) -> list[Prompt]:
        """Full entries that hold the beginning of `tokens`."""
        entries, path = set(self.entries()), []
        while (step := tokens[: (len(path) + 1) * BLOCK]) in entries and len(step) == (len(path) + 1) * BLOCK:
            path.append(step)
        return path

    def tails(self, tokens: Prompt) -> tuple[list[Prompt], int]:
        """The entries that continue the path furthest, and how far the whole match goes."""
        start = len(self.path(tokens)) * BLOCK
        best: list[Prompt] = []
        longest = start
        for entry in self.entries():
            if not (start < len(entry) <= start + BLOCK and entry[:start] == tokens[:start]):
                continue
            common = start
            while common < min(len(entry), len(tokens)) and entry[common] == tokens[common]:
                common += 1
            if common > longest:
                best, longest = [], common
            if common == longest > start:
                best.append(entry)
        return best, longest

    def pin(self, entry: Prompt) -> None:
        if entry in self.pinned:
            self.pinned[entry] += 1
        else:
            if entry in self.order:
                self.order.remove(entry)
            self.pinned[entry] = 1

    def unpin(self, entry: Prompt) -> None:
        self.pinned[entry] -= 1
        if not self.pinned[entry]:
            del self.pinned[entry]
            self.order.append(entry)

    def make_room(self, blocks: int, leased: int = 0) -> None:
        while self.usable - len(self.entries()) - leased < blocks and self.order:
            self.order.pop(0)

    def drop_if_covered(self, entry: Prompt) -> None:
        start = (len(entry) - 1) // BLOCK * BLOCK
        siblings = (e for e in self.entries() if start < len(e) <= start + BLOCK and len(e) > len(entry))
        if entry in self.order and any(e[: len(entry)] == entry for e in siblings):
            self.order.remove(entry)

    def insert(self, tokens: Prompt, tail: Prompt | None, matched: int) -> None:
        """acquire, commit, release of one request that took `matched` tokens from the path and `tail`."""
        path = self.path(tokens[:matched])
        held = [tail] if tail else []
        for entry in path + held:
            self.pin(entry)
        own = -(-len(tokens) // BLOCK) - len(path)
        self.make_room(own)
        published = 0
        for stop in range((len(path) + 1) * BLOCK, len(tokens) + 1, BLOCK):
            published += tokens[:stop] not in self.entries()
            self.pin(tokens[:stop])
            path.append(tokens[:stop])
        if len(tokens) % BLOCK and self.tails(tokens)[1] < len(tokens):
            published += 1
            self.pin(tokens)
            held.append(tokens)
        self.make_room(self.watermark, own - published)
        for entry in held:
            self.unpin(entry)
            self.drop_if_covered(entry)
        for entry in reversed(path):
            self.unpin(entry)
        self.make_room(self.watermark)

    def touch(self, tokens: Prompt, tail: Prompt | None) -> None:
        for entry in ([tail] if tail else []) + self.path(tokens)[::-1]:
            self.order.remove(entry)
            self.order.append(entry)

    def copy(self) -> Oracle:
        other = Oracle(self.usable, self.watermark)
        other.order = list(self.order)
        return other


@pytest.mark.parametrize("watermark", [0, 5])
def test_10000_random_operations_evict_what_the_oracle_evicts(make_cache, watermark: int) -> None:
    cache = tiny_pool(make_cache, watermark)
    usable = cache.stats().pool_bytes // cache.layout.block_bytes
    oracle = Oracle(usable, watermark)
    rng = random.Random(watermark)
    prompts: list[Prompt] = [(1,)]
    evictions = 0
    for _ in range(10_000):
        old = rng.choice(prompts[-40:])
        prompt = (old[: rng.randrange(len(old) + 1)] + tuple(rng.randrange(50) for _ in range(rng.randrange(1, 40))))[
            :120
        ]
        is_lookup = rng.random() < 0.3
        limit = len(prompt) if is_lookup else len(prompt) - 1
        tails, matched = oracle.tails(prompt[:limit])
        if is_lookup:
            found = cache.lookup(prompt)
            assert (found.cached_tokens if found else 0) == matched
        else:
            with cache.acquire(prompt) as lease:
                assert lease.cached_tokens == matched
                lease.commit(prompt)
            prompts.append(prompt)
            assert cache.stats().free_bytes >= blocks_of(cache, watermark)
        # Where several entries continue the match equally far, any of them may be the one that is used.
        order = [tuple(entry) for entry in cache._core.eviction_order()]
        for tail in tails or [None]:
            guess = oracle.copy()
            guess.touch(prompt, tail) if is_lookup else guess.insert(prompt, tail, matched)
            if guess.order == order:
                break
        assert guess.order == order
        oracle = guess
        cache.check_integrity()
        evictions = cache.stats().evicted_blocks
    assert evictions > 2_000


def test_1_gib_pool_keeps_256_mib_free_while_3_gib_are_inserted(make_cache) -> None:
    layout = npc.KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, dtype=torch.float16)
    cache = make_cache(layout, pool_bytes=1 << 30, watermark_bytes=256 << 20)
    length = 1024
    kv = [(torch.ones(length, 8, 128, dtype=torch.float16),) * 2] * 4
    prompt_bytes = length * layout.token_bytes
    rounds = (3 << 30) // prompt_bytes
    kept: list[int] = []
    for first in range(rounds):
        prompt = np.arange(length) + first * length
        assert cache.insert(prompt, kv) == length
        assert cache.stats().free_bytes >= 256 << 20
        kept.append(first)
    assert rounds * prompt_bytes == 3 << 30
    assert cache.stats().evicted_blocks > 0
    present = [first for first in kept if cache.lookup(np.arange(length) + first * length) is not None]
    assert present == kept[-len(present) :]
    assert len(present) * prompt_bytes > 700 << 20


def test_a_pinned_entry_is_never_evicted(make_cache) -> None:
    cache = tiny_pool(make_cache, watermark_blocks=5)
    pinned = list(range(40))
    with cache.acquire(pinned) as lease:
        lease.commit(pinned)
    reader = cache.acquire([*pinned, 5])
    held = cache.key(0).view(-1, 64, 32)[torch.from_numpy(reader.slots(0, 40))].clone()
    for first in range(1000, 1400):
        with cache.acquire([first] * 100) as lease:
            slots = torch.from_numpy(lease.slots(lease.cached_tokens, 100))
            cache.key(0).view(-1, 64, 32)[slots] = 7.0
            lease.commit([first] * 100)
        assert cache.lookup(pinned).cached_tokens == 40
    now = cache.key(0).view(-1, 64, 32)[torch.from_numpy(reader.slots(0, 40))]
    assert torch.equal(held.view(torch.int16), now.view(torch.int16))
    reader.release()


def test_a_request_that_cannot_fit_evicts_nobody(make_cache) -> None:
    cache = tiny_pool(make_cache, watermark_blocks=2)
    for first in range(5):
        with cache.acquire([first] * 60) as lease:
            lease.commit([first] * 60)
    before = cache.stats()
    usable = before.pool_bytes // cache.layout.block_bytes
    with pytest.raises(npc.PoolExhausted, match=rf"{usable + 1} blocks .*free \d+ bytes.*could be evicted"):
        cache.acquire([9] * (usable * BLOCK + 1))
    with cache.acquire([9]) as lease, pytest.raises(npc.PoolExhausted, match="extending a request"):
        lease.extend(usable * BLOCK)
    after = cache.stats()
    assert (after.entries, after.evicted_blocks) == (before.entries, before.evicted_blocks)


def test_a_full_pool_of_leases_exhausts_and_recovers(make_cache) -> None:
    cache = tiny_pool(make_cache, watermark_blocks=2)
    leases = []
    with pytest.raises(npc.PoolExhausted):
        while True:
            leases.append(cache.acquire([len(leases)] * BLOCK))
    assert cache.stats().free_bytes == 0
    cache.check_integrity()
    for lease in leases:
        lease.release()
    with cache.acquire([1] * 100) as lease:
        lease.commit([1] * 100)
    assert cache.stats().free_bytes >= blocks_of(cache, 2)


def test_extending_evicts_where_it_must(make_cache) -> None:
    cache = tiny_pool(make_cache, watermark_blocks=0)
    usable = cache.stats().pool_bytes // cache.layout.block_bytes
    for first in range(usable):
        with cache.acquire([first] * BLOCK) as lease:
            lease.commit([first] * BLOCK)
    assert cache.stats().free_bytes == 0
    with cache.acquire([999]) as lease:
        lease.extend(5 * BLOCK)
        assert cache.lookup([0] * BLOCK) is None
        assert cache.lookup([usable - 1] * BLOCK) is not None
