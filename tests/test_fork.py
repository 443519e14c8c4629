"""Forks, truncations, batches that share what they compute, and pins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from layouts import small_layout

import npu_prompt_cache as npc
from npu_prompt_cache import sim

BLOCK = 16
LAYOUT = small_layout(num_layers=1, num_kv_heads=64, head_dim=32)  # 31 blocks of 16 tokens in 4 MiB


def write(cache: npc.PromptCache, lease: npc.Lease, start: int, values: list[int]) -> None:
    """What a forward does: the K/V of tokens from `start` on. Here each token's K is the token itself."""
    flat = cache.key(0).view(-1, *cache.key(0).shape[2:])
    slots = torch.from_numpy(lease.slots(start, start + len(values)))
    flat[slots] = torch.tensor(values).to(flat.dtype)[:, None, None]


def read(cache: npc.PromptCache, lease: npc.Lease) -> list[int]:
    flat = cache.key(0).view(-1, *cache.key(0).shape[2:])
    return flat[torch.from_numpy(lease.slots(0, lease.length))][:, 0, 0].tolist()


def computed(cache: npc.PromptCache, tokens: list[int]) -> npc.Lease:
    lease = cache.acquire(tokens)
    write(cache, lease, lease.cached_tokens, tokens[lease.cached_tokens :])
    return lease


def in_blocks(cache: npc.PromptCache, field: str) -> int:
    return getattr(cache.stats(), field) // cache.layout.block_bytes


# ---- fork ----


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 39, 40])
def test_a_fork_shares_whole_blocks_and_copies_the_rest(make_cache, length: int, commit: bool) -> None:
    cache = make_cache()
    tokens = list(range(40))
    parent = computed(cache, tokens)
    if commit:
        parent.commit(tokens)
    fork = parent.fork(length)
    cache.check_integrity()
    whole = length // BLOCK
    assert fork.length == length
    assert fork.cached_tokens == 0
    assert fork.block_table[:whole].tolist() == parent.block_table[:whole].tolist()
    assert not set(fork.block_table[whole:].tolist()) & set(parent.block_table.tolist())
    assert read(cache, fork) == tokens[:length]
    row_bytes = cache.layout.token_bytes
    assert cache.stats().copy_bytes == {"H2H": 0, "H2D": 0, "D2H": 0, "D2D": length % BLOCK * row_bytes}
    parent.release()
    cache.check_integrity()
    assert read(cache, fork) == tokens[:length]
    fork.release()


def test_forks_go_on_independently(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(37))
    parent = computed(cache, prompt)
    beams = [parent.fork(37) for _ in range(4)]
    parent.release()
    texts = [list(prompt) for _ in beams]
    for step in range(40):
        for number, (beam, text) in enumerate(zip(beams, texts, strict=True)):
            beam.extend(1)
            token = 100 + 10 * step + number
            write(cache, beam, len(text), [token])
            text.append(token)
        cache.check_integrity()
    assert [read(cache, beam) for beam in beams] == texts
    assert in_blocks(cache, "leased_bytes") == 2 + 4 * (5 - 2)
    for beam, text in zip(beams, texts, strict=True):
        beam.commit(text)
        cache.check_integrity()
        beam.release()
    for text in texts:
        assert cache.lookup(text).cached_tokens == 77
    assert in_blocks(cache, "cached_bytes") == 2 + 4 * (5 - 2)


def test_a_block_that_one_of_many_publishes_is_everybodys(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(48))
    parent = computed(cache, tokens)
    fork, other = parent.fork(48), parent.fork(35)
    assert fork.commit(tokens[:20]) == 20  # a part of block 1, which all three share
    cache.check_integrity()
    assert parent.commit(tokens[:40]) == 20  # lengthens it
    assert other.commit(tokens[:35]) == 0
    cache.check_integrity()
    fork.release()
    cache.clear()
    cache.check_integrity()
    assert read(cache, parent) == tokens
    parent.release()
    cache.clear()
    assert read(cache, other) == tokens[:35]
    assert in_blocks(cache, "cached_bytes") == 2
    other.release()
    cache.clear()
    assert cache.stats().free_bytes == cache.stats().pool_bytes


def test_a_shared_block_outlives_any_of_its_leases(make_cache) -> None:
    tokens = list(range(32))
    for order in itertools.permutations(range(3)):
        cache = make_cache()
        leases = [computed(cache, tokens)]
        leases.append(leases[0].fork(32))
        leases.append(leases[1].fork(20))
        for number in order:
            leases[number].release()
            cache.check_integrity()
            other = cache.acquire([9] * 16)  # takes a block that is free
            write(cache, other, 0, [9] * 16)
            for lease in leases:
                if not lease.released:
                    assert read(cache, lease) == tokens[: lease.length]
            other.release()
        assert cache.stats().free_bytes == cache.stats().pool_bytes


def test_a_fork_knows_its_parents_tokens_and_no_more(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(40))
    parent = computed(cache, tokens)
    for length in (16, 20, 40):
        with parent.fork(length) as fork:
            with pytest.raises(ValueError, match=rf"token {length - 1} is 7, was {length - 1}"):
                fork.commit([*tokens[: length - 1], 7])
            fork.extend(5)
            fork.commit([*tokens[:length], 7, 7])
        cache.check_integrity()
    with parent.fork(20) as fork:
        parent.commit(tokens)
        fork.extend(20)
        assert fork.commit([*tokens[:20], *range(50, 70)]) == 20
    parent.release()


def test_leases_of_one_block_cannot_publish_it_with_different_tokens(make_cache) -> None:
    cache = make_cache()
    parent = computed(cache, [1])
    parent.extend(31)  # decoded tokens, which no lease knows until it commits
    fork = parent.fork(32)
    parent.commit([1] + [2] * 20)
    for wrong in ([1, 3], [1] + [2] * 19 + [3], [1] + [2] * 14 + [3] * 8):
        with pytest.raises(ValueError, match="other tokens than were acquired"):
            fork.commit(wrong)
    cache.check_integrity()
    assert fork.commit([1] + [2] * 22) == 2
    with pytest.raises(ValueError, match="token 21 is 4, was 2"):
        parent.commit([1] + [2] * 20 + [4])
    fork.release()
    parent.release()


def test_a_fork_that_commits_less_than_another_published(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(48))
    parent = computed(cache, tokens)
    fork = parent.fork(48)
    parent.commit(tokens)
    assert fork.commit(tokens[:20]) == 0
    with pytest.raises(ValueError, match="token 40 is 7, was 40"):
        fork.commit([*tokens[:40], 7])
    fork.extend(1)
    assert fork.commit([*tokens, 7]) == 1
    fork.release()
    parent.release()


def test_a_fork_pins_a_part_that_a_longer_entry_covers(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(32))
    parent, other = computed(cache, tokens), computed(cache, tokens)
    parent.commit(tokens[:5])  # a part of its first block is an entry
    other.commit(tokens)
    assert parent.commit(tokens) == 0  # goes on below the other's entry, but keeps its own block
    fork = parent.fork(32)
    parent.release()
    other.release()
    cache.clear()
    cache.check_integrity()
    assert read(cache, fork) == tokens
    fork.release()


def test_a_forks_cached_tokens(make_cache) -> None:
    cache = make_cache()
    computed(cache, list(range(24))).commit(list(range(24)))
    with cache.acquire(list(range(40))) as parent:
        assert parent.cached_tokens == 24
        for length, cached in ((10, 10), (24, 24), (40, 24)):
            with parent.fork(length) as fork:
                assert fork.cached_tokens == cached


def test_a_fork_without_room(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // LAYOUT.block_bytes
    lease = cache.acquire([1] * (usable * BLOCK))
    before = cache.stats()
    with pytest.raises(npc.PoolExhausted, match="a fork of 1 blocks"):
        lease.fork(20)
    assert cache.stats() == before
    lease.fork(32).release()  # needs none
    with pytest.raises(npc.PoolExhausted, match="a fork"), lease.fork(32) as other:
        other.truncate(32)
        other.fork(31)
    lease.release()


# ---- truncate ----


@pytest.mark.parametrize("commit", [0, 20, 40])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 25, 32, 39, 40])
def test_a_truncated_lease_writes_anew(make_cache, length: int, commit: int) -> None:
    cache = make_cache()
    tokens = list(range(40))
    lease = computed(cache, tokens)
    if commit:
        lease.commit(tokens[:commit])
    lease.truncate(length)
    cache.check_integrity()
    assert (lease.length, len(lease.block_table)) == (length, -(-length // BLOCK))
    assert read(cache, lease) == tokens[:length]
    lease.extend(30)
    write(cache, lease, length, [500] * 30)
    text = [*tokens[:length], *[500] * 30]
    lease.commit(text)
    cache.check_integrity()
    assert read(cache, lease) == text
    lease.release()
    # What was published before is as it was.
    if commit:
        with cache.acquire([*tokens[:commit], 7]) as reader:
            assert reader.cached_tokens == commit
            assert read(cache, reader)[:commit] == tokens[:commit]
    with cache.acquire([*text, 7]) as reader:
        assert read(cache, reader)[:-1] == text


def test_a_rejected_draft_costs_nothing(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(20))
    lease = computed(cache, tokens)
    lease.commit(tokens)
    for _ in range(10):
        lease.extend(5)
        write(cache, lease, len(tokens), [900] * 5)
        lease.truncate(len(tokens) + 2)
        write(cache, lease, len(tokens), [1, 2])
        tokens += [1, 2]
        assert lease.commit(tokens) == 2
        cache.check_integrity()
    assert read(cache, lease) == tokens
    assert cache.stats().copies["D2D"] == 0
    lease.release()
    assert cache.lookup(tokens).cached_tokens == 40


@pytest.mark.parametrize("length", [3, 16, 30, 40])
def test_truncating_below_what_was_cached(make_cache, length: int) -> None:
    cache = make_cache()
    tokens = list(range(40))
    computed(cache, tokens).commit(tokens)
    with cache.acquire([*tokens, 7]) as lease:
        assert lease.cached_tokens == 40
        lease.truncate(length)
        assert lease.cached_tokens == length
        lease.extend(20)
        write(cache, lease, length, [600] * 20)
        lease.commit([*tokens[:length], *[600] * 20])
        cache.check_integrity()
        assert read(cache, lease) == [*tokens[:length], *[600] * 20]
    with cache.acquire([*tokens, 7]) as lease:
        assert read(cache, lease)[:40] == tokens


def test_a_truncation_copies_a_shared_block_and_only_that(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(48))
    parent = computed(cache, tokens)
    fork = parent.fork(48)
    fork.truncate(20)
    rows = 4 * cache.layout.token_bytes
    assert cache.stats().copy_bytes["D2D"] == rows
    assert fork.block_table[0] == parent.block_table[0]
    write(cache, fork, 16, [7] * 4)
    assert read(cache, parent) == tokens
    parent.truncate(20)  # no longer shared
    parent.truncate(18)
    assert cache.stats().copy_bytes["D2D"] == rows
    assert in_blocks(cache, "leased_bytes") == 3
    parent.release()
    fork.release()


def test_what_was_truncated_is_known_no_more(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(40))
    lease = computed(cache, tokens)
    lease.commit(tokens)
    lease.truncate(20)
    with pytest.raises(ValueError, match="token 19 is 7, was 19"):
        lease.commit([*tokens[:19], 7])
    with pytest.raises(ValueError, match="commit of 19 tokens: at least 20"):
        lease.commit(tokens[:19])
    lease.extend(1)
    assert lease.commit([*tokens[:20], 7]) == 1
    lease.release()


def test_bad_lengths(make_cache) -> None:
    cache = make_cache()
    with cache.acquire([1, 2, 3]) as lease:
        for call, name in ((lease.fork, "fork"), (lease.truncate, "truncate")):
            for length in (-1, 4):
                with pytest.raises(ValueError, match=rf"{name}\({length}\): the lease has tokens \[0, 3\)"):
                    call(length)
    for call in (lease.fork, lease.truncate):
        with pytest.raises(npc.LeaseReleased):
            call(1)
    with cache.acquire([1]) as lease:
        cache.close()
        for call in (lease.fork, lease.truncate):
            with pytest.raises(npc.CacheClosed):
                call(1)


def test_a_truncation_without_room(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // LAYOUT.block_bytes
    tokens = [1] * (usable * BLOCK)
    with cache.acquire(tokens) as lease:
        lease.commit(tokens)
        before = cache.stats()
        with pytest.raises(npc.PoolExhausted, match="truncating a request of 1 blocks"):
            lease.truncate(20)
        assert cache.stats() == before
        assert lease.length == len(tokens)
        lease.truncate(32)


@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_copy_leaves_everything_as_it_was(make_cache, call: int) -> None:
    cache = make_cache()
    tokens = list(range(40))
    lease = computed(cache, tokens)
    lease.commit(tokens)
    before = cache.stats()
    table = lease.block_table.tolist()
    for act in (lease.fork, lease.truncate):
        with sim.failing("aclrtMemcpyAsync", call), pytest.raises(npc.AclError, match="aclrtMemcpyAsync"):
            act(20)
        cache.check_integrity()
        after = cache.stats()
        assert (after.leases, after.leased_bytes, after.cached_bytes) == (
            before.leases,
            before.leased_bytes,
            before.cached_bytes,
        )
        assert (lease.length, lease.cached_tokens, lease.block_table.tolist()) == (40, 0, table)
    assert lease.commit(tokens) == 0
    lease.truncate(20)
    lease.release()


# ---- batches ----


def acquire_batch(cache: npc.PromptCache, prompts: list[list[int]], limits: list[int] | None = None) -> npc.cache.Batch:
    return cache._acquire_batch(cache._root(None), prompts, limits or [len(prompt) - 1 for prompt in prompts])


def forward(cache: npc.PromptCache, prompts: list[list[int]], batch: npc.cache.Batch) -> int:
    """Computes what the batch says, and checks what every row then reads. Returns the tokens that were computed."""
    flat = cache.key(0).view(-1, *cache.key(0).shape[2:])
    rows = zip(batch.leases, batch.starts.tolist(), prompts, strict=True)
    slots = [lease.slots(start, len(prompt)) for lease, start, prompt in rows]
    new = [token for start, prompt in zip(batch.starts.tolist(), prompts, strict=True) for token in prompt[start:]]
    values = torch.tensor(new).to(flat.dtype)[:, None, None]
    assert batch.copy_slots.dtype == batch.copy_sources.dtype == np.int64
    all_slots = np.concatenate([*slots, batch.copy_slots])
    assert len(set(all_slots.tolist())) == len(all_slots)  # nothing is written twice
    flat[torch.from_numpy(all_slots)] = torch.cat([values, values[torch.from_numpy(batch.copy_sources)]])
    for lease, prompt in zip(batch.leases, prompts, strict=True):
        assert read(cache, lease) == prompt
    return len(new)


def finish(cache: npc.PromptCache, prompts: list[list[int]], batch: npc.cache.Batch) -> None:
    for lease, prompt in zip(batch.leases, prompts, strict=True):
        lease.commit(prompt)
        cache.check_integrity()
    for lease, prompt in zip(batch.leases, prompts, strict=True):
        lease.release()
        cache.check_integrity()
        assert cache.lookup(prompt).cached_tokens == len(prompt)


A = list(range(100, 150))

BATCHES = {
    "one prefix": ([[*A[:40], n] for n in range(8)], 41 + 7),
    "a chain": ([A[:20], A[:35], A[:50]], 50),
    "a chain of longer and longer prefixes": (
        [[*A[:10], 1], [*A[:23], 2], [*A[:47], 3], [*A[:47], 4]],
        11 + 14 + 25 + 1,
    ),
    "shrinking": ([A[:50], A[:35], A[:20], A[:3]], 50 + 1 + 1 + 1),
    "equal": ([A[:40]] * 3, 42),
    "equal, whole blocks": ([A[:32]] * 3, 34),
    "less than a block": ([[*A[:5], n] for n in range(4)], 6 + 3),
    "one token": ([[7], [7], [7, 8], [8]], 1 + 1 + 1 + 1),
    "nothing in common": ([[1] * 20, [2] * 20], 40),
    "two families": ([[*A[:40], 1], [*A[1:40], 1], [*A[:40], 2], [*A[1:40], 2]], 41 + 40 + 2),
    "64 rows": ([[*A[: 10 + n % 40], n] for n in range(64)], None),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_computes_a_prefix_once(make_cache, name: str) -> None:
    cache = make_cache()
    prompts, expected = BATCHES[name]
    batch = acquire_batch(cache, prompts)
    cache.check_integrity()
    count = forward(cache, prompts, batch)
    assert expected is None or count == expected
    stats = cache.stats()
    assert (stats.lookups, stats.hits, stats.hit_tokens) == (len(prompts), 0, 0)
    assert stats.lookup_tokens == sum(map(len, prompts))
    assert stats.computed_tokens == count
    assert stats.copies["D2D"] == 0
    assert [lease.cached_tokens for lease in batch.leases] == [0] * len(prompts)
    finish(cache, prompts, batch)


@pytest.mark.parametrize("cached", [3, 16, 20, 33, 49])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_over_a_warm_cache(make_cache, name: str, cached: int) -> None:
    cache = make_cache()
    computed(cache, A[:cached]).commit(A[:cached])
    prompts, _ = BATCHES[name]
    batch = acquire_batch(cache, prompts)
    forward(cache, prompts, batch)
    assert cache.stats().hit_tokens == sum(lease.cached_tokens for lease in batch.leases)
    finish(cache, prompts, batch)


def test_what_a_row_has_of_a_block_and_what_it_will_compute_of_it(make_cache) -> None:
    cache = make_cache()
    computed(cache, A[:20]).commit(A[:20])
    prompts = [[*A[:29], 1], [*A[:27], 2], [*A[:18], 3]]
    batch = acquire_batch(cache, prompts)
    # Row 1 takes 27 tokens of row 0: one block, 4 rows that row 0 has from the cache, 7 that it computes.
    assert batch.starts.tolist() == [20, 27, 18]
    assert batch.copy_sources.tolist() == list(range(7))
    assert batch.copy_slots.tolist() == batch.leases[1].slots(20, 27).tolist()
    assert cache.stats().copy_bytes["D2D"] == (4 + 4 + 2) * cache.layout.token_bytes
    forward(cache, prompts, batch)
    finish(cache, prompts, batch)


def test_limits_of_a_batch(make_cache) -> None:
    cache = make_cache()
    prompts = [[*A[:40], n] for n in range(4)]
    batch = acquire_batch(cache, prompts, [0, 0, 17, 1000])
    assert batch.starts.tolist() == [0, 0, 17, 40]
    forward(cache, prompts, batch)
    finish(cache, prompts, batch)
    batch = acquire_batch(cache, [[*A[:40], 9], [*A[:40], 9]], [0, 40])  # all of row 0 is wanted anew
    assert batch.starts.tolist() == [0, 40]
    for lease in batch.leases:
        lease.release()
    core, root = cache._core, cache._root(None)
    for rows, limits, text in (
        ([], [], "0 prompts"),
        ([[1]], [], "1 prompts with 0 limits"),
        ([[1]], [-1], "limit=-1"),
        ([[1], []], [0, 0], "empty"),
    ):
        with pytest.raises(ValueError, match=text):
            core.acquire_batch(root, rows, limits)


def test_a_batch_without_room_leases_nothing_and_evicts_nobody(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // LAYOUT.block_bytes
    computed(cache, [5] * 40).commit([5] * 40)
    before = cache.stats()
    prompts = [[n] * (BLOCK * (usable // 2)) for n in range(3)]
    with pytest.raises(npc.PoolExhausted, match="a batch of"):
        acquire_batch(cache, prompts)
    cache.check_integrity()
    assert cache.stats() == before
    shared = [[1] * (BLOCK * (usable - 4)) + [n] for n in range(4)]  # fits, because it shares
    batch = acquire_batch(cache, shared)
    forward(cache, shared, batch)
    finish(cache, shared, batch)


def test_a_part_that_is_in_the_way_of_a_batch_is_computed_again(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // LAYOUT.block_bytes
    prompt = list(range(usable * BLOCK - 8))
    computed(cache, prompt).commit(prompt)
    rows = [[*prompt, 7], [*prompt, 7]]
    with pytest.raises(npc.PoolExhausted):
        acquire_batch(cache, rows)
    batch = acquire_batch(cache, rows[:1])
    assert batch.starts.tolist() == [(usable - 1) * BLOCK]
    batch.leases[0].release()


@pytest.mark.parametrize("call", range(1, 7))
def test_a_batch_whose_copies_fail(make_cache, call: int) -> None:
    cache = make_cache()
    computed(cache, A[:20]).commit(A[:20])
    prompts = [[*A[:29], 1], [*A[:27], 2], [*A[:18], 3]]
    with sim.failing("aclrtMemcpyAsync", call), pytest.raises(npc.AclError):
        acquire_batch(cache, prompts)
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.leases, stats.pinned_entries, stats.leased_bytes) == (0, 0, 0)
    batch = acquire_batch(cache, prompts)
    forward(cache, prompts, batch)
    finish(cache, prompts, batch)


def test_a_batch_that_is_cancelled_leaves_nothing(make_cache) -> None:
    cache = make_cache()
    batch = acquire_batch(cache, [[*A[:40], n] for n in range(4)])
    for lease in batch.leases:
        lease.release()
        cache.check_integrity()
    assert cache.lookup(A) is None
    assert cache.stats().free_bytes == cache.stats().pool_bytes


# ---- pin ----


def test_a_pinned_prefix_is_not_evicted(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20)
    computed(cache, A[:40]).commit(A[:40])
    with cache.pin(A) as pin:
        assert pin.cached_tokens == 40
        assert cache.stats().leased_bytes == 0
        for first in range(1000, 1100):
            with cache.acquire([first] * 60) as lease:
                lease.commit([first] * 60)
        assert cache.stats().evicted_blocks > 0
        cache.clear()
        cache.check_integrity()
        assert cache.lookup(A).cached_tokens == 40
    cache.clear()
    assert cache.lookup(A) is None
    with pytest.raises(npc.LeaseReleased):
        pin.release()


def test_a_pin_of_nothing_and_of_a_salt(make_cache) -> None:
    cache = make_cache()
    with cache.acquire(A, "tenant") as lease:
        lease.commit(A)
    lookups = cache.stats().lookups
    with cache.pin(A) as nothing, cache.pin(A, "tenant") as pin:
        assert (nothing.cached_tokens, pin.cached_tokens) == (0, 50)
        assert cache.stats().leases == 2
    assert cache.stats().lookups == lookups
    dropped = cache.pin(A, "tenant")
    del dropped
    assert cache.stats().pinned_entries == 0
