"""Every way of generating gives with the cache what it gives without, from as few tokens as it can."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
import transformers
from tiny import EOS, PAD, VOCABULARY, Embedded, join, left_padded, tiny_model, tokens
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import CacheBypassWarning

BLOCK = 16
PROMPT = tokens(2 * BLOCK + 8, seed=100)
P = PROMPT.shape[1]
NEW = 12
#: Rows of one batch: they begin alike, and two of them are the beginning of a third.
ROWS = [PROMPT[:, : BLOCK + 3], PROMPT, join(PROMPT[:, :BLOCK], tokens(9, seed=1)), PROMPT[:, :BLOCK]]
LENGTHS = [row.shape[1] for row in ROWS]
PADDING = len(ROWS) * P - sum(LENGTHS)
#: What the rows have in common with the rows before them, and need not compute; the last token of each they must.
ALIKE = (BLOCK + 3) + BLOCK + (BLOCK - 1)
#: Text that repeats itself: what prompt lookup drafts from it is accepted now and then.
REFRAIN = join(*[tokens(6, seed=3)] * 6)


def generate(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, **options: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(prompt, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options})


def batch(model: PreTrainedModel, **options: Any) -> Any:
    padded = left_padded(ROWS)
    return generate(model, padded["input_ids"], attention_mask=padded["attention_mask"], **options)


def right_padded(model: PreTrainedModel, **options: Any) -> Any:
    padded = {name: value.flip(1) for name, value in left_padded([row.flip(1) for row in ROWS]).items()}
    return generate(model, padded["input_ids"], attention_mask=padded["attention_mask"], **options)


def enable(model: PreTrainedModel, pool_bytes: int = 32 << 20) -> npc.PromptCache:
    return npc.enable(model, pool_bytes=pool_bytes, block_size=BLOCK)


class Halving(transformers.LogitsProcessor):
    """Depends on all ids so far."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, input_ids[0]] *= 0.5
        return scores


class UntilMultipleOf(transformers.StoppingCriteria):
    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, P:].sum(dim=1) % self._number == 0


class Collecting(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def streamed(model: PreTrainedModel, **options: Any) -> Any:
    streamer = Collecting()
    return generate(model, streamer=streamer, **options), streamer.got


def of_own(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    ahead: int = 2,
    **model_kwargs: Any,
) -> torch.Tensor:
    """A loop of the user's: drafts tokens, looks at them all, and takes all but the first back."""
    cache = model_kwargs["cache"]
    cache.activate_past_recording()
    model(input_ids[:, :-1], cache=cache, logits_to_keep=1)
    while input_ids.shape[1] < generation_config.max_length:
        drafted = torch.full((len(input_ids), ahead), 7)
        output = model(torch.cat([input_ids[:, -1:], drafted], dim=1), cache=cache)
        output.cache.crop(-ahead)
        cache = output.cache
        input_ids = torch.cat([input_ids, output.logits[:, 0].argmax(-1, keepdim=True)], dim=1)
    return input_ids


def from_directory(model: PreTrainedModel) -> Any:
    return generate(model, custom_generate=str(Path(__file__).parent / "greedy_repo"), trust_remote_code=True)


def in_inference_mode(model: PreTrainedModel) -> Any:
    with torch.inference_mode():
        return generate(model)


def own_cache(model: PreTrainedModel) -> Any:
    cache, text = DynamicCache(config=model.config), PROMPT
    for turn in range(3):
        text = generate(model, join(text, tokens(4, seed=turn)), cache=cache)
    return text, cache.get_seq_length()


def chat(model: PreTrainedModel) -> Any:
    """Each turn goes on with the cache that the turn before returned."""
    text, cache = PROMPT, None
    for turn in range(3):
        out = generate(model, join(text, tokens(4, seed=turn)), cache=cache, return_dict_in_generate=True)
        text, cache = out.sequences, out.cache
    return text, cache.get_seq_length()


def cropped_chat(model: PreTrainedModel) -> Any:
    """A turn is taken back, and another one said."""
    first = generate(model, return_dict_in_generate=True)
    again = join(first.sequences[:, :-5], tokens(4, seed=8))
    first.cache.crop(-5)
    return generate(model, again, cache=first.cache)


class Mode(NamedTuple):
    """A way of generating, and what it does not send through the model, of the tokens that it sends without a cache."""

    call: Callable[[PreTrainedModel], Any]
    saved_cold: int
    saved_hit: int


def one(saved_hit: int = P - 1, **options: Any) -> Mode:
    return Mode(functools.partial(generate, **options), 0, saved_hit)


def times(count: int, **options: Any) -> Mode:
    """Rows of one prompt: all but the first compute its last token only."""
    return Mode(functools.partial(generate, **options), (count - 1) * (P - 1), count * (P - 1))


def refused(model: PreTrainedModel, **options: Any) -> tuple[type[Exception], str]:
    with pytest.raises(ValueError, match="trust_remote_code") as caught:
        generate(model, **options)
    return caught.type, str(caught.value)


SAMPLED = {"do_sample": True, "top_k": 40, "temperature": 0.9}
DICT = {"return_dict_in_generate": True}
MODES = {
    "greedy": one(),
    "sampled": one(**SAMPLED),
    "sampled by top_p and min_p": one(do_sample=True, top_p=0.9, min_p=0.02, typical_p=0.9),
    "processors": one(
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=[[17], [20, 21]],
        suppress_tokens=[30],
        exponential_decay_length_penalty=(4, 1.1),
        forced_eos_token_id=EOS,
        logits_processor=LogitsProcessorList([Halving()]),
    ),
    "allowed tokens": one(prefix_allowed_tokens_fn=lambda row, ids: list(range(3, 50 + len(ids)))),
    "stopping criteria": one(stopping_criteria=StoppingCriteriaList([UntilMultipleOf(5)]), max_new_tokens=60),
    "several ends": one(eos_token_id=list(range(3, 60)), min_new_tokens=3),
    "streamed": Mode(streamed, 0, P - 1),
    "scores and logits": one(output_scores=True, output_logits=True, **DICT, **SAMPLED),
    "hidden states": one(0, output_hidden_states=True, **DICT),
    "attentions": one(0, output_attentions=True, **DICT),
    "no cache": one(0, use_cache=False),
    "cache_implementation=dynamic": one(cache_implementation="dynamic"),
    "inference_mode": Mode(in_inference_mode, 0, P - 1),
    "prefill in chunks": one(BLOCK - 1, prefill_chunk_size=BLOCK),
    "a cache of one's own": Mode(own_cache, 0, 0),
    "chat": Mode(chat, 0, P + 4 - 1),
    "chat with a turn taken back": Mode(cropped_chat, 0, P - 1),
    "guided": one(guidance_scale=1.5, negative_prompt_ids=tokens(9, seed=4)),
    "left-padded batch": Mode(batch, PADDING + ALIKE, PADDING + sum(LENGTHS) - len(ROWS)),
    "sampled batch": Mode(functools.partial(batch, **SAMPLED), PADDING + ALIKE, PADDING + sum(LENGTHS) - len(ROWS)),
    "several sequences": times(3, num_return_sequences=3, **SAMPLED),
    "beams": times(4, num_beams=4),
    "several beams": times(4, num_beams=4, num_return_sequences=3, output_scores=True, output_logits=True, **DICT),
    "beams, sampled": times(3, num_beams=3, **SAMPLED),
    "beams that end early": times(
        4, num_beams=4, early_stopping=True, eos_token_id=list(range(3, 40)), min_new_tokens=1, max_new_tokens=20
    ),
    "beams for long": times(2, num_beams=2, max_new_tokens=60, min_new_tokens=60, length_penalty=0.5),
    "beams that never end early": times(
        3, num_beams=3, early_stopping="never", eos_token_id=[5, 6, 7, 8], min_new_tokens=1, length_penalty=-1.0
    ),
    "beams, no cache": Mode(functools.partial(generate, num_beams=4, use_cache=False), 0, 0),
    "beams of a batch": Mode(
        functools.partial(batch, num_beams=3, num_return_sequences=2),
        3 * PADDING + ALIKE + 2 * (sum(LENGTHS) - len(ROWS)),
        3 * PADDING + 3 * (sum(LENGTHS) - len(ROWS)),
    ),
    "beams in chunks": Mode(
        functools.partial(generate, num_beams=3, prefill_chunk_size=BLOCK), 2 * (BLOCK - 1), 3 * (BLOCK - 1)
    ),
    # These are not in transformers any more: it says where they went, as it does without a cache.
    "groups of beams": Mode(functools.partial(refused, num_beams=4, num_beam_groups=2, diversity_penalty=0.5), 0, 0),
    "words forced on beams": Mode(functools.partial(refused, num_beams=4, force_words_ids=[[17]]), 0, 0),
    "contrastive search": Mode(functools.partial(refused, penalty_alpha=0.6, top_k=4), 0, 0),
    "dola": Mode(functools.partial(refused, dola_layers="high"), 0, 0),
    "right-padded batch": Mode(right_padded, 0, 0),
    "prompt lookup": one(REFRAIN.shape[1] - 1, prompt=REFRAIN, prompt_lookup_num_tokens=4, max_matching_ngram_size=2),
    "prompt lookup, streamed": Mode(
        functools.partial(streamed, prompt=REFRAIN, prompt_lookup_num_tokens=3), 0, REFRAIN.shape[1] - 1
    ),
    "prompt lookup, sampled": one(prompt_lookup_num_tokens=4, **SAMPLED),
    "early exit": one(assistant_early_exit=2),
    "custom_generate": one(P - 2, custom_generate=of_own),
    "custom_generate from a directory": Mode(from_directory, 0, P - 1),
}


def same(ours: Any, plain: Any) -> None:
    """Equal in every id and word, near in every float."""
    assert type(ours) is type(plain) or isinstance(ours, DynamicCache)
    if isinstance(plain, torch.Tensor):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4 if plain.is_floating_point() else 0)
    elif isinstance(plain, DynamicCache):
        assert ours.get_seq_length() == plain.get_seq_length()
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys()
        for name in plain:
            same(ours[name], plain[name])
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain)
        for mine, theirs in zip(ours, plain, strict=True):
            same(mine, theirs)
    else:
        assert ours == plain


def nothing_is_held(cache: npc.PromptCache) -> bool:
    cache.check_integrity()
    stats = cache.stats()
    return (stats.leases, stats.leased_bytes, stats.pinned_entries) == (0, 0, 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_the_result_is_that_of_a_fresh_model(mode: str, attention: str) -> None:
    check(mode, *(tiny_model(attn_implementation=attention) for _ in range(2)))


def check(mode: str, fresh: PreTrainedModel, model: PreTrainedModel) -> None:
    """Cold and as a hit the result is the fresh model's, and as many tokens as are said do not go through the model."""
    call, saved_cold, saved_hit = MODES[mode]
    embedded = Embedded(fresh)
    plain, sent = call(fresh), embedded.take()
    embedded, cache = Embedded(model), enable(model)
    for saved in (saved_cold, saved_hit):
        same(call(model), plain)
        assert sent - embedded.take() == saved
    assert nothing_is_held(cache)
    npc.disable(model)


#: Of other shapes: learned positions, a window shorter than the prompts, windows and sinks, experts.
SHAPES: dict[str, dict[str, object]] = {
    "gpt2": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": 12},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 4},
    "qwen3": {},
}


@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize(
    "mode", ["beams of a batch", "prompt lookup", "early exit", "custom_generate", "sampled batch"]
)
def test_models_of_other_shapes(mode: str, model_type: str) -> None:
    if mode == "early exit" and model_type in ("gpt2", "gpt_oss"):
        pytest.skip("their layers are not counted anew at each forward: transformers fails without a cache too")
    check(mode, *(tiny_model(model_type, **SHAPES[model_type]) for _ in range(2)))


#: What deterministic mode need not compute: whole blocks that are cached, and nothing of what rows share.
DETERMINISTIC = {"beams": (0, 4 * 2 * BLOCK), "prompt lookup": (0, 2 * BLOCK), "sampled batch": (PADDING, PADDING + 64)}


@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_deterministic_mode(mode: str) -> None:
    fresh, model = tiny_model(), tiny_model()
    embedded = Embedded(fresh)
    plain, sent = MODES[mode].call(fresh), embedded.take()
    embedded = Embedded(model)
    cache = npc.enable(model, pool_bytes=32 << 20, block_size=BLOCK, deterministic=True)
    for saved in DETERMINISTIC[mode]:
        same(MODES[mode].call(model), plain)
        assert sent - embedded.take() == saved
    assert nothing_is_held(cache)
    npc.disable(model)


# ---- rows that part, columns that go ----


class Twin:
    """A model with the cache and one without, each with its own cache object: what is done to one is done to both."""

    def __init__(self, pool_bytes: int = 32 << 20) -> None:
        self.models = [tiny_model(), tiny_model()]
        self.cache = enable(self.models[0], pool_bytes)
        self.caches: list[Any] = [None, None]
        self.ids = torch.zeros(0, 0, dtype=torch.long)

    def feed(self, ids: torch.Tensor, keep: int = 1) -> None:
        with torch.no_grad():
            outputs = [
                model(ids, cache=cache, logits_to_keep=keep)
                for model, cache in zip(self.models, self.caches, strict=True)
            ]
        self.caches = [output.cache for output in outputs]
        self.ids = torch.cat([self.ids.view(len(ids), -1), ids], dim=1)
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-4)

    def take(self, rows: torch.Tensor) -> None:
        for cache in self.caches:
            cache.reorder_cache(rows)
        self.ids = self.ids[rows]

    def crop(self, columns: int) -> None:
        for cache in self.caches:
            cache.crop(-columns)
        self.ids = self.ids[:, : self.ids.shape[1] - columns]

    def check_what_is_published(self) -> None:
        """Whatever is found of the texts that were fed has the K/V of just these texts."""
        for row in self.ids:
            found = self.cache.lookup(row)
            if found is not None:
                self.caches = [None, None]
                self.ids = self.ids[:0, :0]
                self.feed(torch.cat([row[: found.cached_tokens], tokens(3, seed=9)[0]])[None])


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_columns_come_and_go_in_the_pool(seed: int) -> None:
    twin, random = Twin(), torch.Generator().manual_seed(seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=random))

    twin.feed(tokens(BLOCK + draw(BLOCK), seed=seed).expand(1 + draw(3), -1), keep=1 + draw(3))
    fed = []
    for _ in range(30):
        rows, columns = twin.ids.shape
        match draw(6):
            case 0:
                twin.crop(draw(min(columns, 2 * BLOCK)))
            case 1:
                twin.take(torch.randint(rows, (1 + draw(4),), generator=random))
            case 2 if rows < 3:
                for cache in twin.caches:
                    cache.batch_repeat_interleave(2)
                twin.ids = twin.ids.repeat_interleave(2, dim=0)
            case 3:
                mask = torch.arange(rows) != draw(rows) if rows > 1 else torch.ones(1, dtype=torch.bool)
                for cache in twin.caches:
                    cache.batch_select_indices(mask)
                twin.ids = twin.ids[mask]
            case _:
                twin.feed(torch.randint(3, VOCABULARY, (rows, 1 + draw(6)), generator=random))
                fed += [row.clone() for row in twin.ids]
        assert twin.caches[0].dense is None
        assert twin.caches[0].get_seq_length() == twin.caches[1].get_seq_length() == twin.ids.shape[1]
        twin.cache.check_integrity()
    for row in fed[-20:]:
        twin.ids = row[None]
        twin.check_what_is_published()
    twin.caches.clear()
    assert nothing_is_held(twin.cache)
    npc.disable(twin.models[0])


def test_rows_of_a_padded_batch_keep_their_padding() -> None:
    twin, padded = Twin(), left_padded(ROWS)
    mask, positions = padded["attention_mask"], (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)

    def feed(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        outputs = [
            model(ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1)
            for model, cache in zip(twin.models, twin.caches, strict=True)
        ]
        twin.caches = [output.cache for output in outputs]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-4)

    with torch.no_grad():
        feed(padded["input_ids"], mask, positions)
        rows = torch.tensor([2, 2, 1, 3, 2])
        for cache in twin.caches:
            cache.reorder_cache(rows)
            cache.crop(-5)
        mask, positions = mask[rows][:, :-5], positions[rows]
        for step in range(3):
            mask = torch.cat([mask, torch.ones(5, 1, dtype=torch.long)], dim=1)
            feed(tokens(5, seed=step).T, mask, positions[:, -5:-4] + step)
        assert twin.caches[0].dense is None
    twin.caches.clear()
    assert nothing_is_held(twin.cache)
    npc.disable(twin.models[0])


def test_the_same_rows_stay_where_they_are() -> None:
    twin = Twin()
    twin.feed(torch.cat([tokens(20), tokens(20, seed=1)]))
    leases = list(twin.caches[0]._leases)
    twin.take(torch.tensor([0, 1]))
    assert twin.caches[0]._leases == leases
    twin.take(torch.tensor([1, 0]))
    assert twin.caches[0]._leases == leases[::-1]  # a row with one child moves, and nothing is copied
    assert twin.cache.stats().copies["D2D"] == 0
    npc.disable(twin.models[0])


def test_rows_and_columns_come_and_go_outside_the_pool() -> None:
    twin = Twin()
    twin.feed(torch.cat([tokens(20), tokens(20, seed=1)]))
    assert len(twin.caches[0].layers) == 4  # who reaches into it makes it dense
    for cache in twin.caches:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([True, True, False, True]))
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    twin.ids = torch.zeros(3, 17, dtype=torch.long)
    twin.feed(tokens(6, seed=2).view(3, 2))
    npc.disable(twin.models[0])


@pytest.mark.parametrize("way", ["take", "crop"])
def test_a_pool_without_room_for_a_copy_is_left(way: str) -> None:
    """Rows that part in the middle of a block need another one; so does a crop into a block that others read."""
    twin = Twin(pool_bytes=16 << 20)
    prompt = tokens(2 * BLOCK + 8)
    twin.feed(prompt.expand(2, -1))
    others = twin.cache.acquire([1] * (twin.cache.stats().free_bytes // twin.cache.layout.block_bytes * BLOCK))
    with pytest.warns(CacheBypassWarning, match="running uncached"):
        twin.take(torch.tensor([1, 1])) if way == "take" else twin.crop(3)
    assert twin.caches[0].dense is not None
    others.release()
    twin.feed(tokens(2, seed=3).expand(2, -1))
    twin.caches.clear()
    assert nothing_is_held(twin.cache)
    npc.disable(twin.models[0])


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 4}, {"num_beams": 3}, {"assistant_early_exit": 2}], ids=str
)
def test_a_pool_that_runs_out_in_the_middle_is_left(options: dict[str, Any], model_type: str) -> None:
    options = {"max_new_tokens": 60, "min_new_tokens": 60, **options}
    fresh, model = (tiny_model(model_type, **SHAPES.get(model_type, {})) for _ in range(2))
    plain = generate(fresh, REFRAIN, **options)
    cache = enable(model, pool_bytes=16 << 20)
    others = cache.acquire([1] * ((cache.stats().free_bytes // cache.layout.block_bytes - 5) * BLOCK))
    with pytest.warns(CacheBypassWarning, match="running uncached"):
        assert torch.equal(generate(model, REFRAIN, **options), plain)
    others.release()
    assert nothing_is_held(cache)
    npc.disable(model)


def test_a_cropped_step_of_generate_is_not_trusted_on() -> None:
    """Who takes columns from the cache between two steps gets what he gets without a prompt cache."""

    class Cropping(Collecting):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) == 5:
                seen[-1].crop(-2)

    seen: list[DynamicCache] = []

    def result(model: PreTrainedModel) -> torch.Tensor:
        hook = model.register_forward_hook(lambda module, args, output: seen.append(output.cache))
        text = generate(model, streamer=Cropping())
        hook.remove()
        return text

    plain, model = result(tiny_model()), tiny_model()
    enable(model)
    assert torch.equal(result(model), plain)
    seen.clear()
    npc.disable(model)


def test_beams_leave_the_text_of_each_for_the_next_turn() -> None:
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 2 * BLOCK}
    fresh = tiny_model()
    texts = generate(fresh, **options)
    turn = tokens(5, seed=7)
    plain = [generate(fresh, join(text[None], turn)) for text in texts]
    model = tiny_model()
    embedded, cache = Embedded(model), enable(model)
    assert torch.equal(generate(model, **options), texts)
    embedded.take()
    for text, expected in zip(texts, plain, strict=True):
        assert torch.equal(generate(model, join(text[None], turn)), expected)
        assert embedded.take() == 1 + turn.shape[1] + NEW - 1
    assert nothing_is_held(cache)
    npc.disable(model)


# ---- rows of a batch that begin alike ----


@pytest.mark.parametrize("cached", [0, 5, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("shared", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8])
def test_a_common_prefix_goes_through_the_model_once(shared: int, cached: int) -> None:
    common = tokens(2 * BLOCK + 8, seed=50)[:, :shared]
    padded = left_padded([join(common, torch.tensor([[10 + row]]), tokens(row, seed=row)) for row in range(8)])
    fresh, model = tiny_model(), tiny_model()
    plain = generate(fresh, padded["input_ids"], attention_mask=padded["attention_mask"])
    embedded, cache = Embedded(model), enable(model)
    if cached:
        generate(model, common[:, :cached])
        embedded.take()
    assert torch.equal(generate(model, padded["input_ids"], attention_mask=padded["attention_mask"]), plain)
    own = sum(1 + row for row in range(8))
    assert embedded.take() == max(shared - cached, 0) + own + 8 * (NEW - 1)
    assert cache.stats().copies["H2D"] == cache.stats().copies["D2H"] == 0
    assert nothing_is_held(cache)
    npc.disable(model)


@pytest.mark.parametrize(("keep", "kept"), [(0, P), (3, 3), (torch.tensor([5, -1]), P - 5)])
def test_rows_share_nothing_whose_logits_are_asked_for(keep: int | torch.Tensor, kept: int) -> None:
    fresh, model = tiny_model(), tiny_model()
    batch = PROMPT.expand(3, -1)
    embedded, _ = Embedded(model), enable(model)
    with torch.no_grad():
        plain = fresh(batch, logits_to_keep=keep).logits
        for saved in (2 * (P - kept), 3 * (P - kept)):
            torch.testing.assert_close(model(batch, logits_to_keep=keep).logits, plain, rtol=0, atol=1e-4)
            assert 3 * P - embedded.take() == saved
    npc.disable(model)


def test_a_failed_forward_of_rows_that_share_leaves_nothing() -> None:
    model = tiny_model()
    cache = enable(model)

    def fail(*args: object) -> None:
        raise OSError("in layer 3")

    hook = model.model.layers[3].register_forward_hook(fail)
    with pytest.raises(OSError, match="in layer 3"):
        batch(model, num_beams=3)
    hook.remove()
    assert nothing_is_held(cache)
    assert cache.stats().entries == 0
    npc.disable(model)


# ---- another cache, another loop ----


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static", "quantized"])
def test_another_cache_is_given_and_said_once(implementation: str) -> None:
    def result(model: PreTrainedModel) -> object:
        try:
            return generate(model, cache_implementation=implementation)
        except Exception as error:  # some need a GPU or a package
            return type(error), str(error)

    plain = result(tiny_model())
    model = tiny_model()
    embedded, cache = Embedded(model), enable(model)
    with pytest.warns(CacheBypassWarning, match=f"running uncached: cache_implementation='{implementation}'"):
        same(result(model), plain)
    same(result(model), plain)  # a second warning would be an error
    assert cache.stats().lookups == cache.stats().entries == 0
    embedded.take()
    generate(model)
    assert embedded.take() == P + NEW - 1
    npc.disable(model)


CONTINUOUS = {
    "generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=PAD),
    "continuous_batching_config": ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=256),
}


def continuous(model: PreTrainedModel) -> list[list[int]]:
    outputs = model.generate_batch([row[0].tolist() for row in ROWS], progress_bar=False, **CONTINUOUS)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continuous_batching_sets_the_cache_aside(attention: str) -> None:
    plain = continuous(tiny_model(attn_implementation=attention))
    model = tiny_model(attn_implementation=attention)
    text = generate(model)
    embedded, cache = Embedded(model), enable(model)
    assert continuous(model) == plain
    assert cache.stats().lookups == 0
    embedded.take()
    assert torch.equal(generate(model), text)
    assert torch.equal(generate(model), text)
    assert embedded.take() == P + 1 + 2 * (NEW - 1)
    assert continuous(model) == plain
    npc.disable(model)
    assert model.config._attn_implementation == attention


def test_generate_while_a_batch_runs_continuously_is_uncached() -> None:
    model = tiny_model()
    text = generate(model)
    cache = enable(model)
    with model.continuous_batching_context_manager(**CONTINUOUS):
        assert torch.equal(generate(model), text)
        assert cache.stats().lookups == 0
    npc.disable(model)


def test_what_runs_when_the_cache_is_set_aside_is_waited_for() -> None:
    model = tiny_model()
    text = generate(model)
    with npc.PromptCache.for_model(model, pool_bytes=32 << 20) as cache, cache.attach(model) as handle:
        results: list[Any] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    results.append(generate(model))
                except BaseException as error:
                    results.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            with handle._attention.set_aside():
                assert model.config._attn_implementation == "sdpa"
                time.sleep(0.005)
            time.sleep(0.005)
        stop.set()
        for thread in threads:
            thread.join()
        assert len(results) > 2
        for result in results:
            assert isinstance(result, torch.Tensor), result
            assert torch.equal(result, text)
        assert nothing_is_held(cache)


def test_continuous_batching_inside_a_served_forward_is_refused_and_does_not_wait_for_itself() -> None:
    model = tiny_model()
    text = generate(model)
    cache = enable(model)
    hook = model.model.layers[1].register_forward_hook(lambda *_: continuous(model))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            generate(model)
        except npc.PromptCacheError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert "begun inside a forward of LlamaForCausalLM" in str(errors.pop())
    assert nothing_is_held(cache)
    hook.remove()
    assert torch.equal(generate(model), text)
    npc.disable(model)


def test_detaching_while_the_cache_is_set_aside() -> None:
    model = tiny_model()
    cache = npc.PromptCache.for_model(model, pool_bytes=32 << 20)
    handle = cache.attach(model)
    with handle._attention.set_aside():
        handle.detach()
        assert model.config._attn_implementation == "sdpa"
        handle = cache.attach(model)
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "npu_prompt_cache|sdpa"
    cache.close()
    assert model.config._attn_implementation == "sdpa"


def test_a_continuous_batching_without_an_end_says_detach_first() -> None:
    model = tiny_model()
    enable(model)
    with pytest.raises(npc.PromptCacheError, match=r"LlamaForCausalLM has a prompt cache attached.*detach first"):
        model.init_continuous_batching()
    npc.disable(model)


# ---- an assistant ----


def small(**changes: object) -> PreTrainedModel:
    """Drafts that are right now and then: the model without its last layers."""
    assistant = tiny_model(num_hidden_layers=3, **changes)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0
    return assistant


@pytest.mark.parametrize("options", [{}, SAMPLED, {"prefill_chunk_size": 10}], ids=["greedy", "sampled", "in chunks"])
@pytest.mark.parametrize("attached", ["model", "assistant", "both"])
def test_assisted_decoding(attached: str, options: dict[str, Any]) -> None:
    def result(model: PreTrainedModel, assistant: PreTrainedModel) -> Any:
        assistant.generation_config.num_assistant_tokens = 4
        return generate(model, assistant_model=assistant, output_scores=True, **DICT, **options)

    models = [tiny_model(), small()]
    counts = [Embedded(model) for model in models]
    plain, sent = result(*models), [count.take() for count in counts]

    models = [tiny_model(), small()]
    counts = [Embedded(model) for model in models]
    caches = [
        enable(model) for model, name in zip(models, ("model", "assistant"), strict=True) if attached in (name, "both")
    ]
    for repeat in range(2):
        same(result(*models), plain)
        for name, was, count in zip(("model", "assistant"), sent, counts, strict=True):
            # A chunk that is a part of the prompt is looked up as it is.
            whole = P - 1 if "prefill_chunk_size" not in options or name == "model" else 9
            assert was - count.take() == (whole if repeat and attached in (name, "both") else 0)
        if repeat == 0 and attached == "both":  # drafts are taken back where they lie: none is published before the end
            assert [cache.stats().copies["D2D"] for cache in caches] == [0, 0]
    for cache in caches:
        assert nothing_is_held(cache)
    for model in models:
        if "forward" in vars(model):
            npc.disable(model)


# ---- pipelines ----


def pipeline(model: PreTrainedModel) -> transformers.TextGenerationPipeline:
    words = {word: number for number, word in enumerate(["[PAD]", "[BOS]", "[EOS]", *map(str, range(3, VOCABULARY))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")
    fast.padding_side = "left"
    fast.chat_template = (
        "{% for m in messages %}{{ '[BOS] ' + m['content'] + ' [EOS] ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[BOS]' }}{% endif %}"
    )
    return transformers.pipeline("text-generation", model=model, tokenizer=fast, device="cpu")


def words(ids: torch.Tensor) -> str:
    return " ".join(map(str, ids[0].tolist()))


SAID = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


def say(model: PreTrainedModel, *inputs: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return pipeline(model)(*inputs, **{**SAID, **options})


def conversation(model: PreTrainedModel) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": words(PROMPT)}]
    for turn in range(3):
        turns = [*turns, {"role": "user", "content": words(tokens(5, seed=turn))}]
        turns = say(model, turns)[0]["generated_text"]
    return turns


def iterated(model: PreTrainedModel) -> str:
    talk = pipeline(model)
    streamer = transformers.TextIteratorStreamer(talk.tokenizer, timeout=20)
    thread = threading.Thread(target=talk, args=(words(PROMPT),), kwargs={"streamer": streamer, **SAID})
    thread.start()
    text = " ".join(streamer)
    thread.join()
    return text


#: Lengths of a conversation's prompts: each message and the answer's beginning bring their marks.
TURNS = [(P + 2) + (5 + 2) * turn + (NEW + 2) * (turn - 1) + 1 for turn in (1, 2, 3)]
PIPELINES = {
    "text": Mode(lambda model: say(model, words(PROMPT)), 0, P - 1),
    "sampled": Mode(lambda model: say(model, words(PROMPT), num_return_sequences=2, **SAMPLED), P - 1, 2 * (P - 1)),
    "beams": Mode(lambda model: say(model, words(PROMPT), num_beams=3), 2 * (P - 1), 3 * (P - 1)),
    "a batch": Mode(
        lambda model: say(model, [words(row) for row in ROWS], batch_size=len(ROWS)),
        PADDING + ALIKE,
        PADDING + sum(LENGTHS) - len(ROWS),
    ),
    "iterated": Mode(iterated, 0, P - 1),
    # All of the turn before but its last token is found; the same conversation again, all but the last of each prompt.
    "chat": Mode(conversation, sum(TURNS[:2]) + 2 * (NEW - 1), sum(TURNS) - 3),
}


@pytest.mark.parametrize("mode", PIPELINES)
def test_a_pipeline_says_what_it_says_without_a_cache(mode: str) -> None:
    call, saved_cold, saved_hit = PIPELINES[mode]
    fresh = tiny_model()
    embedded = Embedded(fresh)
    plain, sent = call(fresh), embedded.take()
    model = tiny_model()
    embedded, cache = Embedded(model), enable(model)
    for saved in (saved_cold, saved_hit):
        same(call(model), plain)
        assert sent - embedded.take() == saved
    assert nothing_is_held(cache)
    npc.disable(model)


# ---- precision ----


class Dictated(transformers.LogitsProcessor):
    """The next token is a function of the ids so far, whatever the logits: rounding makes no other text."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        chosen = 3 + (input_ids * torch.arange(1, input_ids.shape[1] + 1)).sum(dim=1) % (VOCABULARY - 3)
        return torch.full_like(scores, -1e9).scatter(1, chosen[:, None], 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [one(), one(**SAMPLED), MODES["left-padded batch"], one(prompt_lookup_num_tokens=4)])
def test_half_precision(mode: Mode, dtype: torch.dtype) -> None:
    """Logits are as near to the exact ones as they are without a cache, give or take rounding."""

    def result(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        processor = LogitsProcessorList([Dictated()])
        out = mode.call(model, logits_processor=processor, output_logits=True, return_dict_in_generate=True)
        return out.sequences, torch.stack(out.logits).double()

    fresh = tiny_model(initializer_range=0.1).to(dtype)
    embedded = Embedded(fresh)
    (text, plain), sent = result(fresh), embedded.take()
    _, exact = result(fresh.double())

    model = tiny_model(initializer_range=0.1).to(dtype)
    embedded, cache = Embedded(model), enable(model)
    for saved in (mode.saved_cold, mode.saved_hit):
        ours, logits = result(model)
        assert torch.equal(ours, text)
        assert (logits - exact).abs().max() <= 2 * (plain - exact).abs().max()
        assert sent - embedded.take() == saved
    assert nothing_is_held(cache)
    npc.disable(model)
