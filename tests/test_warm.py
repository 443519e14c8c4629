"""`PromptCache.warm`: every token of a set of prompts goes through the model once, and later requests hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny import SYSTEM, join, tiny_model, tokens  # noqa: E402

import npu_prompt_cache as npc  # noqa: E402
from npu_prompt_cache.integrations.transformers import CacheBypassWarning  # noqa: E402


def small_model() -> transformers.PreTrainedModel:
    """4 KiB of K/V a token: the smallest pool, 4 MiB, has 1,024 tokens."""
    return tiny_model(num_hidden_layers=1, num_key_value_heads=4, head_dim=128)


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    model = small_model()
    model.forwards = []  # shapes of what goes through the embedding
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: model.forwards.append(tuple(inputs[0].shape))
    )
    return model


class Forwards:
    """Shapes of what goes through the model while this is entered."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model

    def __enter__(self) -> list[tuple[int, ...]]:
        self._model.forwards = []
        return self._model.forwards

    def __exit__(self, *_: object) -> None:
        self._model.forwards = []


def count(forwards: list[tuple[int, ...]]) -> int:
    return sum(rows * columns for rows, columns in forwards)


@pytest.fixture
def enabled(model) -> Iterator[Callable[..., npc.PromptCache]]:
    def enable(**options: object) -> npc.PromptCache:
        return npc.enable(model, **{"pool_bytes": 64 << 20, **options})

    yield enable
    cache = model.forward.attachment.cache
    cache.check_integrity()
    assert cache.stats().leases == cache.stats().pinned_entries == 0
    npc.disable(model)


def cached(cache: npc.PromptCache, prompt: torch.Tensor) -> int:
    match = cache.lookup(prompt[0])
    return 0 if match is None else match.cached_tokens


def distinct_tokens(prompts: list[torch.Tensor]) -> int:
    """Nodes of the prefix tree of the prompts: what has to be computed at least."""
    return len({tuple(prompt[0, : end + 1].tolist()) for prompt in prompts for end in range(prompt.shape[1])})


def test_every_prompt_is_cached_whole_and_computed_once(model, enabled) -> None:
    other = tokens(300, seed=7)
    prompts = [
        *(join(SYSTEM, tokens(n, seed=n)) for n in (100, 1, 77)),
        SYSTEM[:, :260],
        *(join(other, tokens(n, seed=n)) for n in (40, 40, 3)),
        tokens(1, seed=9),
    ]
    cache = enabled()
    with Forwards(model) as forwards:
        warmed = cache.warm([prompt[0] for prompt in prompts])
    assert warmed.cached_tokens == [prompt.shape[1] for prompt in prompts]
    assert warmed.problems == {}
    assert [cached(cache, prompt) for prompt in prompts] == warmed.cached_tokens
    assert count(forwards) == warmed.computed_tokens == distinct_tokens(prompts)
    assert len(forwards) == 1
    with Forwards(model) as again:
        assert cache.warm([prompt[0] for prompt in prompts]).computed_tokens == 0
    assert again == []


def test_later_requests_hit_and_say_the_same(model, enabled) -> None:
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (5, 30)]
    plain = [model.generate(prompt, max_new_tokens=8, do_sample=False) for prompt in prompts]
    cache = enabled()
    cache.warm([SYSTEM])
    for prompt, expected, new in zip(prompts, plain, (5, 30), strict=True):
        with Forwards(model) as forwards:
            assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)
        assert forwards[0] == (1, new)


def test_a_deterministic_cache_keeps_whole_blocks(model, enabled) -> None:
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (100, 30)]
    cache = enabled(deterministic=True, block_size=64)
    with Forwards(model) as forwards:
        warmed = cache.warm(prompts)
    assert warmed.problems == {}
    assert warmed.cached_tokens == [576, 512]
    assert count(forwards) == warmed.computed_tokens == 576 + 512 - 448
    with Forwards(model) as forwards:
        assert cache.warm([*prompts, tokens(63)]).cached_tokens == [576, 512, 0]
    assert forwards == []


def test_prompts_may_be_ids_of_any_kind(enabled) -> None:
    ids = SYSTEM[0].tolist()
    cache = enabled()
    kinds = [ids[:10], tuple(ids[:20]), np.array(ids[:30], np.int32), SYSTEM[:, :40], SYSTEM[0, :50]]
    assert cache.warm(iter(kinds)).cached_tokens == [10, 20, 30, 40, 50]
    assert cache.warm([]).cached_tokens == []


def test_batches_keep_to_their_tokens(model, enabled) -> None:
    cache = enabled()
    with Forwards(model) as forwards:
        cache.warm([tokens(n, seed=n) for n in (40, 41, 42, 43, 150)], batch_tokens=100)
    sizes = sorted(columns for _, columns in forwards)
    assert sizes[-1] == 150  # alone
    assert len(sizes) == 3
    assert sizes[1] <= 100


def test_pinned_prompts_stay_until_they_are_released(enabled) -> None:
    cache = enabled(pool_bytes=4 << 20, block_size=16)
    room = cache.stats().pool_bytes // cache.layout.token_bytes
    pinned, others = [SYSTEM[:, :200], SYSTEM[:, :100]], [tokens(room // 2, seed=seed) for seed in range(4)]
    cache.warm([SYSTEM[:, :150]])
    with cache.warm(pinned, pin=True) as warmed:
        assert warmed.computed_tokens == 50
        for other in others:
            cache.warm([other])
        assert [cached(cache, prompt) for prompt in pinned] == [200, 100]
        cache.clear()
        assert [cached(cache, prompt) for prompt in pinned] == [200, 100]
    cache.clear()
    assert [cached(cache, prompt) for prompt in pinned] == [0, 0]
    warmed.release()


def test_more_than_fits_cannot_be_pinned(model, enabled) -> None:
    cache = enabled(pool_bytes=4 << 20, block_size=16, max_pinned_bytes=4 << 20)
    room = cache.stats().pool_bytes // cache.layout.token_bytes
    prompts = [tokens(room // 3, seed=seed) for seed in range(5)]
    with Forwards(model) as forwards, pytest.warns(CacheBypassWarning, match="3 of 5 prompts .* it needs"):
        warmed = cache.warm(prompts, pin=True)
    assert sorted(warmed.cached_tokens) == [0, 0, 0, room // 3, room // 3]
    assert count(forwards) == warmed.computed_tokens == 2 * (room // 3)
    warmed.release()


def test_more_than_pins_may_hold_is_refused(enabled) -> None:
    cache = enabled(pool_bytes=4 << 20, block_size=16)
    room = cache.stats().pool_bytes // cache.layout.token_bytes
    with pytest.raises(
        npc.PinLimitExceeded,
        match=f"of at most {(2 << 20) // cache.layout.block_bytes * cache.layout.block_bytes} bytes",
    ):
        cache.warm([tokens(room // 3, seed=seed) for seed in range(2)], pin=True)
    assert cache.stats().pinned_bytes == 0


def test_an_error_unpins(model, enabled) -> None:
    cache = enabled()
    with pytest.raises(IndexError):
        cache.warm([[10**6], tokens(20), tokens(300, seed=2)], batch_tokens=25, pin=True)
    assert cache.stats().pinned_entries == 0


def test_salts_are_warmed_apart(enabled) -> None:
    cache = enabled()
    with cache.salted("tenant"):
        assert cache.warm([SYSTEM]).computed_tokens == 500
        assert cached(cache, SYSTEM) == 500
    assert cached(cache, SYSTEM) == 0
    assert cache.warm([SYSTEM]).computed_tokens == 500


def test_a_prompt_without_room_is_said_and_the_others_go_on(model, enabled) -> None:
    cache = enabled(pool_bytes=4 << 20, block_size=16)
    room = cache.stats().pool_bytes // cache.layout.token_bytes
    prompts = [tokens(50, seed=1), tokens(room + 1, seed=2), tokens(60, seed=3)]
    with Forwards(model) as forwards, pytest.warns(CacheBypassWarning, match=r"1 of 3 prompts .* prompt 1: it needs"):
        warmed = cache.warm(prompts)
    assert warmed.cached_tokens == [50, 0, 60]
    assert list(warmed.problems) == [1]
    assert count(forwards) == 110


def test_prompts_that_push_each_other_out_are_said(enabled) -> None:
    cache = enabled(pool_bytes=4 << 20, block_size=16)
    room = cache.stats().pool_bytes // cache.layout.token_bytes
    prompts = [tokens(room // 3, seed=seed) for seed in range(5)]
    with pytest.warns(CacheBypassWarning, match="evicted for later prompts"):
        warmed = cache.warm(prompts)
    assert 0 < len(warmed.problems) < 5
    assert [len(prompts[at][0]) == count for at, count in enumerate(warmed.cached_tokens)] == [
        at not in warmed.problems for at in range(5)
    ]


def test_what_cannot_be_warmed_is_refused(model, enabled, make_cache) -> None:
    with pytest.raises(ValueError, match="attach"):
        make_cache().warm([[1, 2]])
    cache = enabled()
    with pytest.raises(TypeError, match="a list of prompts"):
        cache.warm("You are a bot.")
    with pytest.raises(ValueError, match="prompt 1 is a string: warm"):
        cache.warm([[1], "You are a bot."])
    for bad in ([], [1.5], [[1], [2]], [-1], [None]):
        with pytest.raises(ValueError, match="prompt 1 has shape"):
            cache.warm([[1], bad])
    assert cache.stats().entries == 0
    model.train()
    with pytest.raises(ValueError, match="LlamaForCausalLM is in training mode"):
        cache.warm([[1]])
    model.eval()


def test_several_models_are_refused_by_name(enabled) -> None:
    cache = enabled()
    with cache.attach(small_model()), pytest.raises(ValueError, match="has 2: LlamaForCausalLM, LlamaForCausalLM"):
        cache.warm([[1]])
    assert cache.warm([[5]]).cached_tokens == [1]


def test_a_cache_that_was_made_without_the_model(model) -> None:
    made = npc.PromptCache.for_model(model, pool_bytes=64 << 20)
    layout = made.layout
    made.close()
    with npc.PromptCache(layout, pool_bytes=64 << 20) as cache, cache.attach(model), torch.no_grad():
        assert cache.warm([SYSTEM]).cached_tokens == [500]
        with Forwards(model) as forwards:
            model(join(SYSTEM, tokens(3)), logits_to_keep=1)
    assert forwards == [(1, 3)]


def test_an_error_of_the_model_is_the_callers(model, enabled) -> None:
    cache = enabled()
    with pytest.raises(IndexError):
        cache.warm([tokens(20), torch.tensor([1, 2, 10**6])])
    assert cache.stats().leases == 0
