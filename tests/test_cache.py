"""What a program sees: hits, leases, commits, namespaces. K/V bytes are written and read back for real."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layouts import small_layout

import npu_prompt_cache as npc

#: K and V of different sizes, as of latents; heads of each layer; both.
UNEVEN = [
    small_layout(num_kv_heads=1, head_dim=32, value_head_dim=8),
    small_layout(num_kv_heads=(1, 4), head_dim=(32, 8)),
    small_layout(num_layers=3, num_kv_heads=(2, 1, 4), head_dim=(8, 64, 16), value_head_dim=(16, 2, 4)),
]


def kv_of(tokens: list[int], layout: npc.KVLayout, position: int = 0, plane: int = 0) -> torch.Tensor:
    """A K (or V) that tells token and position: ``[n, heads, head_dim]``."""
    at = torch.arange(position, position + len(tokens)) * 0.001
    base = torch.tensor(tokens) % 1000 + at
    return base[:, None, None].expand(-1, *layout.plane_shape(plane)[1:]).to(layout.dtype).contiguous()


def compute(cache: npc.PromptCache, tokens: list[int], salt: str | None = None) -> int:
    """What a model does: compute the uncached tokens, write, commit. Checks what it would read. Returns computed."""
    with cache.acquire(tokens, salt) as lease:
        slots = torch.from_numpy(lease.slots(0, len(tokens)))
        done = lease.cached_tokens
        for layer in range(cache.layout.num_layers):
            for value, plane in enumerate((cache.key(layer), cache.value(layer))):
                flat = plane.view(-1, *plane.shape[2:])
                kv = kv_of(tokens, cache.layout, plane=2 * layer + value)
                assert torch.equal(flat[slots[:done]], kv[:done])
                flat[slots[done:]] = kv[done:]
        lease.commit(tokens)
    cache.check_integrity()
    return len(tokens) - done


def test_second_prompt_computes_only_what_is_new_at_block_size_128(make_cache) -> None:
    cache = make_cache(small_layout(128))
    shared, own = list(range(500)), list(range(1000, 1100))
    assert compute(cache, shared + own) == 600
    assert compute(cache, shared + list(range(2000, 2080))) == 80
    assert cache.stats().hit_tokens == 500


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("own", [1, 15, 16, 40])
def test_hits_are_token_granular(make_cache, shared: int, own: int) -> None:
    cache = make_cache()
    prefix = list(range(shared))
    compute(cache, prefix + [900] * own)
    assert compute(cache, prefix + [800] * own) == own


@pytest.mark.parametrize("layout", UNEVEN)
def test_layers_and_k_and_v_may_differ(make_cache, layout: npc.KVLayout) -> None:
    cache = make_cache(layout, pool_bytes=32 << 20)
    for layer in range(layout.num_layers):
        blocks = cache.key(layer).shape[0]
        assert tuple(cache.key(layer).shape) == (blocks, *layout.plane_shape(2 * layer))
        assert tuple(cache.value(layer).shape) == (blocks, *layout.plane_shape(2 * layer + 1))
    prefix = list(range(40))
    assert compute(cache, [*prefix, *range(900, 920)]) == 60
    assert compute(cache, [*prefix, *range(800, 805)]) == 5  # a block's rows are copied in every plane
    assert cache.stats().copy_bytes["D2D"] == 8 * layout.token_bytes
    held = list(range(500, 550))
    planes = [kv_of(held, layout, plane=plane) for plane in range(layout.num_planes)]
    assert cache.insert(held, list(zip(planes[::2], planes[1::2], strict=True))) == 50
    assert compute(cache, [*held, 1]) == 1
    match = cache.lookup(held)
    for plane in range(layout.num_planes):
        block_bytes = layout.plane_block_bytes[plane]
        assert match.offsets(plane).tolist() == [block * block_bytes for block in match.block_table.tolist()]


def test_layouts_of_the_same_planes_are_equal() -> None:
    plain = small_layout()
    same = small_layout(num_kv_heads=[2, 2], head_dim=(16, 16), value_head_dim=(16, 16))
    assert (same, hash(same), repr(same)) == (plain, hash(plain), repr(plain))
    assert small_layout(num_kv_heads=(2, 4)) != plain
    assert plain.plane_block_bytes == (1024,) * 4


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33])
def test_one_token_is_always_computed(make_cache, length: int) -> None:
    cache = make_cache()
    prompt = list(range(length))
    assert compute(cache, prompt) == length
    assert compute(cache, prompt) == 1
    assert cache.lookup(prompt).cached_tokens == length


def test_a_hit_copies_at_most_one_block_and_only_on_the_device(make_cache) -> None:
    cache = make_cache()
    compute(cache, list(range(40)))
    compute(cache, [*range(40), 7, 7])
    stats = cache.stats()
    row_bytes = cache.layout.token_bytes
    assert stats.copy_bytes == {"H2H": 0, "H2D": 0, "D2H": 0, "D2D": 8 * row_bytes}
    compute(cache, [*range(32), 5])  # ends at a block's end: nothing to copy
    assert cache.stats().copy_bytes == stats.copy_bytes


def test_published_bytes_never_change(make_cache) -> None:
    cache = make_cache()
    compute(cache, list(range(40)))
    table = cache.lookup(list(range(40))).block_table
    before = cache.key(1)[torch.from_numpy(table).long()].clone()
    compute(cache, [*range(36), *range(500, 560)])
    compute(cache, [*range(40), *range(600, 660)])
    after = cache.key(1)[torch.from_numpy(table).long()]
    slots = torch.arange(40)
    flat = lambda t: t.reshape(-1, *t.shape[2:])[slots]
    assert torch.equal(flat(before).view(torch.int16), flat(after).view(torch.int16))


def test_growing_conversation_keeps_one_copy_of_each_token(make_cache) -> None:
    cache = make_cache()
    prompt = [3]
    for turn in range(40):
        compute(cache, prompt)
        prompt = prompt + [turn] * 5
    cached = cache.stats().cached_bytes // cache.layout.block_bytes
    assert cached == -(-(len(prompt) - 5) // 16)


def test_commit_may_grow_within_a_lease(make_cache) -> None:
    cache = make_cache()
    tokens = list(range(20))
    with cache.acquire(tokens) as lease:
        assert lease.commit(tokens) == 20
        for token in range(100, 140):
            lease.extend(1)
            tokens.append(token)
            assert lease.commit(tokens) == 1
            assert cache.lookup([*tokens, 5]).cached_tokens == len(tokens)
            cache.check_integrity()
        assert lease.commit(tokens) == 0
    assert cache.stats().entries == 4


def test_an_entry_that_grows_past_its_siblings_is_still_found(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(20))
    first = cache.acquire(prompt)
    first.commit(prompt)
    for token in (40, 60, 80):  # siblings of the part that the first request published
        longer = [*prompt, token, token]
        with cache.acquire(longer) as lease:
            assert lease.cached_tokens == 20
            lease.commit(longer)
    for token in (70, 90):
        first.extend(1)
        prompt = [*prompt, token]
        first.commit(prompt)
        cache.check_integrity()
        assert cache.lookup([*prompt, 5]).cached_tokens == len(prompt)
    for token in (40, 60, 80):
        assert cache.lookup([*prompt[:20], token, token]).cached_tokens == 22
    first.release()


def test_two_requests_for_one_cold_prompt_leave_one_entry(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(40))
    first, second = cache.acquire(prompt), cache.acquire(prompt)
    assert first.commit(prompt) == 40
    assert second.commit(prompt) == 0
    cache.check_integrity()
    second.extend(10)
    longer = prompt + list(range(70, 80))
    assert second.commit(longer) == 10
    first.extend(20)
    assert first.commit([*longer, *range(10)]) == 10  # the first 10 are there, from the other lease
    cache.check_integrity()
    first.release()
    second.release()
    assert cache.lookup([*longer, *range(10)]).cached_tokens == 60


def test_uncommitted_work_is_lost(make_cache) -> None:
    cache = make_cache()
    lease = cache.acquire(list(range(40)))
    assert cache.stats().leased_bytes == 3 * cache.layout.block_bytes
    lease.release()
    assert cache.lookup(list(range(40))) is None
    assert cache.stats().free_bytes == cache.stats().pool_bytes


def test_an_error_inside_the_lease_publishes_nothing(make_cache) -> None:
    cache = make_cache()
    with pytest.raises(ZeroDivisionError), cache.acquire([1, 2, 3]):
        raise ZeroDivisionError
    assert cache.lookup([1, 2, 3]) is None
    assert cache.stats().leases == 0


def test_a_dropped_lease_is_released(make_cache) -> None:
    cache = make_cache()
    cache.acquire([1, 2, 3])
    assert cache.stats().leases == 0


def test_salts_and_namespaces_share_nothing(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(50))
    compute(cache, prompt, salt="tenant a")
    assert cache.lookup(prompt) is None
    assert cache.lookup(prompt, salt="tenant b") is None
    assert cache.lookup(prompt, salt="") is None
    assert cache.lookup(prompt, salt="tenant a").cached_tokens == 50
    assert compute(cache, prompt, salt="tenant b") == 50


def test_namespace_and_salt_do_not_run_into_each_other(make_cache) -> None:
    cache = make_cache(namespace=b"a")
    cache.insert([1, 2], [(kv_of([1, 2], cache.layout),) * 2] * 2, salt="sb")
    cache.namespace = b"as"
    assert cache.lookup([1, 2], salt="b") is None


def test_limit_caps_the_hit(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(50))
    compute(cache, prompt)
    for limit, cached in [(0, 0), (1, 1), (16, 16), (37, 37), (49, 49), (1000, 49), (None, 49)]:
        with cache.acquire(prompt, limit=limit) as lease:
            assert lease.cached_tokens == cached
    with pytest.raises(ValueError, match="limit=-1"):
        cache.acquire(prompt, limit=-1)


def test_insert_publishes_what_the_program_computed(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(70))
    kv = [(kv_of(prompt, cache.layout), kv_of(prompt, cache.layout) + 1) for _ in range(2)]
    assert cache.insert(prompt, kv) == 70
    assert cache.insert(prompt, kv) == 0
    assert cache.insert(prompt[:60], [(k[:60], v[:60]) for k, v in kv]) == 0
    longer = prompt + [5, 6]
    kv = [(kv_of(longer, cache.layout), kv_of(longer, cache.layout) + 1) for _ in range(2)]
    assert cache.insert(longer, kv) == 2
    match = cache.lookup(longer)
    flat = cache.value(1).view(-1, 2, 16)
    slots = torch.tensor([int(match.block_table[i // 16]) * 16 + i % 16 for i in range(72)])
    assert torch.equal(flat[slots], kv[1][1])


def test_lookup_gives_device_addresses(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(20))
    compute(cache, prompt)
    match = cache.lookup(prompt)
    for layer in range(2):
        for value, plane in enumerate((cache.key(layer), cache.value(layer))):
            offsets = match.offsets(2 * layer + value)
            for block, offset in zip(match.block_table, offsets, strict=True):
                assert match.plane_addresses[2 * layer + value] + offset == plane[int(block)].data_ptr()
    with pytest.raises(ValueError, match="plane=4"):
        match.offsets(4)


def test_planes_are_aligned_zero_copy_and_poisoned(make_cache) -> None:
    cache = make_cache()
    plane = cache.key(0)
    assert plane.data_ptr() % (2 << 20) == 0
    assert plane.is_contiguous()
    assert plane.data_ptr() == cache.key(0).data_ptr()
    assert torch.isnan(plane).all()  # nobody relies on what was never written
    with torch.inference_mode():
        fresh = cache.value(1)
    fresh[1, 0] = 3.0  # an inference tensor would refuse
    assert cache.value(1)[1, 0, 0, 0] == 3.0


def test_planes_outlive_the_cache(make_cache) -> None:
    cache = make_cache()
    plane = cache.key(0)
    plane.fill_(2.0)
    cache.close()
    assert plane.sum() == 2.0 * plane.numel()


def test_block_zero_is_never_handed_out(make_cache) -> None:
    cache = make_cache(small_layout(num_kv_heads=64, head_dim=64), pool_bytes=16 << 20)
    usable = cache.stats().pool_bytes // cache.layout.block_bytes
    with cache.acquire(list(range(usable * 16))) as lease:
        assert sorted(lease.block_table) == list(range(1, usable + 1))
        assert cache.stats().free_bytes == 0


def test_slots_follow_the_block_table(make_cache) -> None:
    cache = make_cache()
    with cache.acquire(list(range(40))) as lease:
        table = lease.block_table
        expected = [int(table[i // 16]) * 16 + i % 16 for i in range(40)]
        assert lease.slots(0, 40).tolist() == expected
        assert lease.slots(5, 20).tolist() == expected[5:20]
        assert lease.slots(7, 7).tolist() == []
        assert (table.dtype, lease.slots(0, 1).dtype) == (np.int32, np.int64)


def test_a_part_that_is_in_its_own_way_is_computed_again(make_cache) -> None:
    layout = small_layout(num_layers=1, num_kv_heads=64, head_dim=32)
    cache = make_cache(layout, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // layout.block_bytes
    prompt = list(range(usable * 16 - 8))
    with cache.acquire(prompt) as lease:
        lease.commit(prompt)
    assert cache.stats().free_bytes == 0
    with cache.acquire([*prompt, 7]) as lease:
        assert lease.cached_tokens == (usable - 1) * 16
        lease.commit([*prompt, 7])


def test_clear_evicts_what_is_not_pinned(make_cache) -> None:
    cache = make_cache()
    compute(cache, list(range(40)))
    compute(cache, list(range(100, 140)))
    with cache.acquire(list(range(50))):
        cache.clear()
        assert cache.lookup(list(range(40))).cached_tokens == 40
        assert cache.lookup(list(range(100, 140))) is None
    cache.clear()
    assert cache.stats().entries == 0


def test_clear_takes_thousands_of_entries_in_steps(make_cache) -> None:
    cache = make_cache(pool_bytes=16 << 20, watermark_bytes=0)
    compute(cache, list(range(3_000 * 16)))
    assert cache.stats().entries == 3_000
    cache.clear()
    assert cache.stats().entries == 0
    cache.check_integrity()


def test_a_prompt_in_the_place_of_an_evicted_one_gets_neighbouring_blocks(make_cache) -> None:
    cache = make_cache(small_layout(num_layers=1, num_kv_heads=64, head_dim=32), pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // cache.layout.block_bytes
    for first in range(3):
        with cache.acquire([first] * (16 * usable)) as lease:
            assert (np.diff(lease.block_table) == 1).all()
            lease.commit([first] * (16 * usable))


def test_parts_add_up_at_every_step(make_cache) -> None:
    cache = make_cache()

    def conserved() -> bool:
        s = cache.stats()
        return s.free_bytes + s.leased_bytes + s.cached_bytes + s.fenced_bytes == s.pool_bytes

    lease = cache.acquire(list(range(100)))
    assert conserved()
    lease.commit(list(range(100)))
    assert conserved()
    lease.extend(40)
    assert conserved()
    lease.release()
    assert conserved()


def test_readme_docstring_examples() -> None:
    import doctest

    from npu_prompt_cache import cache, layout

    for module in (cache, layout):
        result = doctest.testmod(module, extraglobs={"PromptCache": npc.PromptCache, "KVLayout": npc.KVLayout})
        assert result.failed == 0
        assert result.attempted > 0
