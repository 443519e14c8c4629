"""Deterministic mode: what a hit computes is what the cold run computed, bit for bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from architectures import MODEL_TYPES, NOT_BUILDABLE, build, tiny_config_of
from layouts import small_layout
from tiny import join, left_padded, tokens
from transformers import PreTrainedModel

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import SUPPORTED_MODEL_TYPES

BLOCK = 16
#: Grouped queries with rotary positions; and learned positions, K/V heads for each query head, one fused projection.
ARCHITECTURES = ("llama", "gpt2")
DTYPES = (torch.float32, torch.bfloat16)
SERVED = [name for name in MODEL_TYPES if name in SUPPORTED_MODEL_TYPES and name not in NOT_BUILDABLE]


class Embedded:
    """Shapes of what goes through the model's embedding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._shapes: list[tuple[int, ...]] = []
        model.get_input_embeddings().register_forward_hook(lambda _, __, output: self._shapes.append(output.shape[:-1]))

    def take(self) -> list[tuple[int, ...]]:
        taken, self._shapes = self._shapes, []
        return taken


class Attached(NamedTuple):
    model: PreTrainedModel
    cache: npc.PromptCache
    embedded: Embedded


def attached(model_type: str, dtype: torch.dtype = torch.float32, *, deterministic: bool = True) -> Attached:
    model = build(tiny_config_of(model_type)).to(dtype)
    embedded = Embedded(model)
    cache = npc.enable(model, pool_bytes=48 << 20, block_size=BLOCK, deterministic=deterministic)
    return Attached(model, cache, embedded)


@pytest.fixture(params=[(name, dtype) for name in ARCHITECTURES for dtype in DTYPES], ids=str)
def each(request: pytest.FixtureRequest) -> Iterator[Attached]:
    made = attached(*request.param)
    yield made
    made.cache.check_integrity()
    assert made.cache.stats().leases == 0
    npc.disable(made.model)


@pytest.fixture
def llama() -> Iterator[Attached]:
    made = attached("llama", torch.bfloat16)
    yield made
    made.cache.check_integrity()
    assert made.cache.stats().leases == 0
    npc.disable(made.model)


def forwards(start: int, stop: int) -> list[tuple[int, int]]:
    """Shapes of the forwards that compute tokens ``[start, stop)``."""
    ends = [*range((start // BLOCK + 1) * BLOCK, stop, BLOCK), stop]
    return [(1, end - first) for first, end in zip([start, *ends], ends, strict=False)]


def logits(model: PreTrainedModel, prompt: torch.Tensor, keep: int | torch.Tensor = 1, **options: object):
    with torch.no_grad():
        return model(prompt, logits_to_keep=keep, **options).logits


def cold_and_hit(run: Callable[[], torch.Tensor], cache: npc.PromptCache, warm: Callable[[], object]):
    """What `run` gives when nothing is cached, and after `warm`."""
    cache.clear()
    cold = run()
    cache.clear()
    warm()
    return cold, run()


def generated(model: PreTrainedModel, **options: object) -> torch.Tensor:
    """``[steps, batch, vocabulary]``: the logits of every step of generate()."""
    out = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits)


# ---- hits ----


class Pair(NamedTuple):
    """A prompt, and one that was there before and begins with the same `split` tokens."""

    prompt: torch.Tensor
    before: torch.Tensor
    split: int
    keep: int


def pairs(count: int) -> Iterator[Pair]:
    draw = random.Random(count)
    for seed in range(count):
        length = draw.randint(1, 6 * BLOCK)
        split = draw.randint(0, length)
        prompt = tokens(length, seed=seed)
        tail = tokens(draw.randint(1, 2 * BLOCK), seed=count + seed)
        yield Pair(prompt, join(prompt[:, :split], tail), split, min(draw.choice([1, 1, 1, 3, 20]), length))


def test_500_random_pairs_of_prompt_and_split_give_identical_logits(each: Attached) -> None:
    for pair in pairs(500):
        run = functools.partial(logits, each.model, pair.prompt, pair.keep)
        cold, hit = cold_and_hit(run, each.cache, lambda pair=pair: logits(each.model, pair.before))
        assert torch.equal(hit, cold), pair
        length, before = pair.prompt.shape[1], pair.before.shape[1]
        # The two may agree for longer than they were made to.
        same = int((pair.prompt[0, : min(length, before)] == pair.before[0, :length]).long().cumprod(0).sum())
        cached = min(same, length - pair.keep) // BLOCK * BLOCK
        assert each.embedded.take() == forwards(0, length) + forwards(0, before) + forwards(cached, length), pair


def test_without_the_mode_the_last_bits_differ() -> None:
    """Or the test above would say nothing."""
    model, cache, _ = attached("llama", deterministic=False)
    worst = 0.0
    for pair in pairs(50):
        run = functools.partial(logits, model, pair.prompt)
        cold, hit = cold_and_hit(run, cache, lambda pair=pair: logits(model, pair.before))
        worst = max(worst, (cold - hit).abs().max().item())
    npc.disable(model)
    assert 0 < worst < 1e-4


@pytest.mark.parametrize("model_type", SERVED)
def test_every_supported_type(model_type: str) -> None:
    prompt = tokens(3 * BLOCK + 5, seed=1)
    plain = logits(build(tiny_config_of(model_type)), prompt)
    model, cache, embedded = attached(model_type)
    warm = functools.partial(logits, model, prompt[:, : 2 * BLOCK + 3])
    cold, hit = cold_and_hit(lambda: logits(model, prompt), cache, warm)
    npc.disable(model)
    assert embedded.take()[-2:] == forwards(2 * BLOCK, prompt.shape[1])
    assert torch.equal(hit, cold)
    torch.testing.assert_close(hit, plain, rtol=0, atol=1e-4)


def test_it_does_not_matter_where_blocks_lie(each: Attached) -> None:
    prompt = tokens(5 * BLOCK + 3, seed=1)
    together = logits(each.model, prompt)
    each.cache.clear()
    holders = [each.cache.acquire([i]) for i in range(60)]
    for holder in holders[::2]:
        holder.release()
    scattered = logits(each.model, prompt)
    hit = logits(each.model, prompt)
    for holder in holders[1::2]:
        holder.release()
    assert torch.equal(scattered, together)
    assert torch.equal(hit, together)


@pytest.mark.parametrize(
    "keep", [0, 1, 3, 2 * BLOCK, torch.tensor([5, 2, 3 * BLOCK + 7]), torch.tensor([-1]), torch.tensor([0])]
)
def test_logits_to_keep_of_a_padded_batch(keep: int | torch.Tensor) -> None:
    prompts = [tokens(n, seed=n) for n in (3 * BLOCK + 6, BLOCK + 3, 2 * BLOCK)]
    batch = left_padded(prompts, extra=2)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    run = {**batch, "position_ids": positions}
    columns = batch["input_ids"].shape[1]
    kept = keep if isinstance(keep, torch.Tensor) else torch.arange(columns - (keep or columns), columns)
    expected = logits(build(tiny_config_of("llama")), run.pop("input_ids"), 0, **run)[:, kept]
    expected[batch["attention_mask"][:, kept] == 0] = 0
    model, cache, _ = attached("llama")
    cold = logits(model, batch["input_ids"], keep, **run)
    hit = logits(model, batch["input_ids"], keep, **run)
    cache.check_integrity()
    npc.disable(model)
    assert torch.equal(hit, cold)
    torch.testing.assert_close(hit, expected, rtol=0, atol=1e-4)


# ---- generate ----


def test_sampling_with_one_seed_gives_one_text(each: Attached) -> None:
    prompt = tokens(3 * BLOCK + 5, seed=1)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return each.model.generate(prompt, max_new_tokens=40, do_sample=True, temperature=1.5)

    for seed in range(5):
        warm = functools.partial(logits, each.model, prompt[:, : 2 * BLOCK + 3])
        cold, hit = cold_and_hit(functools.partial(run, seed), each.cache, warm)
        assert torch.equal(hit, cold)


def test_rows_of_a_batch_are_what_they_are_alone(each: Attached) -> None:
    prompts = [tokens(n, seed=n) for n in (3 * BLOCK + 6, 5, 2 * BLOCK, 2 * BLOCK + 1)]
    options = {"max_new_tokens": BLOCK + 4, "min_new_tokens": BLOCK + 4, "do_sample": False}
    alone = []
    for prompt in prompts:
        each.cache.clear()
        alone.append(generated(each.model, inputs=prompt, **options))
    run = functools.partial(generated, each.model, **left_padded(prompts), **options)
    cold, hit = cold_and_hit(run, each.cache, lambda: logits(each.model, prompts[2]))
    assert torch.equal(cold, torch.cat(alone, dim=1))
    assert torch.equal(hit, cold)


def test_what_was_generated_is_computed_again_by_the_next_turn(each: Attached) -> None:
    options = {"max_new_tokens": 2 * BLOCK, "min_new_tokens": 2 * BLOCK, "do_sample": False}
    prompt = tokens(BLOCK + 5, seed=1)
    first = each.model.generate(prompt, **options)
    assert each.cache.lookup(first[0]).cached_tokens == BLOCK
    each.embedded.take()
    turn = join(first, tokens(5, seed=2))
    run = functools.partial(generated, each.model, inputs=turn, **options)
    hit = run()
    assert each.embedded.take() == forwards(BLOCK, turn.shape[1]) + [(1, 1)] * (2 * BLOCK - 1)
    each.cache.clear()
    assert torch.equal(hit, run())


@pytest.mark.parametrize("chunk", [BLOCK - 3, BLOCK, 2 * BLOCK + 3])
def test_prefill_in_chunks(llama: Attached, chunk: int) -> None:
    prompt = tokens(5 * BLOCK + 5, seed=1)
    options = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": chunk}
    run = functools.partial(generated, llama.model, inputs=prompt, **options)
    cold, hit = cold_and_hit(run, llama.cache, lambda: logits(llama.model, prompt))
    assert torch.equal(hit, cold)


def test_later_forwards_publish_nothing(llama: Attached) -> None:
    prompt, more = tokens(2 * BLOCK + 5, seed=1), tokens(3 * BLOCK, seed=2)

    def run() -> torch.Tensor:
        with torch.no_grad():
            past = llama.model(prompt, logits_to_keep=1).cache
            return llama.model(more, cache=past).logits

    cold, hit = run(), run()
    assert llama.cache.lookup(join(prompt, more)[0]).cached_tokens == 2 * BLOCK
    assert torch.equal(hit, cold)
    again = logits(llama.model, join(prompt, more))
    llama.cache.clear()
    assert torch.equal(again, logits(llama.model, join(prompt, more)))


def test_a_prefill_that_fails_half_way_publishes_nothing(llama: Attached) -> None:
    calls = []

    def fail(*args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError("in the third block")

    hook = llama.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(OSError, match="third block"):
        logits(llama.model, tokens(4 * BLOCK))
    hook.remove()
    assert len(calls) == 3
    assert (llama.cache.stats().leases, llama.cache.stats().entries) == (0, 0)


# ---- a cache without a model ----


def test_only_whole_blocks_are_found_and_published(make_cache: Callable[..., npc.PromptCache]) -> None:
    cache = make_cache(small_layout(BLOCK), deterministic=True)
    prompt = list(range(3 * BLOCK + 7))
    with cache.acquire(prompt) as lease:
        assert lease.commit(prompt[: BLOCK - 1]) == 0
        assert lease.commit(prompt[: BLOCK + 1]) == BLOCK
        assert lease.commit(prompt) == 2 * BLOCK
        lease.extend(BLOCK)
        assert lease.commit([*prompt, *prompt[:10]]) == BLOCK
    assert cache.stats().cached_bytes == 4 * cache.layout.block_bytes
    for length, found in ((BLOCK - 1, 0), (BLOCK, BLOCK), (2 * BLOCK + 5, 2 * BLOCK)):
        match = cache.lookup([*prompt[:length], 900])
        assert (match.cached_tokens if match else 0) == found
        with cache.acquire([*prompt[:length], 900]) as lease:
            assert lease.cached_tokens == found
    with cache.acquire(prompt[: 2 * BLOCK]) as lease:
        assert lease.cached_tokens == BLOCK  # one token is always computed, and so is its block
    with cache.acquire(prompt, limit=2 * BLOCK - 1) as lease:
        assert lease.cached_tokens == BLOCK
    assert cache.stats().copies["D2D"] == cache.stats().copies["H2H"] == 0


def test_insert_keeps_whole_blocks(make_cache: Callable[..., npc.PromptCache]) -> None:
    cache = make_cache(small_layout(BLOCK), deterministic=True)
    layout, length = cache.layout, 2 * BLOCK + 7
    kv = [2 * (torch.ones(length, layout.num_kv_heads, layout.head_dim, dtype=layout.dtype),)] * layout.num_layers
    assert cache.insert(list(range(length)), kv) == 2 * BLOCK
    assert cache.insert(list(range(length)), kv) == 0
    assert cache.lookup(list(range(length))).cached_tokens == 2 * BLOCK
