"""Random lives of leases that share blocks, beside a model of what each of them must read.

The K/V of a token is a stamp of all tokens up to it. So a lease that reads a row of another sequence, or a row that was
overwritten or given to somebody else, reads another stamp.
"""

from __future__ import annotations

import random
import threading
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from layouts import small_layout
from streams import Stream

import npu_prompt_cache as npc
from npu_prompt_cache import sim

BLOCK = 16
LAYOUT = small_layout(num_layers=1, num_kv_heads=64, head_dim=16, dtype=torch.float32)  # 31 blocks in 4 MiB


def stamps(tokens: list[int]) -> np.ndarray:
    """int32 ``[n]``: a number of each token that depends on all tokens before it too."""
    crc, out = 0, np.empty(len(tokens), np.uint32)
    for at, token in enumerate(tokens):
        out[at] = crc = zlib.crc32(token.to_bytes(4, "little"), crc)
    return out.view(np.int32)


@dataclass
class Live:
    """A lease, the tokens whose K/V it holds, and how many of them the cache has been told."""

    lease: npc.Lease
    text: list[int]
    known: int
    committed: int = 0


class Life:
    def __init__(self, cache: npc.PromptCache, seed: int) -> None:
        self.cache = cache
        self.rng = random.Random(seed)
        self.live: list[Live] = []
        self.prompts: list[list[int]] = [[1]]
        self.done: dict[str, int] = {}
        # First row of each token in both planes, as numbers.
        self.rows = [plane.view(-1, 64 * 16).view(torch.int32).numpy() for plane in (cache.key(0), cache.value(0))]

    def write(self, slots: np.ndarray, numbers: np.ndarray) -> None:
        self.rows[0][slots, 0] = numbers
        self.rows[1][slots, -1] = numbers

    def check_rows(self, slots: np.ndarray, numbers: np.ndarray) -> None:
        assert (self.rows[0][slots, 0] == numbers).all()
        assert (self.rows[1][slots, -1] == numbers).all()

    def new_prompt(self, most: int = 100) -> list[int]:
        rng = self.rng
        old = rng.choice(self.prompts[-12:] + [each.text for each in self.live if each.text] + [[1]])
        prompt = old[: rng.randrange(len(old) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        self.prompts.append(prompt[:most])
        return prompt[:most]

    def acquire(self) -> None:
        prompt = self.new_prompt()
        limit = self.rng.choice([None, self.rng.randrange(len(prompt) + 1)])
        lease = self.cache.acquire(prompt, limit=limit)
        start = lease.cached_tokens
        self.check_rows(lease.slots(0, start), stamps(prompt)[:start])
        self.write(lease.slots(start, len(prompt)), stamps(prompt)[start:])
        self.live.append(Live(lease, prompt, len(prompt)))

    def acquire_batch(self) -> None:
        rng = self.rng
        prompts = [self.new_prompt(60) for _ in range(rng.randrange(1, 6))]
        limits = [rng.choice([len(prompt), rng.randrange(len(prompt) + 1)]) for prompt in prompts]
        batch = self.cache._acquire_batch(self.cache._root(None), prompts, limits)
        if rng.random() < 0.1:  # the forward fails
            for lease in rng.sample(batch.leases, len(batch.leases)):
                lease.release()
            return
        new = []
        for lease, start, prompt, limit in zip(batch.leases, batch.starts, prompts, limits, strict=True):
            assert lease.cached_tokens <= start <= min(limit, len(prompt) - 1)
            new.append(stamps(prompt)[start:])
            self.check_rows(lease.slots(0, lease.cached_tokens), stamps(prompt)[: lease.cached_tokens])
            self.write(lease.slots(start, len(prompt)), new[-1])
        self.write(batch.copy_slots, np.concatenate(new)[batch.copy_sources])
        self.live += [Live(lease, prompt, len(prompt)) for lease, prompt in zip(batch.leases, prompts, strict=True)]

    def extend(self) -> None:
        each = self.rng.choice(self.live)
        more = [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 20))]
        each.lease.extend(len(more))
        each.text = [*each.text, *more]
        self.write(each.lease.slots(len(each.text) - len(more), len(each.text)), stamps(each.text)[-len(more) :])

    def fork(self) -> None:
        each = self.rng.choice(self.live)
        length = self.rng.choice([len(each.text), self.rng.randrange(len(each.text) + 1)])
        lease = each.lease.fork(length)
        assert lease.cached_tokens == min(each.lease.cached_tokens, length)
        self.live.append(Live(lease, each.text[:length], min(each.known, length), min(each.committed, length)))

    def truncate(self) -> None:
        each = self.rng.choice(self.live)
        length = self.rng.choice([self.rng.randrange(len(each.text) + 1), max(0, len(each.text) - 3)])
        each.lease.truncate(length)
        each.text = each.text[:length]
        each.known, each.committed = min(each.known, length), min(each.committed, length)

    def commit(self) -> None:
        each = self.rng.choice(self.live)
        least = max(each.committed, each.lease.cached_tokens, 1)
        if least > len(each.text):
            return
        count = self.rng.choice([len(each.text), self.rng.randrange(least, len(each.text) + 1)])
        if each.known and self.rng.random() < 0.2:
            at = self.rng.randrange(each.known)
            if at < count:
                with pytest.raises(ValueError, match="other tokens"):
                    each.lease.commit([*each.text[:at], 5, *each.text[at + 1 : count]])
        assert 0 <= each.lease.commit(each.text[:count]) <= count
        each.known, each.committed = max(each.known, count), count

    def release(self) -> None:
        self.live.pop(self.rng.randrange(len(self.live))).lease.release()

    def lookup(self) -> None:
        prompt = self.new_prompt()
        if match := self.cache.lookup(prompt):
            at = np.arange(match.cached_tokens)
            slots = match.block_table[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
            self.check_rows(slots, stamps(prompt)[: match.cached_tokens])

    def clear(self) -> None:
        self.cache.clear()

    def step(self) -> None:
        kinds = ["acquire", "acquire_batch", "lookup"] + ["clear"] * (self.rng.random() < 0.2)
        if self.live:
            kinds += ["extend", "fork", "fork", "truncate", "commit", "commit"]
            kinds += ["release"] * (3 if len(self.live) > 6 else 1)
        kind = self.rng.choice(kinds)
        try:
            getattr(self, kind)()
        except npc.PoolExhausted:
            kind = "exhausted"
        self.done[kind] = self.done.get(kind, 0) + 1

    def check(self) -> None:
        self.cache.check_integrity()
        for each in self.live:
            assert each.lease.length == len(each.text)
            self.check_rows(each.lease.slots(0, len(each.text)), stamps(each.text))
            if whole := each.committed // BLOCK * BLOCK:  # of what a lease committed, whole blocks are pinned
                assert self.cache.lookup(each.text[:whole]).cached_tokens == whole

    def end(self) -> None:
        self.rng.shuffle(self.live)
        while self.live:
            self.live.pop().lease.release()
            self.cache.check_integrity()
        stats = self.cache.stats()
        assert (stats.leases, stats.pinned_entries, stats.leased_bytes) == (0, 0, 0)
        self.cache.clear()
        assert self.cache.stats().free_bytes == stats.pool_bytes


@pytest.mark.parametrize("pool", [4 << 20, 12 << 20], ids=["scarce", "ample"])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives_read_what_they_wrote(make_cache, seed: int, pool: int) -> None:
    cache = make_cache(LAYOUT, pool_bytes=pool, watermark_bytes=0 if seed else None)
    life = Life(cache, seed)
    for _ in range(5000):
        life.step()
        life.check()
    assert min(life.done[kind] for kind in ("acquire", "acquire_batch", "fork", "truncate", "commit", "clear")) > 10
    if pool == 4 << 20:
        assert life.done["exhausted"] > 10
        assert cache.stats().evicted_blocks > 100
    life.end()


@pytest.mark.parametrize("seed", range(2))
def test_random_lives_while_copies_fail(make_cache, seed: int) -> None:
    cache = make_cache(LAYOUT, pool_bytes=6 << 20)
    life = Life(cache, seed)
    failed = 0
    for _ in range(1000):
        with sim.failing("aclrtMemcpyAsync", call=life.rng.randrange(1, 4)):
            try:
                life.step()
            except npc.AclError:
                failed += 1
        life.check()
    assert failed > 50
    life.end()


def test_threads_fork_truncate_and_release_each_others_leases(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=6 << 20)
    prompt = [5] * 40
    shared: list[npc.Lease] = [cache.acquire(prompt)]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(1500):
                try:
                    lease = shared[rng.randrange(len(shared))].fork(rng.randrange(41))
                    if rng.random() < 0.5:
                        lease.truncate(rng.randrange(lease.length + 1))
                    lease.extend(40 - lease.length)
                    if rng.random() < 0.5:
                        lease.commit(prompt)
                    old, shared[0] = shared[0], lease
                    old.release()
                    for row in cache._acquire_batch(cache._root(None), [[seed, *prompt], [seed, 7]], [40, 1]).leases:
                        row.release()
                    cache.check_integrity()
                except (npc.PoolExhausted, npc.LeaseReleased, ValueError):
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    shared.clear()
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.leases, stats.leased_bytes, stats.pinned_entries) == (0, 0, 0)


def test_truncated_blocks_wait_for_the_stream(make_cache, streams: list[Stream]) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20)
    with sim.late_streams(seed=1, within_calls=10_000), cache.acquire([1] * 64, stream=streams[0].handle) as lease:
        streams[0].copy(cache.value(0)[int(lease.block_table[0])], cache.key(0)[int(lease.block_table[3])])
        lease.truncate(20)
        assert cache.stats().fenced_bytes == 2 * LAYOUT.block_bytes
        streams[0].synchronize()
        cache.acquire([2]).release()
        assert cache.stats().fenced_bytes <= LAYOUT.block_bytes


@pytest.mark.parametrize("seed", range(6))
def test_random_forks_on_late_streams_read_what_was_written(make_cache, streams: list[Stream], seed: int) -> None:
    """Writes, reads and the cache's own copies are queued, and run late (P5)."""
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    outside = make_cache(LAYOUT, pool_bytes=4 << 20)  # device memory to copy from and to
    values, target = outside.key(0).view(-1, 64, 16), outside.value(0).view(-1, 64, 16)
    values[:20] = torch.arange(20.0)[:, None, None]
    pool = cache.key(0).view(-1, 64, 16)
    rng = random.Random(seed)
    live: list[tuple[npc.Lease, list[int], Stream]] = []

    def write(lease: npc.Lease, text: list[int], start: int, stream: Stream) -> None:
        for slot, token in zip(lease.slots(start, len(text)), text[start:], strict=True):
            stream.copy(pool[int(slot)], values[token])

    with sim.late_streams(seed=seed, within_calls=60):
        for _ in range(200):
            kind = rng.choice(["acquire", "fork", "truncate", "release", "release"] if live else ["acquire"])
            try:
                if kind == "acquire":
                    stream = rng.choice(streams)
                    text = [rng.randrange(2)] * rng.randrange(1, 40) + [rng.randrange(20)] * rng.randrange(1, 20)
                    lease = cache.acquire(text, stream=stream.handle)
                    write(lease, text, lease.cached_tokens, stream)
                    live.append((lease, text, stream))
                elif kind == "release":
                    lease, text, stream = live.pop(rng.randrange(len(live)))
                    if text and rng.random() < 0.7:
                        lease.commit(text)
                    lease.release()
                else:
                    at = rng.randrange(len(live))
                    lease, text, stream = live[at]
                    start = rng.randrange(len(text) + 1)
                    if kind == "fork":
                        lease = lease.fork(start)
                        live.append((lease, text[:start], stream))
                        at = len(live) - 1
                    else:
                        lease.truncate(start)
                        live[at] = (lease, text[:start], stream)
                    more = [rng.randrange(20) for _ in range(rng.randrange(1, 10))]
                    lease.extend(len(more))
                    live[at] = (lease, [*text[:start], *more], stream)
                    write(lease, live[at][1], start, stream)
            except npc.PoolExhausted:
                pass
            cache.check_integrity()
            if live and rng.random() < 0.5:
                lease, text, stream = rng.choice(live)
                for place, slot in enumerate(lease.slots(0, len(text))):
                    stream.copy(target[place], pool[int(slot)])
                stream.synchronize()
                assert target[: len(text), 0, 0].tolist() == text
        for lease, _, _ in live:
            lease.release()
        for stream in streams:
            stream.synchronize()
    assert cache.stats().copies["D2D"] > 0
