"""Which entries go under each policy, who is admitted, and how much pins may hold.

The oracle below follows requests through a cache whose prompts are whole blocks, by a dict and sorted lists.
"""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest
import torch
from layouts import blocks_of, small_layout

import npu_prompt_cache as npc
from npu_prompt_cache import sim

BLOCK = 16
LAYOUT = small_layout(num_layers=1, num_kv_heads=64, head_dim=32)  # 31 blocks of 16 tokens in 4 MiB
Prompt = tuple[int, ...]  # of blocks: each number stands for 16 equal tokens


def tiny_pool(make_cache, **options: object) -> npc.PromptCache:
    return make_cache(LAYOUT, pool_bytes=4 << 20, **{"watermark_bytes": 0, **options})


def tokens(blocks: Prompt) -> list[int]:
    return [token for token in blocks for _ in range(BLOCK)]


def publish(cache: npc.PromptCache, blocks: Prompt, **options: object) -> int:
    """One request, which ends after its commit. Returns the tokens that it found."""
    with cache.acquire([*tokens(blocks), 999], **options) as lease:
        lease.commit(tokens(blocks))
        return lease.cached_tokens


def cached_blocks(cache: npc.PromptCache, blocks: Prompt) -> int:
    """Without being a use of them."""
    entries = {tuple(entry) for entry in cache._core.eviction_order()}
    return next((n for n in range(len(blocks)) if tuple(tokens(blocks[: n + 1])) not in entries), len(blocks))


@dataclasses.dataclass
class Entry:
    priority: int
    uses: int = 1
    generation: int = 0
    last: int = 0
    is_pinned: bool = True


@dataclasses.dataclass
class Request:
    lease: npc.Lease
    blocks: Prompt
    priority: int
    held: int  # leading blocks that it holds entries of
    own: int  # blocks that are not published


class Oracle:
    """An entry is named by the blocks from the root to its own."""

    def __init__(self, usable: int, lfu: bool) -> None:
        self.usable, self.lfu = usable, lfu
        self.entries: dict[Prompt, Entry] = {}
        self.oldest = [0] * 4
        self.clock = 0

    def order(self) -> list[Prompt]:
        key = lambda path: (self.entries[path].priority, self.entries[path].generation, self.entries[path].last)
        return sorted((path for path, entry in self.entries.items() if not entry.is_pinned), key=key)

    def link(self, path: Prompt) -> None:
        entry, self.clock = self.entries[path], self.clock + 1
        entry.is_pinned, entry.last = False, self.clock
        if self.lfu:
            entry.generation = max(
                entry.generation, self.oldest[entry.priority] + 2 * min(entry.uses, 255).bit_length() - 1
            )
        above = self.entries.get(path[:-1])
        if above is None or above.priority > entry.priority:
            return
        if above.priority < entry.priority:
            above.priority, above.generation = entry.priority, 0
        above.generation = max(above.generation, entry.generation)

    def use(self, path: Prompt, priority: int) -> None:
        entry = self.entries[path]
        entry.uses += 1
        if priority > entry.priority:
            entry.priority, entry.generation = priority, 0

    def make_room(self, blocks: int, leased: int) -> None:
        while self.usable - len(self.entries) - leased < blocks:
            victim = self.order()[0]
            gone = self.entries.pop(victim)
            self.oldest[gone.priority] = gone.generation
            assert not any(path[: len(victim)] == victim for path in self.entries), "it had a child"

    def found(self, blocks: Prompt) -> list[Prompt]:
        paths = [blocks[: n + 1] for n in range(len(blocks))]
        return paths[: next((n for n, path in enumerate(paths) if path not in self.entries), len(paths))]

    def begin(self, lease: npc.Lease, blocks: Prompt, priority: int, leased: int) -> Request:
        """`leased`: blocks of other requests that are not published."""
        found = self.found(blocks)
        for path in found:
            self.entries[path].is_pinned = True
        own = len(blocks) + 1 - len(found)
        self.make_room(own, leased)
        for path in found:
            self.use(path, priority)
        return Request(lease, blocks, priority, len(found), own)

    def commit(self, request: Request) -> None:
        for n in range(request.held, len(request.blocks)):
            path = request.blocks[: n + 1]
            if path in self.entries:
                self.entries[path].is_pinned = True
                self.use(path, request.priority)
            else:
                self.entries[path] = Entry(request.priority)
                request.own -= 1
        request.held = len(request.blocks)

    def end(self, request: Request, others: list[Request]) -> None:
        for n in range(request.held, 0, -1):
            path = request.blocks[:n]
            if not any(other.held >= n and other.blocks[:n] == path for other in others):
                self.link(path)

    def lookup(self, blocks: Prompt) -> None:
        for path in reversed(self.found(blocks)):
            self.use(path, 0)
            if not self.entries[path].is_pinned:
                self.link(path)


@pytest.mark.parametrize("priorities", [(1,), (0, 1, 1, 1, 2, 3)], ids=["one priority", "priorities"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_victims_are_the_oracles(make_cache, policy: str, priorities: tuple[int, ...]) -> None:
    cache = tiny_pool(make_cache, policy=policy)
    oracle = Oracle(31, policy == "lfu")
    rng = random.Random(1)
    running: list[Request] = []
    old: list[Prompt] = [(1,)]
    for _ in range(6_000):
        blocks = (*rng.choice(old[-30:])[: rng.randrange(5)], *(rng.randrange(60) for _ in range(rng.randrange(1, 4))))
        action, priority = rng.random(), rng.choice(priorities)
        one = rng.randrange(len(running)) if running else 0
        if action < 0.2:
            found = cache.lookup(tokens(blocks))
            assert (found.cached_tokens if found else 0) == len(oracle.found(blocks)) * BLOCK
            oracle.lookup(blocks)
        elif running and (action < 0.45 or len(running) == 3):
            ended = running.pop(one)
            ended.lease.release()
            oracle.end(ended, running)
        elif running and action < 0.7:
            for _ in range(2):  # a request that commits again is no second use
                running[one].lease.commit(tokens(running[one].blocks))
            oracle.commit(running[one])
        else:
            lease = cache.acquire([*tokens(blocks), 999], priority=priority)
            running.append(oracle.begin(lease, blocks, priority, leased=sum(other.own for other in running)))
            assert lease.cached_tokens == running[-1].held * BLOCK
            old.append(blocks)
        assert [tuple(entry) for entry in cache._core.eviction_order()] == [tuple(tokens(p)) for p in oracle.order()]
        assert cache.check_integrity()
    assert cache.stats().evicted_blocks > 500
    for request in running:
        request.lease.release()


def test_what_many_requests_used_outlives_a_scan_under_lfu_only(make_cache) -> None:
    kept = {}
    for policy in ("lru", "lfu"):
        cache = tiny_pool(make_cache, policy=policy)
        for _ in range(8):
            publish(cache, (1, 2, 3))
        for first in range(100, 160):
            publish(cache, (first,))
        kept[policy] = cached_blocks(cache, (1, 2, 3))
    assert kept == {"lru": 0, "lfu": 3}


def test_what_was_used_often_and_is_no_more_goes(make_cache) -> None:
    cache = tiny_pool(make_cache, policy="lfu")
    for _ in range(1_000):
        publish(cache, (1,))
    first = 100
    while cached_blocks(cache, (1,)):
        publish(cache, (first,))
        first += 1
    # It is 15 generations after the oldest, each of which is at most the pool's other blocks.
    assert 5 * 30 < first - 100 <= 15 * 30


def test_a_request_that_touches_twice_has_used_once(make_cache) -> None:
    cache = tiny_pool(make_cache, policy="lfu")
    publish(cache, (1,))
    with cache.acquire([*tokens((2,)), 999]) as lease:
        for _ in range(50):
            lease.commit(tokens((2,)))
        for _ in range(4):
            with lease.fork(BLOCK) as fork:
                fork.extend(BLOCK)
                fork.commit(tokens((2, 3)))
    publish(cache, (1,))  # twice used
    for first in range(100, 140):
        publish(cache, (first,))
    assert (cached_blocks(cache, (1,)), cached_blocks(cache, (2,))) == (1, 0)


def test_what_rows_of_a_batch_share_outlives_what_they_have_in_common_later(make_cache) -> None:
    """The first row publishes what the others use without having found it."""
    cache = tiny_pool(make_cache, policy="lfu")
    prompts = [[*tokens((1,)), first] for first in range(8)]
    batch = cache._acquire_batch(cache._root(None), prompts, [10**6] * 8)
    batch.leases[0].commit(prompts[0])
    for lease in batch.leases:
        lease.truncate(BLOCK)
        lease.extend(BLOCK)
        lease.commit(tokens((1, 2)))
        cache.check_integrity()
    for lease in batch.leases:
        lease.release()
        cache.check_integrity()
    publish(cache, (1, 3))
    assert cache.check_integrity()


def test_a_higher_priority_goes_when_no_lower_one_is_left(make_cache) -> None:
    cache = tiny_pool(make_cache)
    for priority in (3, 2, 0, 1):
        for n in range(5):
            publish(cache, (100 * priority + n,), priority=priority)
    order = [entry[0] for entry in cache._core.eviction_order()]
    assert order == [100 * priority + n for priority in range(4) for n in range(5)]
    for first in range(1000, 1100):
        publish(cache, (first,), priority=0)
    assert all(cached_blocks(cache, (100 * priority + n,)) for priority in (1, 2, 3) for n in range(5))
    with cache.acquire(tokens(tuple(range(31)))):
        assert cache._core.eviction_order() == []


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_beginning_of_an_important_prompt_is_as_important(make_cache, policy: str) -> None:
    cache = tiny_pool(make_cache, policy=policy)
    publish(cache, (1, 2), priority=0)
    publish(cache, (1, 2, 3), priority=3)
    publish(cache, (1, 4), priority=0)
    for first in range(100, 200):
        publish(cache, (first,))
        cache.check_integrity()
    assert (cached_blocks(cache, (1, 2, 3)), cached_blocks(cache, (1, 4))) == (3, 1)


def test_the_priority_around_a_request(make_cache) -> None:
    cache, other = tiny_pool(make_cache), tiny_pool(make_cache)
    with cache.prioritized(3):
        publish(cache, (1,))
        publish(other, (1,))
        with cache.prioritized(0), other.prioritized(2):
            publish(cache, (2,))
            publish(other, (2,))
        publish(cache, (3,), priority=1)
    publish(cache, (4,))
    publish(other, (4,))
    assert [entry[0] for entry in cache._core.eviction_order()] == [2, 3, 4, 1]
    assert [entry[0] for entry in other._core.eviction_order()] == [1, 4, 2]


def test_a_fork_has_the_priority_of_its_request(make_cache) -> None:
    cache = tiny_pool(make_cache)
    with cache.acquire(tokens((1,)), priority=3) as lease, lease.fork(BLOCK) as fork:
        fork.commit(tokens((1,)))
    publish(cache, (2,))
    assert [entry[0] for entry in cache._core.eviction_order()] == [2, 1]


def test_two_requests_for_one_cold_prompt_give_it_the_higher_priority(make_cache) -> None:
    cache = tiny_pool(make_cache)
    with cache.acquire(tokens((1,)), priority=0) as first, cache.acquire(tokens((1,)), priority=3) as second:
        first.commit(tokens((1,)))
        second.commit(tokens((1,)))
    publish(cache, (2,))
    assert [entry[0] for entry in cache._core.eviction_order()] == [2, 1]


@pytest.mark.parametrize(
    ("priority", "error"), [(-1, ValueError), (4, ValueError), (2**70, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_bad_priorities(make_cache, priority: object, error: type[Exception]) -> None:
    cache = tiny_pool(make_cache)
    for call in (lambda: cache.acquire([1], priority=priority), lambda: cache.prioritized(priority)):
        with pytest.raises(error, match="priority="):
            call()
    assert cache.stats().leases == 0
    with pytest.raises(ValueError, match=r"priority=4 is not in \[0, 3\]"):
        cache._core.acquire(b"", [1], priority=4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": "fifo"}, ValueError, "policy='fifo' is not one of 'lru', 'lfu'"),
        ({"admission": None}, ValueError, "admission=None is not one of 'all', 'second_sighting'"),
        ({"max_pinned_bytes": -1}, ValueError, "max_pinned_bytes=-1"),
        ({"max_pinned_bytes": (4 << 20) + 1}, ValueError, "max_pinned_bytes=4194305.*pool_bytes=4194304"),
        ({"max_pinned_bytes": 0.5}, TypeError, "max_pinned_bytes=0.5"),
    ],
)
def test_bad_options(make_cache, options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tiny_pool(make_cache, **options)


# ---- pins ----


def test_pins_hold_no_more_than_they_may_and_what_several_hold_counts_once(make_cache) -> None:
    cache = tiny_pool(make_cache, max_pinned_bytes=6 * LAYOUT.block_bytes + 5)
    for prompt in [(1, 2, 3), (1, 2, 4, 5), (6, 7)]:
        publish(cache, prompt)
    held = [cache.pin(tokens((1, 2, 3))), cache.pin(tokens((1, 2, 3))), cache.pin(tokens((1, 2, 4, 5)))]
    assert cache.stats().pinned_bytes == blocks_of(cache, 5)
    before = cache.stats()
    with pytest.raises(npc.PinLimitExceeded, match=f"a pin of {blocks_of(cache, 2)} bytes more: pins hold"):
        cache.pin(tokens((6, 7)))
    assert cache.stats() == before
    held.append(cache.pin(tokens((6, 8))))
    assert cache.stats().pinned_bytes == blocks_of(cache, 6)
    with cache.acquire([*tokens((6, 7)), 999]):  # a lease is no pin
        assert cache.stats().pinned_bytes == blocks_of(cache, 6)
        assert cache.check_integrity()
    for pinned, blocks in [(held.pop(0), 6), (held.pop(0), 5), (held.pop(0), 1), (held.pop(0), 0)]:
        pinned.release()
        assert cache.stats().pinned_bytes == blocks_of(cache, blocks)
        assert cache.check_integrity()


def test_half_of_the_pool_may_be_pinned_unless_said_otherwise(make_cache) -> None:
    cache = tiny_pool(make_cache)
    publish(cache, tuple(range(17)))
    with cache.pin(tokens(tuple(range(16)))), pytest.raises(npc.PinLimitExceeded):
        cache.pin(tokens(tuple(range(17))))


# ---- room (A8) ----


def test_10000_inserts_without_room_evict_nothing_and_ask_the_device_once_each(make_cache, streams) -> None:
    cache = tiny_pool(make_cache, max_pinned_bytes=4 << 20)
    publish(cache, tuple(range(20)))
    publish(cache, (50, 51))
    pin = cache.pin(tokens(tuple(range(20))))
    leases = [cache.acquire([999 + n]) for n in range(8)]
    with sim.late_streams(seed=1, within_calls=10**9):
        fenced = cache.acquire([7], stream=streams[0].handle)
        fenced.release()
        stats, order = cache.stats(), cache._core.eviction_order()
        assert (stats.fenced_bytes, stats.free_bytes) == (blocks_of(cache, 1), 0)
        calls = sim.counters().calls
        # Four blocks are wanted besides the first; one is fenced, and two could be evicted.
        prompt = [*tokens((0,)), *[1] * 5, *[2000] * (11 + 3 * BLOCK)]
        kv = [(torch.zeros(len(prompt), 64, 32, dtype=torch.float16),) * 2]
        for _ in range(10_000):
            with pytest.raises(npc.PoolExhausted):
                cache.insert(prompt, kv)
        after = sim.counters().calls
        asked = {name: after[name] - calls.get(name, 0) for name in after if after[name] != calls.get(name, 0)}
        assert asked.pop("aclrtQueryEventStatus") == 10_000
        assert "aclrtSynchronizeStream" not in asked
        assert (cache.stats(), cache._core.eviction_order()[:2]) == (stats, order[:2])
        # It recovers as soon as one fence has passed: the block that is wanted is the one behind it.
        later = cache.acquire([8], stream=streams[1].handle)
        later.release()
        streams[0].synchronize()
        cache.acquire([9]).release()
    assert cache.stats().evicted_blocks == stats.evicted_blocks
    for held in (pin, *leases):
        held.release()


# ---- admission ----


def admitting(make_cache, **options: object) -> npc.PromptCache:
    return tiny_pool(make_cache, admission="second_sighting", **options)


def test_prompts_that_do_not_repeat_publish_nothing(make_cache) -> None:
    cache = admitting(make_cache)
    for first in range(0, 3_000, 3):
        assert publish(cache, (first, first + 1, first + 2)) == 0
    assert (cache.stats().committed_blocks, cache.stats().evicted_blocks) == (0, 0)


def test_a_prompt_is_published_by_its_second_request_and_found_by_its_third(make_cache) -> None:
    cache = admitting(make_cache)
    prompt = [*tokens((1, 2)), 5, 6, 7]
    for published, found in [(0, 0), (35, 0), (0, 35)]:
        with cache.acquire([*prompt, 999]) as lease:
            assert lease.cached_tokens == found
            assert lease.commit(prompt) == published
            assert lease.commit(prompt) == 0
    assert cache.stats().evicted_blocks == 0


def test_what_two_prompts_begin_with_is_published_and_not_their_ends(make_cache) -> None:
    cache = admitting(make_cache)
    publish(cache, (1, 2, 3))
    publish(cache, (1, 2, 4))
    assert cache.stats().entries == 2
    assert publish(cache, (1, 2, 5)) == 2 * BLOCK
    assert publish(cache, (3,)) == 0  # sighted elsewhere only


def test_a_sighting_is_of_one_tenant(make_cache) -> None:
    cache = admitting(make_cache)
    for salt in ("a", "b", None):
        publish(cache, (1, 2), salt=salt)
    assert cache.stats().entries == 0
    publish(cache, (1, 2), salt="a")
    assert cache.stats().entries == 2


def test_a_request_that_commits_step_by_step_sights_once(make_cache) -> None:
    cache = make_cache(admission="second_sighting")  # of 8,191 blocks: all the parts are remembered
    text = list(range(100))
    for turn in range(2):
        with cache.acquire(text[:1]) as lease:
            for length in range(1, 101):
                lease.commit(text[:length])
                lease.commit(text[:length])
                lease.extend(1)
        assert cache.stats().committed_blocks == (0, 7)[turn]
        cache.check_integrity()


def test_forks_are_no_second_sighting_and_rows_of_a_batch_are(make_cache) -> None:
    cache = admitting(make_cache)
    with cache.acquire(tokens((1, 2, 3))) as lease:
        lease.commit(tokens((1, 2)))
        with lease.fork(2 * BLOCK) as fork:
            fork.commit(tokens((1, 2)))
        lease.truncate(BLOCK)
        lease.commit(tokens((1,)))
    assert cache.stats().committed_blocks == 0
    prompts = [[*tokens((5, 6)), 7], [*tokens((5, 6)), 8]]
    batch = cache._acquire_batch(cache._root(None), prompts, [10**6] * 2)
    for lease, prompt in zip(batch.leases, prompts, strict=True):
        lease.commit(prompt)
        cache.check_integrity()
    assert cache.stats().committed_blocks == 2
    for lease in batch.leases:
        lease.release()


def test_what_is_written_anew_is_what_was_sighted(make_cache) -> None:
    cache = admitting(make_cache)
    with cache.acquire(tokens((1, 2))) as lease:
        lease.commit(tokens((1, 2)))
        lease.truncate(BLOCK)
        lease.extend(BLOCK)
        lease.commit(tokens((1, 3)))
    publish(cache, (1, 3))
    assert cached_blocks(cache, (1, 3)) == 2


def test_20000_random_requests_find_only_what_was_published(make_cache) -> None:
    """An oracle that never forgets admits no less than the cache does, and nothing that is found was not admitted."""
    cache = admitting(make_cache)
    rng = random.Random(3)
    sighted: set[Prompt] = set()
    admitted: set[Prompt] = set()
    found = 0
    for _ in range(20_000):
        blocks = tuple(min(int(rng.expovariate(0.7)), 9) for _ in range(rng.randrange(1, 6)))
        paths = [blocks[: n + 1] for n in range(len(blocks))]
        hit = publish(cache, blocks) // BLOCK
        assert all(path in admitted for path in paths[:hit])
        found += hit
        admitted.update(path for path in paths if path in sighted)
        sighted.update(paths)
    assert found > 20_000
    assert cache.check_integrity()


@pytest.mark.parametrize("admission", ["all", "second_sighting"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_threads_with_priorities_and_pins(make_cache, policy: str, admission: str) -> None:
    cache = tiny_pool(make_cache, policy=policy, admission=admission, watermark_bytes=3 * LAYOUT.block_bytes)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(2_000):
                blocks = tuple(rng.randrange(4) for _ in range(rng.randrange(1, 4)))
                try:
                    publish(cache, blocks, priority=rng.randrange(4))
                    with cache.pin(tokens(blocks)):
                        cache.lookup(tokens(blocks))
                except (npc.PoolExhausted, npc.PinLimitExceeded):
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.check_integrity()
    assert cache.stats().pinned_bytes == 0
