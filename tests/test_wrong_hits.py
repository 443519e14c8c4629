"""A wrong hit is impossible, not improbable (P3); no hit is missed (P2)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from layouts import small_layout

import npu_prompt_cache as npc
from npu_prompt_cache import _core, sim

COLLISION = json.loads((Path(__file__).parent / "tuple_hash_collision.json").read_text())


def test_prefixes_with_equal_tuple_hashes_do_not_hit_each_other(make_cache) -> None:
    a, b = COLLISION["a"], COLLISION["b"]
    assert len(a) == len(b) == 500
    assert hash(tuple(a)) == hash(tuple(b))
    cache = make_cache()
    suffix = [1, 2, 3]
    for prompt in (a, a + suffix):
        with cache.acquire(prompt) as lease:
            lease.commit(prompt)
    for prompt in (b, b + suffix):
        assert cache.lookup(prompt) is None
        with cache.acquire(prompt) as lease:
            assert lease.cached_tokens == 0


class Trie:
    """Every committed prompt, token by token: the hit of a prompt is how far it can be followed."""

    def __init__(self) -> None:
        self.root: dict = {}

    def add(self, tokens: list[int]) -> None:
        node = self.root
        for token in tokens:
            node = node.setdefault(token, {})

    def follow(self, tokens: list[int]) -> int:
        node = self.root
        for count, token in enumerate(tokens):
            if token not in node:
                return count
            node = node[token]
        return len(tokens)


@pytest.mark.parametrize("priority_bits", [0, 8, 32])
def test_100000_random_inserts_and_lookups_agree_with_the_oracle(priority_bits: int) -> None:
    # 0 bits make every treap a list, 8 bits make priorities collide all the time: the shape of the tree must not
    # matter. Few different tokens make prompts share prefixes, part blocks and whole blocks.
    operations = 100_000 if priority_bits == 8 else 10_000
    layout = npc.KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float16, block_size=16)
    core = _core.PromptCache(
        acl_lib=sim.library_path(),
        device=0,
        pool_bytes=64 << 20,
        watermark_bytes=0,
        plane_block_bytes=list(layout.plane_block_bytes),
        block_size=16,
        priority_bits=priority_bits,
    )
    rng = random.Random(priority_bits)
    tries = {b"a": Trie(), b"b": Trie()}
    prompts: list[list[int]] = [[1]]
    wrong = missed = 0
    for _ in range(operations):
        namespace = b"a" if rng.random() < 0.8 else b"b"
        prompt = random_prompt(rng, prompts)
        expected = tries[namespace].follow(prompt)
        if rng.random() < 0.5:
            found, table = core.lookup(namespace, prompt)
            assert len(table) == -(-found // 16)
        else:
            lease = core.acquire(namespace, prompt)
            found, expected = lease.cached_tokens, min(expected, len(prompt) - 1)
            lease.commit(prompt)
            lease.release()
            tries[namespace].add(prompt)
            prompts.append(prompt)
        wrong += found > expected
        missed += found < expected
    assert (wrong, missed) == (0, 0)
    core.check_integrity()
    core.close()


def random_prompt(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """An earlier prompt, cut somewhere, and something new of few different tokens."""
    old = rng.choice(prompts)
    cut = rng.randrange(len(old) + 1)
    return (old[:cut] + [rng.randrange(3) for _ in range(rng.randrange(1, 24))])[:80]


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_one_different_token_anywhere_ends_the_hit_there(make_cache, block_size: int) -> None:
    cache = make_cache(small_layout(block_size))
    prompt = [5] * 300
    with cache.acquire(prompt) as lease:
        lease.commit(prompt)
    for place in range(1, 300):
        assert cache.lookup([*prompt[:place], 6, *prompt[place + 1 :]]).cached_tokens == place
    assert cache.lookup([6, *prompt[1:]]) is None
