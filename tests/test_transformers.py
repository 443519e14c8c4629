"""The cache inside transformers models: the same text, only uncached tokens computed, nothing lost on errors."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
import transformers
from tiny import LLAMA_LIKE, PAD, SYSTEM, join, left_padded, tiny_model, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

import npu_prompt_cache as npc
from npu_prompt_cache import sim
from npu_prompt_cache.integrations.transformers import CacheBypassWarning, PagedCache, media
from npu_prompt_cache.integrations.transformers.attachment import _AttentionUse


@pytest.fixture
def model() -> Iterator[transformers.PreTrainedModel]:
    model = tiny_model()
    yield model
    if "forward" in vars(model):
        cache = model.forward.attachment.cache
        cache.check_integrity()
        assert cache.stats().leases == 0
        npc.disable(model)


def computed(cache: npc.PromptCache) -> int:
    return cache.stats().computed_tokens


class Counting:
    """Counts the tokens that really go through the model's layers."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.tokens = 0
        self.shapes: list[tuple[int, ...]] = []
        self._hook = model.model.layers[0].mlp.register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.shapes.append(tuple(inputs[0].shape[:2]))
        self.tokens += inputs[0].shape[0] * inputs[0].shape[1]

    def remove(self) -> None:
        self._hook.remove()


# ---- right text, few tokens ----


@pytest.mark.parametrize("model_type", LLAMA_LIKE)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_and_its_relations_give_their_own_text(model_type: str, attention: str) -> None:
    changes: dict[str, object] = {"attn_implementation": attention}
    model = tiny_model(model_type, **changes)
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (100, 80, 33)]
    batch = left_padded(prompts, extra=3)
    plain = [model.generate(p, max_new_tokens=8, do_sample=False) for p in prompts]
    plain_batch = model.generate(**batch, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        plain_logits = model(prompts[0], logits_to_keep=5).logits
    cache = npc.enable(model, pool_bytes=64 << 20)
    for prompt, expected, new in zip(prompts, plain, (600, 80, 33), strict=True):
        before = computed(cache)
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)
        assert computed(cache) - before == new
    assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), plain_batch)
    with torch.no_grad():
        torch.testing.assert_close(model(prompts[0], logits_to_keep=5).logits, plain_logits, rtol=1e-4, atol=1e-4)
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_keeps_its_bytes(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    prompt = join(SYSTEM, tokens(20))
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, cache=plain)
    npc.enable(model, pool_bytes=64 << 20)
    with torch.no_grad():
        paged = model(prompt).cache
        again = model(join(prompt, tokens(5)), logits_to_keep=1).cache
    for layer in range(4):
        assert torch.equal(paged.layers[layer].keys, plain.layers[layer].keys)
        assert torch.equal(again.layers[layer].values[:, :, :520], plain.layers[layer].values)
    del paged, again
    npc.disable(model)


def test_only_uncached_tokens_go_through_the_model_packed(model) -> None:
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (7, 60, 25)]
    cache = npc.enable(model, pool_bytes=64 << 20)
    counting = Counting(model)
    model.generate(SYSTEM, max_new_tokens=1, do_sample=False)
    counting.shapes.clear()
    model.generate(**left_padded(prompts), max_new_tokens=3, do_sample=False)
    counting.remove()
    assert counting.shapes == [(1, 7 + 60 + 25), (1, 3), (1, 3)]
    assert cache.stats().hit_tokens == 1500


def test_what_was_generated_is_cached_too(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    conversation = SYSTEM
    for turn in range(5):
        conversation = join(conversation, tokens(20, seed=turn))
        before = computed(cache)
        conversation = model.generate(conversation, max_new_tokens=30, min_new_tokens=30, do_sample=False)
        # All but the last generated token were computed in the turn before.
        assert computed(cache) - before == (520 if turn == 0 else 21)


def test_sampling_with_one_seed_gives_one_text(model) -> None:
    batch = left_padded([join(SYSTEM, tokens(n, seed=n)) for n in (10, 50, 30)])
    options = {"max_new_tokens": 20, "do_sample": True, "top_k": 40, "temperature": 0.9}
    torch.manual_seed(5)
    plain = model.generate(**batch, **options)
    npc.enable(model, pool_bytes=64 << 20)
    for _ in range(2):
        torch.manual_seed(5)
        assert torch.equal(model.generate(**batch, **options), plain)


def test_a_hook_may_run_another_model_with_a_cache_or_without(model) -> None:
    other, prompt = tiny_model("qwen2"), tokens(30)
    with torch.no_grad():
        plain, plain_of_other = model(prompt).logits, other(prompt).logits
        seen: list[torch.Tensor] = []
        for options in ({}, {"use_cache": False}, {"cache": DynamicCache()}):
            model.model.layers[1].register_forward_hook(
                lambda *_, options=options: seen.append(other(prompt, **options).logits)
            )
        npc.enable(model, pool_bytes=64 << 20)
        npc.enable(other, pool_bytes=64 << 20)
        torch.testing.assert_close(model(prompt).logits, plain, rtol=1e-4, atol=1e-4)
    npc.disable(other)
    assert len(seen) == 3
    for logits in seen:
        torch.testing.assert_close(logits, plain_of_other, rtol=1e-4, atol=1e-4)


def test_num_return_sequences(model) -> None:
    prompt = join(SYSTEM, tokens(9))
    options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    plain = model.generate(prompt, **options)
    npc.enable(model, pool_bytes=64 << 20)
    torch.manual_seed(5)
    assert torch.equal(model.generate(prompt, **options), plain)


class Collecting(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamers_see_every_token(model) -> None:
    prompt = join(SYSTEM, tokens(9))
    npc.enable(model, pool_bytes=64 << 20)
    for _ in range(2):
        streamer = Collecting()
        out = model.generate(prompt, max_new_tokens=8, do_sample=False, streamer=streamer)
        assert streamer.got == out[0].tolist()
        assert streamer.ended


def test_rows_that_end_early_leave_no_padding_behind(model) -> None:
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (10, 50)]
    first = model.generate(prompts[0], max_new_tokens=3, do_sample=False)
    eos = int(first[0, -2])  # row 0 ends with its second token
    batch = left_padded(prompts)
    plain = model.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=PAD)
    assert plain[0, -1] == PAD
    cache = npc.enable(model, pool_bytes=64 << 20)
    out = model.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=PAD)
    assert torch.equal(out, plain)
    row = torch.cat([prompts[0][0], out[0, batch["input_ids"].shape[1] :]])
    assert cache.lookup(row).cached_tokens <= prompts[0].shape[1] + 3
    ended = torch.cat([row[: prompts[0].shape[1] + 2], tokens(5)[0]])
    assert cache.lookup(ended).cached_tokens == prompts[0].shape[1] + 2


def test_prompts_that_are_prefixes_of_one_another_in_one_batch(model) -> None:
    prompts = [SYSTEM[:, :n] for n in (500, 130, 128, 127, 1)]
    batch = left_padded(prompts)
    plain = model.generate(**batch, max_new_tokens=6, do_sample=False)
    npc.enable(model, pool_bytes=64 << 20)
    for _ in range(2):
        assert torch.equal(model.generate(**batch, max_new_tokens=6, do_sample=False), plain)


def test_block_sizes(model) -> None:
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (100, 80)]
    plain = [model.generate(p, max_new_tokens=20, do_sample=False) for p in prompts]
    for block_size in (16, 48, 128, 512):
        cache = npc.enable(model, pool_bytes=64 << 20, block_size=block_size)
        for prompt, expected in zip(prompts, plain, strict=True):
            assert torch.equal(model.generate(prompt, max_new_tokens=20, do_sample=False), expected)
        assert computed(cache) == 680
        npc.disable(model)


def test_scattered_blocks_are_read_right(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20, block_size=16)
    holders = [cache.acquire([i]) for i in range(60)]
    for holder in holders[::2]:
        holder.release()
    prompt = join(SYSTEM, tokens(60))
    out = [model.generate(prompt, max_new_tokens=20, do_sample=False) for _ in range(2)]
    for holder in holders[1::2]:
        holder.release()
    npc.disable(model)
    plain = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(out[0], plain)
    assert torch.equal(out[1], plain)


# ---- model(...) ----


def test_a_loop_of_ones_own_over_forward(model) -> None:
    prompt = join(SYSTEM, tokens(10))

    def loop() -> list[torch.Tensor]:
        with torch.inference_mode():
            output = model(prompt, logits_to_keep=1)
            logits = [output.logits]
            for _ in range(5):
                output = model(logits[-1].argmax(-1), cache=output.cache)
                logits.append(output.logits)
            output = model(tokens(4, seed=9), cache=output.cache)
            return [*logits, output.logits]

    plain = loop()
    cache = npc.enable(model, pool_bytes=64 << 20)
    for new in (510, 1):
        before = computed(cache)
        for ours, theirs in zip(loop(), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert computed(cache) - before == new
    gc.collect()
    assert cache.stats().leases == 0


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([5, 2, 519]), torch.tensor([-1]), torch.tensor([510])])
def test_logits_to_keep(model, keep: int | torch.Tensor) -> None:
    prompt = join(SYSTEM, tokens(20))
    with torch.no_grad():
        plain = model(prompt, logits_to_keep=keep).logits
        npc.enable(model, pool_bytes=64 << 20)
        for _ in range(2):
            ours = model(prompt, logits_to_keep=keep).logits
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_logits_of_a_left_padded_batch(model) -> None:
    batch = left_padded([join(SYSTEM, tokens(n, seed=n)) for n in (10, 50, 30)])
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(**batch, position_ids=positions).logits
        npc.enable(model, pool_bytes=64 << 20)
        ours = model(**batch, position_ids=positions).logits
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], plain[seen], rtol=1e-4, atol=1e-4)


def test_code_that_reaches_into_the_cache_gets_a_dense_one(model) -> None:
    prompt = join(SYSTEM, tokens(20))
    with torch.no_grad():
        plain = model(prompt).cache
        cache = npc.enable(model, pool_bytes=64 << 20)
        ours = model(prompt).cache
        assert isinstance(ours, PagedCache)
        assert (len(ours), ours.get_seq_length(), ours.get_max_length()) == (4, 520, -1)
        assert len(ours.layers) == 4
        assert cache.stats().leases == 0
        ours.crop(-10)
        plain.crop(-10)
        assert ours.get_seq_length() == plain.get_seq_length()
        for mine, theirs in zip(ours.layers, plain.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys)
        more = tokens(3, seed=4)
        torch.testing.assert_close(model(more, cache=ours).logits, model(more, cache=plain).logits)


def test_a_returned_cache_can_be_continued(model) -> None:
    prompt = join(SYSTEM, tokens(20))

    def two_turns() -> torch.Tensor:
        out = model.generate(prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        more = join(out.sequences, tokens(7, seed=3))
        return model.generate(more, cache=out.cache, max_new_tokens=5, do_sample=False)

    plain = two_turns()
    cache = npc.enable(model, pool_bytes=64 << 20)
    assert torch.equal(two_turns(), plain)
    gc.collect()
    assert cache.stats().leases == 0


@pytest.mark.parametrize("keep", ["dict", "hook"])
def test_a_cache_that_somebody_kept_goes_on(model, keep: str) -> None:
    prompt = join(SYSTEM, tokens(5))
    kept: list[object] = []
    hook = model.register_forward_hook(lambda mod, args, out: kept.append(out.cache))
    cache = npc.enable(model, pool_bytes=64 << 20)
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    more = tokens(3, seed=7)
    with torch.no_grad():
        ours = model(more, cache=kept[-1]).logits
        npc.disable(model)
        kept.clear()
        model.generate(prompt, max_new_tokens=2, do_sample=False)
        torch.testing.assert_close(ours, model(more, cache=kept[-1]).logits, rtol=1e-4, atol=1e-4)
    kept.clear()
    hook.remove()
    del cache


def test_a_reused_input_buffer_does_not_change_what_is_cached(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    prompt = SYSTEM.clone()
    buffer = torch.empty(1, 1, dtype=torch.long)
    with torch.no_grad():
        output = model(prompt, logits_to_keep=1)
        prompt.zero_()
        for token in (11, 22, 33):
            buffer[0, 0] = token
            output = model(buffer, cache=output.cache)
    assert cache.lookup(SYSTEM[0].tolist() + [11, 22, 33]).cached_tokens == 503
    assert cache.lookup([0] * 500) is None


def test_a_copy_of_a_cache_is_a_dense_cache_of_its_own(model) -> None:
    prompt, more = join(SYSTEM, tokens(5)), tokens(3, seed=7)
    with torch.no_grad():
        plain = model(prompt).cache
        expected = model(more, cache=plain).logits
        npc.enable(model, pool_bytes=64 << 20)
        ours = model(prompt).cache
        copied = copy.deepcopy(ours)
        assert isinstance(ours, DynamicCache)
        assert type(copied) is DynamicCache
        assert ours.dense is None
        torch.testing.assert_close(model(more, cache=copied).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(more, cache=ours).logits, expected, rtol=1e-4, atol=1e-4)
        assert len(list(ours)) == 4


def test_closing_a_cache_for_which_there_is_no_memory_still_closes(model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    with torch.no_grad():
        kept = model(SYSTEM).cache

    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(DynamicCache, "update", fail)
    with pytest.raises(MemoryError):
        cache.close()
    with pytest.raises(npc.CacheClosed):
        cache.stats()
    del kept


def test_closing_the_cache_leaves_running_conversations_alone(model) -> None:
    prompt, more = join(SYSTEM, tokens(5)), tokens(3, seed=7)
    with torch.no_grad():
        expected = model(more, cache=model(prompt).cache).logits
        cache = npc.enable(model, pool_bytes=64 << 20)
        ours = model(prompt).cache
        cache.close()
        torch.testing.assert_close(model(more, cache=ours).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_whose_request_failed_is_not_used_on(model) -> None:
    npc.enable(model, pool_bytes=64 << 20)
    kept: list[PagedCache] = []

    class Failing(Collecting):
        def put(self, value: torch.Tensor) -> None:
            if kept:
                raise OSError("in the streamer")

    hook = model.register_forward_hook(lambda mod, args, out: kept.append(out.cache))
    with pytest.raises(OSError, match="in the streamer"):
        model.generate(SYSTEM, max_new_tokens=5, streamer=Failing())
    hook.remove()
    with pytest.raises(npc.LeaseReleased, match="failed"), torch.no_grad():
        model(tokens(1), cache=kept[0])


def test_tenants_share_nothing(model) -> None:
    prompt = join(SYSTEM, tokens(5))
    plain = model.generate(prompt, max_new_tokens=3, do_sample=False)
    cache = npc.enable(model, pool_bytes=64 << 20)
    for tenant, new in [("a", 505), ("b", 505), ("a", 1)]:
        before = computed(cache)
        with cache.salted(tenant):
            assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), plain)
        assert computed(cache) - before == new
    assert cache.lookup(prompt[0]) is None
    assert cache.lookup(prompt[0], salt="a").cached_tokens == 505


def test_generate_has_the_priority_around_it(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    with cache.prioritized(2):
        model.generate(tokens(300, seed=1), max_new_tokens=3)
    model.generate(tokens(300, seed=2), max_new_tokens=3)
    first = [entry[0] for entry in cache._core.eviction_order()]
    assert first == [int(tokens(1, seed=2))] * 3 + [int(tokens(1, seed=1))] * 3


def test_what_generate_publishes_at_the_second_sighting(model) -> None:
    prompt = join(SYSTEM, tokens(20))
    plain = model.generate(prompt, max_new_tokens=5, do_sample=False)
    cache = npc.enable(model, pool_bytes=64 << 20, admission="second_sighting")
    for cached in (0, 524, 524):  # what the second request published is there when it has ended
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), plain)
        found = cache.lookup(plain[0])
        assert (found.cached_tokens if found else 0) == cached
    assert cache.stats().hit_tokens == 519 + 2 * 524  # the third request, and two lookups


@pytest.mark.parametrize("mask", ["holes", "right"])
def test_chunked_prefill_with_odd_masks_runs_untouched(model, mask: str) -> None:
    prompt = SYSTEM[:, :250]
    seen = torch.ones_like(prompt)
    seen[0, slice(120, 240) if mask == "holes" else slice(-20, None)] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": seen, "prefill_chunk_size": 100}
    plain = model.generate(prompt, **options)
    npc.enable(model, pool_bytes=64 << 20)
    assert torch.equal(model.generate(prompt, **options), plain)


def test_chunked_prefill(model) -> None:
    prompt = join(SYSTEM, tokens(20))
    options = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 100}
    plain = model.generate(prompt, **options)
    npc.enable(model, pool_bytes=64 << 20)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, **options), plain)


# ---- what runs untouched ----


def bypasses(cache: npc.PromptCache) -> bool:
    stats = cache.stats()
    return stats.lookups == 0 and stats.entries == 0


def test_training_runs_untouched(model) -> None:
    prompt = tokens(20)
    cache = npc.enable(model, pool_bytes=64 << 20)
    model(prompt, labels=prompt).loss.backward()  # eval mode, but with gradients
    model(prompt).logits.sum().backward()
    model.requires_grad_(False)
    model.enable_input_require_grads()
    for _ in range(2):
        model(prompt).logits.sum().backward()
    model.disable_input_require_grads()
    model.requires_grad_(True)
    assert model.lm_head.weight.grad.abs().sum() > 0
    model.train()
    with torch.no_grad():
        model(prompt)
    model.eval()
    assert bypasses(cache)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ],
    ids=str,
)
def test_generation_that_is_not_served_runs_untouched(model, options: dict[str, object]) -> None:
    prompt = join(SYSTEM[:, :50], tokens(5))
    options = {"max_new_tokens": 5, "do_sample": False, **options}

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        out = model.generate(prompt, **options)
        return out if isinstance(out, torch.Tensor) else out.sequences

    plain = run()
    cache = npc.enable(model, pool_bytes=64 << 20)
    assert torch.equal(run(), plain)
    assert bypasses(cache)


def test_forwards_that_are_not_served_run_untouched(model) -> None:
    prompt = tokens(12)
    holes = torch.ones_like(prompt)
    holes[0, 3:5] = 0
    right_padded = torch.ones_like(prompt)
    right_padded[0, -2:] = 0
    own = [DynamicCache(config=model.config) for _ in range(2)]
    calls = [
        lambda n: model(inputs_embeds=model.get_input_embeddings()(prompt)).logits,
        lambda n: model(prompt, attention_mask=holes).logits,
        lambda n: model(prompt, attention_mask=right_padded).logits,
        lambda n: model(prompt, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()).logits,
        lambda n: model(prompt, position_ids=torch.arange(5, 17)[None]).logits,
        lambda n: model(prompt, output_hidden_states=True).hidden_states[2],
        lambda n: model(prompt, labels=prompt).loss,
        lambda n: model(prompt, use_cache=False).logits,
        lambda n: model(prompt, logits_to_keep=slice(-2, None)).logits,
        lambda n: model(prompt, logits_to_keep=torch.ones(12, dtype=torch.bool)).logits,
        lambda n: model(prompt, return_dict=False)[0],
        lambda n: model(prompt, cache=own[n]).logits,
        lambda n: model(tokens(1), cache=own[n]).logits,
    ]
    with torch.no_grad():
        plain = [call(0) for call in calls]
        cache = npc.enable(model, pool_bytes=64 << 20)
        for call, expected in zip(calls, plain, strict=True):
            assert torch.equal(call(1), expected)
    assert own[1].get_seq_length() == 13
    assert bypasses(cache)


def test_eager_attention_gives_its_weights_while_attached() -> None:
    model = tiny_model(attn_implementation="eager")
    with torch.no_grad():
        plain = model(tokens(12), output_attentions=True).attentions
        npc.enable(model, pool_bytes=64 << 20)
        ours = model(tokens(12), output_attentions=True).attentions
    assert len(ours) == 4
    assert torch.equal(ours[3], plain[3])
    npc.disable(model)


# ---- attach and detach ----


def state_of(model: transformers.PreTrainedModel) -> tuple[object, ...]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    attributes = {k: v for k, v in vars(model).items() if k != "_modules"}
    return attributes, model.config.to_dict(), model.config._attn_implementation, hooks, type(model)


def test_detach_restores_the_model_exactly(model) -> None:
    before = state_of(model)
    cache = npc.PromptCache.for_model(model, pool_bytes=64 << 20)
    handle = cache.attach(model)
    assert state_of(model) != before
    handle.detach()
    handle.detach()
    assert state_of(model) == before
    with cache.attach(model):
        model.generate(tokens(9), max_new_tokens=2, do_sample=False)
    assert state_of(model) == before
    npc.enable(model, pool_bytes=64 << 20)
    npc.disable(model)
    assert state_of(model) == before
    model.forward = own = model.forward  # somebody else's instance attribute
    with cache.attach(model):
        pass
    assert vars(model)["forward"] is own
    del model.forward
    cache.close()


def test_attaching_twice_is_refused(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a cache attached already"):
        cache.attach(model)
    with pytest.raises(ValueError, match="attached already"):
        npc.enable(model, pool_bytes=64 << 20)
    npc.disable(model)
    with pytest.raises(ValueError, match="no cache attached"):
        npc.disable(model)


def test_a_cache_that_does_not_fit_is_refused(model) -> None:
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        with pytest.raises(ValueError, match=r"num_layers=4.*does not fit.*num_layers=2"):
            cache.attach(tiny_model(num_hidden_layers=2))
        with pytest.raises(ValueError, match=r"float32.*does not fit.*bfloat16"):
            cache.attach(tiny_model().to(torch.bfloat16))


def test_models_that_share_a_config_are_attached_apart(model) -> None:
    prompt = join(SYSTEM, tokens(5))
    other = type(model)(model.config).eval()
    plain = [m.generate(prompt, max_new_tokens=3, do_sample=False) for m in (model, other)]
    npc.enable(model, pool_bytes=64 << 20)
    npc.enable(other, pool_bytes=64 << 20)
    npc.disable(model)
    for m, expected in zip((model, other), plain, strict=True):
        assert torch.equal(m.generate(prompt, max_new_tokens=3, do_sample=False), expected)
    npc.disable(other)
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_set_over_ours_runs_untouched(model) -> None:
    plain = model.generate(tokens(20), max_new_tokens=3, do_sample=False)
    cache = npc.enable(model, pool_bytes=64 << 20)
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(tokens(20), max_new_tokens=3, do_sample=False), plain)
    assert bypasses(cache)
    npc.disable(model)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")


def test_a_wrapper_over_our_forward_survives_detaching(model) -> None:
    plain = model.generate(tokens(20), max_new_tokens=3, do_sample=False)
    npc.enable(model, pool_bytes=64 << 20)
    ours, calls = model.forward, []

    @functools.wraps(ours)
    def wrapper(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return ours(*args, **kwargs)

    model.forward = wrapper
    assert torch.equal(model.generate(tokens(20), max_new_tokens=3, do_sample=False), plain)
    npc.disable(model)
    assert torch.equal(model.generate(tokens(20), max_new_tokens=3, do_sample=False), plain)
    assert model.forward is wrapper
    assert len(calls) == 6
    del model.forward


def test_detaching_while_other_threads_generate(model) -> None:
    prompt = join(SYSTEM, tokens(5))
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        for _ in range(4):
            handle = cache.attach(model)
            results: list[object] = []

            def work(results: list[object] = results) -> None:
                try:
                    results.append(model.generate(prompt, max_new_tokens=12, do_sample=False))
                except BaseException as error:
                    results.append(error)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.03)
            handle.detach()
            for thread in threads:
                thread.join()
            for result in results:
                assert isinstance(result, torch.Tensor), result
                assert torch.equal(result, plain)
            assert model.config._attn_implementation == "sdpa"


def test_a_forward_that_was_called_before_the_model_was_detached_leaves_the_next_attachment_alone(model) -> None:
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        before = cache.attach(model)
        called = model.forward._replacement  # a thread that was stopped here, and goes on now
        before.detach()
        with cache.attach(model), torch.no_grad():
            name = model.config._attn_implementation
            called(type(model).forward.__get__(model), input_ids=tokens(20))
            assert model.config._attn_implementation == name
            model(tokens(20))
            assert cache.stats().lookups == 1
        assert model.config._attn_implementation == "sdpa"


def test_a_model_that_was_given_another_config_is_detached_without_a_trace(model) -> None:
    uses = dict(_AttentionUse._of_config)
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache, cache.attach(model):
        model.config = copy.deepcopy(model.config)
    assert model.config._attn_implementation == "sdpa"
    assert uses == _AttentionUse._of_config  # by ids, which other configs will have


def test_of_two_threads_that_attach_one_succeeds(model, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    monkeypatch.setattr(media, "prepare", lambda model: both.wait(timeout=10))  # both found it free
    refused: list[ValueError] = []

    def attach(cache: npc.PromptCache) -> None:
        try:
            cache.attach(model)
        except ValueError as error:
            refused.append(error)

    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        threads = [threading.Thread(target=attach, args=(cache,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "attached already" in str(refused.pop())
        assert not refused
    assert "forward" not in vars(model)


def test_attaching_again_over_somebodys_wrapper(model) -> None:
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        handle = cache.attach(model)
        ours = model.forward
        model.forward = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
        handle.detach()
        with cache.attach(model):
            for expected in (500, 501):
                model.generate(SYSTEM, max_new_tokens=1, do_sample=False)
                assert computed(cache) == expected
    del model.forward


def test_attachments_in_the_middle_of_a_forward(model) -> None:
    prompt = join(SYSTEM, tokens(5))
    plain = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        handle = cache.attach(model)

        def meddle(*args: object) -> None:
            hook.remove()
            handle.detach()
            cache.attach(model).detach()

        hook = model.model.layers[1].register_forward_hook(meddle)
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), plain)
    assert model.config._attn_implementation == "sdpa"


def test_looking_at_the_layers_in_the_middle_of_a_forward(model) -> None:
    prompt, more = join(SYSTEM, tokens(5)), tokens(3, seed=7)
    looked: list[int] = []

    def look(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> None:
        looked.append(len(kwargs["cache"].layers))

    hook = model.model.layers[2].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        plain = model.generate(prompt, max_new_tokens=4, do_sample=False)
        expected = model(more, cache=model(prompt).cache).logits
        cache = npc.enable(model, pool_bytes=64 << 20)
        other = cache.acquire(list(range(300)))
        flat = cache.key(0).view(-1, 2, 16)
        flat[torch.from_numpy(other.slots(0, 300))] = 7.0
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), plain)
        torch.testing.assert_close(model(more, cache=model(prompt).cache).logits, expected, rtol=1e-4, atol=1e-4)
    assert (flat[torch.from_numpy(other.slots(0, 300))] == 7.0).all()
    assert len(looked) > 10
    other.release()
    hook.remove()


def test_closing_while_other_threads_generate(model) -> None:
    prompt = join(SYSTEM, tokens(5))
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    for delay_ms in (5, 15, 30, 45):
        cache = npc.enable(model, pool_bytes=64 << 20)
        results: list[object] = []

        def work(results: list[object] = results) -> None:
            try:
                results.append(model.generate(prompt, max_new_tokens=12, do_sample=False))
            except npc.CacheClosed:
                results.append(None)  # its forward had begun: it was told
            except BaseException as error:
                results.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(delay_ms / 1e3)
        cache.close()
        for thread in threads:
            thread.join()
        for result in results:
            assert result is None or torch.equal(result, plain), result


def test_closing_while_other_threads_make_caches(model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = npc.PromptCache.for_model(model, pool_bytes=64 << 20)
    make = cache.attach(model)._new_cache
    left: list[PagedCache] = []
    monkeypatch.setattr(PagedCache, "leave_pool", lambda paged: left.append(paged))
    kept = [make(in_generate=False) for _ in range(5000)]
    has_begun, is_closed = threading.Event(), threading.Event()

    def work() -> None:
        while not is_closed.is_set():
            kept.append(make(in_generate=False))
            has_begun.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        has_begun.wait(timeout=10)
        cache.close()
    finally:
        is_closed.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(left) >= 5000


def test_closing_the_cache_detaches(model) -> None:
    before = state_of(model)
    cache = npc.enable(model, pool_bytes=64 << 20)
    cache.close()
    assert state_of(model) == before
    model.generate(tokens(5), max_new_tokens=2)


def test_two_models_on_one_cache_share_nothing() -> None:
    first, second = tiny_model(), tiny_model()
    with torch.no_grad():
        second.lm_head.weight.copy_(first.lm_head.weight.flip(0))
    prompt = join(SYSTEM, tokens(5))
    plain = [m.generate(prompt, max_new_tokens=5, do_sample=False) for m in (first, second)]
    with (
        npc.PromptCache.for_model(first, pool_bytes=64 << 20) as cache,
        cache.attach(first),
        cache.attach(second),
    ):
        for _ in range(2):
            for m, expected in zip((first, second), plain, strict=True):
                assert torch.equal(m.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        assert cache.stats().hit_tokens == 2 * 504


def test_a_copy_of_an_attached_model_is_a_model_of_its_own(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        assert copied(tokens(5)).logits.abs().sum() == 0
        assert model(tokens(5)).logits.abs().sum() > 0
    copied.generate(tokens(5), max_new_tokens=2)
    assert cache.stats().lookups == 1


def test_an_attached_model_can_be_saved(model, tmp_path: Path) -> None:
    plain = model.generate(tokens(5), max_new_tokens=3, do_sample=False)
    npc.enable(model, pool_bytes=64 << 20)
    torch.save(model, tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "pretrained")
    for loaded in (
        torch.load(tmp_path / "model.pt", weights_only=False),
        AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained"),
    ):
        assert "attachment" not in vars(vars(loaded).get("forward", loaded))
        assert torch.equal(loaded.generate(tokens(5), max_new_tokens=3, do_sample=False), plain)


def test_autocast_and_another_dtype_run_untouched(model) -> None:
    prompt = tokens(12)

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = model.generate(prompt, max_new_tokens=3, do_sample=False)
        model.to(torch.bfloat16)
        second = model.generate(prompt, max_new_tokens=3, do_sample=False)
        model.to(torch.float32)
        return [first, second]

    plain = run()
    cache = npc.enable(model, pool_bytes=64 << 20)
    for ours, theirs in zip(run(), plain, strict=True):
        assert torch.equal(ours, theirs)
    assert bypasses(cache)


def swap_mlps(model: transformers.PreTrainedModel) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def move_in_a_bank(model: transformers.PreTrainedModel) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = torch.randn(2, *weight.shape, generator=torch.Generator().manual_seed(1))[1]


def another_dictionary(model: transformers.PreTrainedModel) -> None:
    norm = model.model.norm
    norm._parameters = {"weight": torch.nn.Parameter(norm.weight * 2)}


CHANGES = {
    "in place": lambda m: m.model.layers[1].mlp.down_proj.weight.mul_(1.5),
    "another parameter": lambda m: setattr(m.model.norm, "weight", torch.nn.Parameter(torch.rand(64))),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 0.01 for k, v in m.state_dict().items()}),
    "moved": lambda m: m.to(torch.float64).to(torch.float32),
    "another module": lambda m: setattr(m.model.layers[2].mlp, "down_proj", torch.nn.Linear(96, 64, bias=False)),
    "modules swapped": swap_mlps,
    "data in a bank": move_in_a_bank,
    "pruned": lambda m: torch.nn.utils.prune.l1_unstructured(m.model.layers[0].mlp.down_proj, "weight", 0.7),
    "a buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(0.25),
    "a forward": lambda m: setattr(m.model.layers[1].mlp, "forward", lambda x: x * 0.5),
    "hooks taken away": lambda m: setattr(m.model.layers[0], "_forward_hooks", OrderedDict()),
    "parameters in another dictionary": another_dictionary,
    "a hook": lambda m: m.model.layers[0].register_forward_hook(lambda mod, args, out: out * 1.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("attached", [True, False])
def test_a_model_that_changed_is_never_hit(model, change: str, attached: bool) -> None:
    prompt = join(SYSTEM, tokens(5))
    model.model.layers[0].register_forward_hook(lambda mod, args, out: out * 0.9)
    cache = npc.PromptCache.for_model(model, pool_bytes=64 << 20)
    handle = cache.attach(model)
    model.generate(prompt, max_new_tokens=3, do_sample=False)
    if not attached:
        handle.detach()
    with torch.no_grad():
        CHANGES[change](model)
    if not attached:
        handle = cache.attach(model)
    assert cache.lookup(prompt[0]) is None
    before = computed(cache)
    out = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert computed(cache) - before == 505
    assert torch.equal(out, model.generate(prompt, max_new_tokens=3, do_sample=False))
    assert computed(cache) - before == 506
    handle.detach()
    assert torch.equal(out, model.generate(prompt, max_new_tokens=3, do_sample=False))
    cache.close()


def test_a_hook_on_all_modules_is_seen(model) -> None:
    prompt = tokens(20)
    cache = npc.enable(model, pool_bytes=64 << 20)
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda mod, args, out: None)
    try:
        assert cache.lookup(prompt[0]) is None
    finally:
        hook.remove()


def test_keys_that_contradict_the_config_are_refused_by_layer(model) -> None:
    model.config.head_dim = 32
    cache = npc.enable(model, pool_bytes=64 << 20)
    found = (
        r"layer 0 computes K of \(1, 2, 20, 16\) torch.float32; its config promises \[1, 2, tokens, 32\] torch.float32"
    )
    with pytest.raises(npc.UnsupportedModel, match=found):
        model.generate(tokens(20), max_new_tokens=1, do_sample=False)
    assert nothing_left(cache)


def test_detaching_keeps_the_entries(model) -> None:
    prompt = join(SYSTEM, tokens(5))
    with npc.PromptCache.for_model(model, pool_bytes=64 << 20) as cache:
        for expected in (505, 506):
            with cache.attach(model):
                model.generate(prompt, max_new_tokens=1, do_sample=False)
            assert computed(cache) == expected


class Adapter(torch.nn.Module):
    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) * 2


def test_adapters_are_refused_and_bypassed(model) -> None:
    prompt = tokens(20)
    cache = npc.enable(model, pool_bytes=64 << 20)
    layer = model.model.layers[0].mlp
    layer.up_proj = Adapter(layer.up_proj)
    with pytest.warns(CacheBypassWarning, match="adapter layers"):
        out = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert cache.stats().entries == 0
    npc.disable(model)
    assert torch.equal(out, model.generate(prompt, max_new_tokens=3, do_sample=False))
    assert "adapter layers" in refused(model)


def test_weights_that_change_in_the_middle_of_generate_publish_nothing(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)

    class Changing(Collecting):
        def put(self, value: torch.Tensor) -> None:
            with torch.no_grad():
                model.model.norm.weight.mul_(1.01)

    model.generate(tokens(20), max_new_tokens=5, do_sample=False, streamer=Changing())
    assert nothing_left(cache)


def refused(model: object) -> str:
    with pytest.raises(npc.UnsupportedModel) as caught:
        npc.enable(model, pool_bytes=64 << 20)
    return str(caught.value)


def test_unsupported_architectures_are_refused_by_name() -> None:
    bloom = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=2, vocab_size=50)
    assert "BloomForCausalLM cannot use the prompt cache: its forward takes no position_ids" in refused(
        AutoModelForCausalLM.from_config(bloom)
    )
    mamba = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=4)
    assert "MambaForCausalLM" in refused(AutoModelForCausalLM.from_config(mamba))
    t5 = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
    assert "encoder-decoder" in refused(transformers.AutoModelForSeq2SeqLM.from_config(t5))
    assert "with generate()" in refused(tiny_model().model)
    assert "Linear cannot use" in refused(torch.nn.Linear(2, 2))
    assert "attn_implementation 'flex_attention'" in refused(tiny_model(attn_implementation="flex_attention"))


# ---- when things go wrong ----


def nothing_left(cache: npc.PromptCache) -> bool:
    gc.collect()
    stats = cache.stats()
    cache.check_integrity()
    return (stats.leases, stats.pinned_entries, stats.leased_bytes, stats.entries) == (0, 0, 0, 0)


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_an_exception_in_layer_3_publishes_nothing(model, call: str) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    prompt = join(SYSTEM, tokens(9))

    def fail(*args: object) -> None:
        raise OSError("in layer 3")

    hook = model.model.layers[3].register_forward_hook(fail)
    with pytest.raises(OSError, match="in layer 3") as caught, torch.no_grad():
        model.generate(prompt, max_new_tokens=3) if call == "generate" else model(prompt)
    hook.remove()
    assert nothing_left(cache)  # while the traceback is held
    del caught
    model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert cache.stats().entries > 0


def test_a_keyboard_interrupt_in_generate_publishes_nothing(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)

    class Interrupting(Collecting):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) > 512:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        model.generate(join(SYSTEM, tokens(9)), max_new_tokens=30, streamer=Interrupting())
    assert nothing_left(cache)  # while the traceback is held
    del caught


def one_warning(caught: list[warnings.WarningMessage]) -> bool:
    return [w.category for w in caught] == [CacheBypassWarning] and "running uncached" in str(caught[0].message)


def small_pool(**changes: object) -> tuple[transformers.PreTrainedModel, dict[str, int]]:
    """A model whose tokens are so wide that the smallest pool holds 15 blocks of 128 of them."""
    options = {"num_key_value_heads": 4, "head_dim": 64, "hidden_size": 64, "max_position_embeddings": 8192}
    return tiny_model(**{**options, **changes}), {"pool_bytes": 16 << 20, "watermark_bytes": 0}


def test_a_prompt_longer_than_the_pool_runs_uncached() -> None:
    model, pool = small_pool()
    prompt = tokens(2100)
    plain = model.generate(prompt, max_new_tokens=5, do_sample=False)
    cache = npc.enable(model, **pool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), plain)
    assert one_warning(caught)
    assert nothing_left(cache)
    npc.disable(model)


def test_a_pool_pinned_by_other_leases_runs_uncached() -> None:
    model, pool = small_pool()
    batch = left_padded([tokens(200), tokens(90, seed=1)])
    plain = model.generate(**batch, max_new_tokens=5, do_sample=False)
    cache = npc.enable(model, **pool)
    pinned = cache.acquire(list(range(14 * 128)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), plain)
    assert one_warning(caught)
    pinned.release()
    assert nothing_left(cache)
    npc.disable(model)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pool_that_runs_out_while_decoding_goes_on_outside_it(rows: int) -> None:
    model, pool = small_pool()
    batch = left_padded([join(SYSTEM[:, :100], tokens(10 + 7 * row, seed=row)) for row in range(rows)])
    plain = model.generate(**batch, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    cache = npc.enable(model, **pool)
    pinned = cache.acquire(list(range((15 - rows) * 128)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = model.generate(**batch, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    assert torch.equal(out, plain)
    assert one_warning(caught)
    pinned.release()
    assert nothing_left(cache)
    npc.disable(model)


@pytest.mark.parametrize("function", ["aclrtMemcpyAsync", "aclrtSynchronizeStream"])
def test_a_runtime_that_fails_lets_the_request_run_uncached(model, function: str) -> None:
    prompt = join(SYSTEM, tokens(9))
    plain = model.generate(prompt, max_new_tokens=5, do_sample=False)
    cache = npc.enable(model, pool_bytes=64 << 20)
    model.generate(SYSTEM, max_new_tokens=1, do_sample=False)
    with sim.failing(function, times=None), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), plain)
    assert one_warning(caught)
    assert cache.stats().leases == 0


def test_threads_generate_at_once(model) -> None:
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in range(10, 18)]
    plain = [model.generate(p, max_new_tokens=6, do_sample=False) for p in prompts]
    cache = npc.enable(model, pool_bytes=64 << 20)
    results: list[torch.Tensor | BaseException | None] = [None] * 8

    def work(place: int) -> None:
        try:
            for _ in range(3):
                results[place] = model.generate(prompts[place], max_new_tokens=6, do_sample=False)
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, expected in zip(results, plain, strict=True):
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, expected)
    assert cache.stats().leases == 0


def test_no_kv_goes_through_the_host(model) -> None:
    cache = npc.enable(model, pool_bytes=64 << 20)
    sim.reset_counters()
    for seed in range(4):
        model.generate(join(SYSTEM, tokens(20, seed=seed)), max_new_tokens=5, do_sample=False)
    counters = sim.counters()
    assert (counters.copy_bytes["H2D"], counters.copy_bytes["D2H"], counters.calls["aclrtMalloc"]) == (
        0,
        0,
        0,
    )
    assert 0 < counters.copy_bytes["D2D"] <= 3 * cache.layout.block_bytes
