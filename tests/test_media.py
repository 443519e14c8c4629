"""Models that read images and videos answer with the cache as without: keys stand for what the media are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_media
import torch
from tiny import PAD, join
from tiny_media import (
    IMAGE,
    LAYERS,
    MODEL_TYPES,
    PATCHED,
    Medium,
    Prompt,
    build,
    image,
    inputs,
    prompt,
    text,
    video,
)
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    DynamicCache,
    PreTrainedModel,
)

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import CacheBypassWarning, media
from npu_prompt_cache.integrations.transformers.models import SUPPORTED_MEDIA_TYPES

README = Path(__file__).parents[1] / "README.md"
BLOCK = 16
GREEDY = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
START, ASK, ASK_MORE = text(20, seed=1), text(5, seed=2), text(4, seed=3)

close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)


class Counted:
    """Tokens that go through the text embedding, and calls and rows of pixels that go through the vision tower."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._seen = [0, 0, 0]
        body = model.base_model
        tower = body.vision_tower if hasattr(body, "vision_tower") else body.visual
        model.get_input_embeddings().register_forward_hook(self._embedded)
        tower.register_forward_hook(self._encoded)

    def _embedded(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._seen[0] += output.shape[:-1].numel()

    def _encoded(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> None:
        self._seen[1] += 1
        self._seen[2] += len(args[0])

    def take(self) -> tuple[int, int, int]:
        """(tokens embedded, calls of the tower, rows of pixels) since the last call."""
        taken, self._seen = tuple(self._seen), [0, 0, 0]
        return taken  # type: ignore[return-value]


def enable(model: PreTrainedModel) -> npc.PromptCache:
    return npc.enable(model, pool_bytes=2 * LAYERS * 4 << 20, block_size=BLOCK)


def logits(model: PreTrainedModel, given: dict[str, Any], keep: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(**given, logits_to_keep=keep).logits


def rows(*shown: Medium) -> int:
    return sum(len(medium.pixels) for medium in shown)


def check(model: PreTrainedModel, steps: list[tuple[Prompt, int, list[Medium]]]) -> None:
    """Each prompt is answered as without a cache, by a model that computes so many tokens and encodes these media."""
    asked = [inputs(given) for given, _, _ in steps]
    plain = [logits(model, given) for given in asked]
    texts = [model.generate(**given, **GREEDY) for given in asked]
    # Where the first two prompts differ in the image alone: what is below could not fail if models did not see it.
    assert (plain[0][:, -1] - plain[1][:, -1]).abs().max() > 1e-2
    counted, cache = Counted(model), enable(model)
    for given, expected, (_, new, encoded) in zip(asked, plain, steps, strict=True):
        close(logits(model, given, keep=new), expected[:, -new:])
        assert counted.take() == (new, bool(encoded), rows(*encoded))
    for given, expected, written in zip(asked, plain, texts, strict=True):
        close(logits(model, given, keep=1), expected[:, -1:])
        assert counted.take() == (1, 0, 0)
        assert torch.equal(model.generate(**given, **GREEDY), written)
        assert counted.take() == (1 + 3, 0, 0)
    cache.check_integrity()
    npc.disable(model)


def prompts_of(model_type: str) -> list[tuple[Prompt, int, list[Medium]]]:
    a, b = image(model_type, 1), image(model_type, 2, (1, 4, 4))
    n, m = a.tokens, b.tokens
    one = prompt(START, a, ASK)
    return [
        (one, 20 + n + 5, [a]),
        (prompt(START, b, ASK), m + 5, [b]),  # the same text around another image
        (prompt(START, a, ASK_MORE), 4, []),  # another question on the same image
        (prompt(START, a, ASK, b, ASK_MORE), m + 4, [b]),
        (prompt(START, a, ASK, b, ASK, a, ASK_MORE), 5 + n + 4, [a]),  # an image again, after others
        (prompt(START, ASK), 5, []),
        (prompt(a, ASK), n + 5, [a]),  # an image after another text is not what it was
        *(_of_neighbours(a, b) if model_type == "llava" else []),  # others find a text between them
    ]


def _of_neighbours(a: Medium, b: Medium) -> list[tuple[Prompt, int, list[Medium]]]:
    n = a.tokens
    whole = prompt(ASK, a, b, a, b, ASK)
    split = Prompt(join(ASK, a.ids, b.ids[:, :2], ASK, b.ids[:, 2:], ASK), [a, b])
    return [(whole, 5 + 4 * n + 5, [a, b]), (split, 5 + n - 2 + 5, [b]), (prompt(ASK, a, b, ASK), 5, [])]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_cold_hit_and_no_cache_are_equal(model_type: str) -> None:
    check(build(model_type), prompts_of(model_type))


@pytest.mark.parametrize(
    ("text_type", "tower", "attention"),
    [
        ("mistral", "clip_vision_model", "sdpa"),
        ("qwen2", "siglip_vision_model", "eager"),
        ("jetmoe", "clip_vision_model", "sdpa"),  # gathered
    ],
)
def test_llava_of_other_parts(text_type: str, tower: str, attention: str) -> None:
    check(build("llava", text_type, tower, attn_implementation=attention), prompts_of("llava"))


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "qwen2_5_vl"])
def test_over_a_window(model_type: str) -> None:
    window = {"sliding_window": 8}
    if model_type != "llava":
        window |= {"use_sliding_window": True, "max_window_layers": 1}
    check(build(model_type, "mistral", text=window), prompts_of(model_type))


@pytest.mark.parametrize("model_type", PATCHED)
def test_videos(model_type: str) -> None:
    a, clip, other = image(model_type, 1), video(model_type, 2), video(model_type, 3)
    steps = [
        (prompt(START, clip, ASK), 20 + clip.tokens + 5, [clip]),
        (prompt(START, other, ASK), other.tokens + 5, [other]),
        (prompt(START, clip, ASK, a, ASK_MORE), a.tokens + 4, [a]),
    ]
    check(build(model_type), steps)


def hits(model: PreTrainedModel, cache: npc.PromptCache, given: dict[str, Any]) -> int:
    """Tokens found; the answer is that of a fresh model."""
    npc_less = logits_without(model, given)
    before = cache.stats().hit_tokens
    close(logits(model, given, keep=1), npc_less[:, -1:])
    return cache.stats().hit_tokens - before


def logits_without(model: PreTrainedModel, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**given, cache=DynamicCache(config=model.config)).logits


class TestWhatIsNoHit:
    """A6: same placeholder ids, another medium: no hit past it. The same medium again: a hit."""

    @pytest.mark.parametrize("model_type", MODEL_TYPES)
    def test_another_image(self, model_type: str) -> None:
        model = build(model_type)
        with enable(model) as cache:
            first, second = (inputs(prompt(START, image(model_type, seed), ASK)) for seed in (1, 2))
            assert torch.equal(first["input_ids"], second["input_ids"])
            length = first["input_ids"].shape[1]
            assert hits(model, cache, first) == 0
            assert hits(model, cache, second) == 20
            assert hits(model, cache, first) == hits(model, cache, second) == length - 1

    @pytest.mark.parametrize("model_type", MODEL_TYPES)
    def test_one_value_is_another_image(self, model_type: str) -> None:
        model = build(model_type)
        with enable(model) as cache:
            given = inputs(prompt(START, image(model_type, 1), ASK))
            assert hits(model, cache, given) == 0
            given["pixel_values"].view(-1)[-1] += 1  # in the caller's own tensor
            assert hits(model, cache, given) == 20

    @pytest.mark.parametrize("model_type", PATCHED)
    def test_the_same_bytes_in_another_shape(self, model_type: str) -> None:
        model = build(model_type)
        with enable(model) as cache:
            wide, high = (inputs(prompt(START, image(model_type, 1, grid), ASK)) for grid in ((1, 4, 6), (1, 6, 4)))
            assert torch.equal(wide["pixel_values"], high["pixel_values"])
            assert torch.equal(wide["input_ids"], high["input_ids"])
            assert hits(model, cache, wide) == 0
            assert hits(model, cache, high) == 20

    @pytest.mark.parametrize("model_type", MODEL_TYPES)
    def test_the_same_bytes_in_another_dtype(self, model_type: str) -> None:
        model = build(model_type)
        with enable(model) as cache:
            given = inputs(prompt(START, image(model_type, 1), ASK))
            half = given["pixel_values"].half()
            assert hits(model, cache, given | {"pixel_values": half}) == 0
            assert hits(model, cache, given | {"pixel_values": half.view(torch.bfloat16)}) == 20
            assert hits(model, cache, given | {"pixel_values": half.float()}) == 20

    @pytest.mark.parametrize("model_type", PATCHED)
    def test_the_same_bytes_as_a_video(self, model_type: str) -> None:
        """Said to be what they are not: the placeholders are the same ids in both."""
        model = build(model_type)
        with enable(model) as cache:
            shown = image(model_type, 1, (1, 4, 4))
            as_image = inputs(prompt(START, shown, ASK))
            assert hits(model, cache, as_image) == 0
            model.config.video_token_id, model.config.image_token_id = IMAGE, -1
            as_video = {"input_ids": as_image["input_ids"], "mm_token_type_ids": 2 * as_image["mm_token_type_ids"]}
            as_video |= {"pixel_values_videos": shown.pixels, "video_grid_thw": shown.grid}
            assert hits(model, cache, as_video) == 20

    @pytest.mark.parametrize("model_type", MODEL_TYPES)
    def test_placeholders_as_text(self, model_type: str) -> None:
        model = build(model_type)
        with enable(model) as cache:
            shown = inputs(prompt(START, image(model_type, 1), ASK))
            bare = {"input_ids": shown["input_ids"]}
            assert hits(model, cache, bare) == 0
            assert hits(model, cache, shown) == 20
            assert hits(model, cache, bare) == hits(model, cache, shown) == shown["input_ids"].shape[1] - 1

    def test_seconds_between_pictures(self) -> None:
        model = build("qwen2_5_vl")
        with enable(model) as cache:
            given = inputs(prompt(START, video("qwen2_5_vl", 1, (2, 8, 8)), ASK, ASK))
            slow, fast = (given | {"second_per_grid_ts": seconds} for seconds in ([1.0], torch.tensor([0.5])))
            assert hits(model, cache, given) == 0
            assert hits(model, cache, slow) == hits(model, cache, fast) == 20
            assert hits(model, cache, fast) == given["input_ids"].shape[1] - 1

    def test_another_layer_of_the_tower(self) -> None:
        model = build("llava")
        with enable(model) as cache:
            given = inputs(prompt(START, image("llava", 1), ASK))
            assert hits(model, cache, given) == 0
            model.config.vision_feature_layer = -1
            assert hits(model, cache, given) == 20

    @pytest.mark.parametrize("model_type", MODEL_TYPES)
    def test_another_weight_of_the_tower(self, model_type: str) -> None:
        model = build(model_type)
        with enable(model) as cache:
            given = inputs(prompt(START, image(model_type, 1), ASK))
            assert hits(model, cache, given) == 0
            with torch.no_grad():
                next(part for name, part in model.named_parameters() if "language_model" not in name).add_(0.1)
            assert hits(model, cache, given) == 0

    @pytest.mark.parametrize("model_type", MODEL_TYPES)
    def test_the_check_sees_keys_without_content(self, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(media.Medium, "digest", lambda self: b"an image")
        with pytest.raises(AssertionError, match="not close"):
            self.test_another_image(model_type)

    @pytest.mark.parametrize("model_type", PATCHED)
    def test_the_check_sees_keys_without_shape(self, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(media.Medium, "digest", lambda self: self.arguments["pixel_values"].numpy().tobytes())
        with pytest.raises(AssertionError, match="not close"):
            self.test_the_same_bytes_in_another_shape(model_type)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_batch_of_rows_with_and_without_media(model_type: str, padding: int) -> None:
    a, b = image(model_type, 1), image(model_type, 2)
    shown = [prompt(START, a, ASK_MORE), prompt(START, ASK_MORE), prompt(START, b, ASK), prompt(ASK, a, START, b, ASK)]
    given = inputs(*shown, padding=padding)
    model = build(model_type)
    written = model.generate(**given, **GREEDY)
    if model_type == "llava":  # by itself it would count padding
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    plain = logits(model, given)
    counted, cache = Counted(model), enable(model)
    for _ in range(2):
        model.generate(**inputs(prompt(START, a, ASK)), **GREEDY)
    counted.take()
    with cache.salted("another"):
        close(logits(model, given, keep=4), plain[:, -4:])
        # Two more rows begin with the text that the first one computes.
        assert counted.take() == (sum(one.ids.shape[1] for one in shown) - 2 * 20, 1, rows(a, b))
    close(logits(model, given, keep=1), plain[:, -1:])
    assert counted.take() == (4 + 4 + (b.tokens + 5) + shown[3].ids.shape[1], 1, rows(b, a))
    assert torch.equal(model.generate(**given, **GREEDY), written)
    assert counted.take() == (4 + 3 * 4, 0, 0)
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_hit_ends_before_in_and_after_an_image(model_type: str) -> None:
    model, a, b = build(model_type), image(model_type, 1), image(model_type, 2)
    given, n = inputs(prompt(START, a, ASK, b, ASK_MORE)), a.tokens
    plain = logits(model, given)
    counted, cache = Counted(model), enable(model)
    logits(model, given)
    counted.take()
    after = 5 + b.tokens + 4  # of what follows the first image
    for keep in (1, 4, 5, 4 + b.tokens, 5 + b.tokens, after, after + 1, after + n - 1, after + n, after + n + 1):
        close(logits(model, given, keep=keep), plain[:, -keep:])
        encoded = [a] * (keep > after) + [b] * (keep > 4)
        assert counted.take() == (keep, bool(encoded), rows(*encoded))
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_conversation_with_an_image_in_every_turn(model_type: str) -> None:
    model, seen, talk = build(model_type), [], text(18, seed=9)
    turns = []
    for turn in range(3):
        seen.append(image(model_type, turn, (1, 4, 4 + 2 * turn)))
        talk = join(talk, ASK, seen[-1].ids, ASK_MORE)
        given = inputs(Prompt(talk, list(seen)))
        talk = model.generate(**given, **GREEDY)
        turns.append((given, talk))
    counted, cache = Counted(model), enable(model)
    for turn, (given, written) in enumerate(turns):
        assert torch.equal(model.generate(**given, **GREEDY), written)
        new = 18 if turn == 0 else 1  # or the token that was sampled last
        assert counted.take() == (new + 5 + seen[turn].tokens + 4 + 3, 1, rows(seen[turn]))
    cache.check_integrity()
    npc.disable(model)


#: generate() in other ways, and whether it hits.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "samples": ({"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 5}, True),
    "scores": ({**GREEDY, "return_dict_in_generate": True, "output_scores": True}, True),
    "no cache": ({**GREEDY, "use_cache": False}, False),
    "a static cache": ({**GREEDY, "cache_implementation": "static"}, False),
    "hidden states": ({**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True}, False),
    "chunks": ({**GREEDY, "prefill_chunk_size": 16}, False),
    "beams": ({**GREEDY, "num_beams": 2}, True),
    "prompt lookup": ({**GREEDY, "prompt_lookup_num_tokens": 2}, True),
}


@pytest.mark.filterwarnings("ignore:running uncached. cache_implementation")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_other_ways_to_generate(model_type: str, way: str) -> None:
    model, options = build(model_type), WAYS[way][0]
    shown = [prompt(START, image(model_type, 1), ASK, image(model_type, 2), ASK_MORE), prompt(START, ASK)]
    given = inputs(*shown[: 1 if way == "prompt lookup" else 2])

    def write() -> Any:
        torch.manual_seed(5)
        written = model.generate(**given, **options)
        return (written.sequences, *(written.scores or ())) if options.get("return_dict_in_generate") else (written,)

    plain = write()
    counted, cache = Counted(model), enable(model)
    for again in (False, True):
        for expected, written in zip(plain, write(), strict=True):
            close(written, expected)
        _, calls, _ = counted.take()
        assert calls == (0 if again and WAYS[way][1] else 1)
    cache.check_integrity()
    npc.disable(model)


class TestPositions:
    """Of models with three for each token: what media are in the prompt decides on those of all text after them."""

    @pytest.fixture(params=PATCHED)
    def model(self, request: pytest.FixtureRequest) -> PreTrainedModel:
        return build(request.param)

    @staticmethod
    def shown(model: PreTrainedModel, seed: int = 1, grid: tuple[int, int, int] = (1, 4, 6)) -> dict[str, Any]:
        return inputs(prompt(START, image(model.config.model_type, seed, grid), ASK))

    @staticmethod
    def go_on(model: PreTrainedModel, first: dict[str, Any], between: dict[str, Any] | None, **asked: Any) -> Any:
        with torch.no_grad():
            cache = model(**first, logits_to_keep=1).cache
            if between is not None:
                model(**between, logits_to_keep=1)
            for turn in (ASK_MORE, ASK):
                output = model(turn, cache=cache, **asked)
            return output.logits

    @pytest.mark.parametrize("asked", [{}, {"output_hidden_states": True}])
    def test_a_forward_goes_on_from_its_own_cache(self, model: PreTrainedModel, asked: dict[str, Any]) -> None:
        """Whatever went through the model in between: in the pool, or uncached."""
        first, another = self.shown(model), self.shown(model, 2, (1, 4, 12))
        bare = {"input_ids": join(START, ASK)}
        plain = [self.go_on(model, one, None) for one in (first, another)]
        model.base_model.rope_deltas = None
        plain.append(self.go_on(model, bare, None))
        with enable(model) as cache:
            for between in (None, first, another, bare):
                for one, expected in zip((first, another, bare), plain, strict=True):
                    close(self.go_on(model, one, between, **asked), expected)
            assert cache.stats().hits > 0

    def test_the_models_own_forwards_go_on_as_ever(self, model: PreTrainedModel) -> None:
        first, another = self.shown(model), self.shown(model, 2, (1, 4, 12))
        with torch.no_grad():
            plain = self.go_on(model, first, None)
            with enable(model) as cache:
                model(**another)
                own = model(**first, cache=DynamicCache(config=model.config)).cache
                model(ASK_MORE, cache=own)
                close(model(ASK, cache=own).logits, plain)
                assert cache.stats().lookups == 1

    def test_a_cache_goes_on_when_it_was_detached(self, model: PreTrainedModel) -> None:
        first, another = self.shown(model), self.shown(model, 2, (1, 4, 12))
        with torch.no_grad():
            plain = self.go_on(model, first, None)
            model(**another)
            enable(model)
            paged = model(**first).cache
            npc.disable(model)
            model(ASK_MORE, cache=paged)  # a dense one now
            close(model(ASK, cache=paged).logits, plain)

    @pytest.mark.parametrize("shift", ["time", "all", "number"])
    def test_the_callers_own(self, model: PreTrainedModel, shift: str) -> None:
        given = self.shown(model)
        positions, _ = model.base_model.get_rope_index(**{k: v for k, v in given.items() if k != "pixel_values"})
        positions = torch.cat([torch.arange(positions.shape[-1]).view(1, 1, -1), positions])
        with enable(model) as cache, torch.no_grad():
            model(**given, position_ids=positions)
            assert hits(model, cache, given | {"position_ids": positions[1:]}) == positions.shape[-1] - 1
            positions[{"time": [1], "all": [1, 2, 3], "number": [0]}[shift], 0, -8:] += 3
            lookups = cache.stats().lookups
            assert hits(model, cache, given | {"position_ids": positions}) == 0
            assert cache.stats().lookups == lookups

    def test_numbers_of_several_texts_in_one_row(self, model: PreTrainedModel) -> None:
        """In front of positions they may tell that a row is packed: what it is then is up to the model."""
        ids = join(START, START)
        numbers = torch.arange(40).expand(4, 1, -1).clone()
        with enable(model) as cache, torch.no_grad():
            assert hits(model, cache, {"input_ids": ids, "position_ids": numbers}) == 0
            assert hits(model, cache, {"input_ids": ids, "position_ids": numbers}) == 39
            numbers[0, 0, 20:] -= 20
            lookups, given = cache.stats().lookups, {"input_ids": ids, "position_ids": numbers}
            assert hits(model, cache, given) == 0
            assert cache.stats().lookups == lookups

    @pytest.mark.parametrize("kinds", ["none", "others"])
    def test_kinds_of_tokens_that_are_not_the_placeholders(self, model: PreTrainedModel, kinds: str) -> None:
        given = self.shown(model)
        with enable(model) as cache:
            assert hits(model, cache, given) == 0
            if kinds == "none":
                del given["mm_token_type_ids"]
                with pytest.raises(ValueError, match="mm_token_type_ids"):
                    if model.config.model_type == "qwen2_5_vl":
                        assert hits(model, cache, given) == 0
                        raise ValueError("mm_token_type_ids: this model does without")
                    logits(model, given)
            else:
                given["mm_token_type_ids"][0, 2] = 1
                with pytest.raises((RuntimeError, StopIteration)):
                    logits(model, given, keep=1)
            assert cache.stats().lookups == 1

    def test_a_prompt_that_ends_with_an_image(self, model: PreTrainedModel) -> None:
        """generate() and a forward do not go on from there in the same way: neither is cached."""
        given = inputs(prompt(START, image(model.config.model_type, 1)))
        written, plain = model.generate(**given, **GREEDY), logits(model, given)
        with enable(model) as cache:
            for _ in range(2):
                assert torch.equal(model.generate(**given, **GREEDY), written)
                close(logits(model, given), plain)
            assert cache.stats().lookups == 0

    def test_a_video_longer_than_the_text_after_it(self, model: PreTrainedModel) -> None:
        """Again both go on differently: generate() is cached, which goes on as the same text in a prompt would."""
        clip = video(model.config.model_type, 1, (12, 4, 4))
        given = inputs(prompt(START, clip, ASK))
        written, plain = model.generate(**given, **GREEDY), logits(model, given, keep=1)
        longer = inputs(Prompt(join(written, ASK_MORE), [clip]))
        after = logits(model, longer)
        counted = Counted(model)
        with enable(model) as cache:
            # Where there is text between the pictures, they are no longer than what is after them.
            for new in (1 if model.config.model_type == "qwen3_vl" else given["input_ids"].shape[1], 1):
                close(logits(model, given, keep=1), plain)
                counted.take()
                assert torch.equal(model.generate(**given, **GREEDY), written)
                assert counted.take()[0] == new + 3
            with torch.no_grad():
                close(model(**longer, logits_to_keep=1).logits, after[:, -1:])
            cache.check_integrity()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_that_drafts(model_type: str) -> None:
    model, drafts = build(model_type), build(model_type)
    given = inputs(prompt(START, image(model_type, 1), ASK))
    plain = model.generate(**given, **GREEDY, assistant_model=drafts)
    with enable(model):
        for _ in range(2):
            assert torch.equal(model.generate(**given, **GREEDY, assistant_model=drafts), plain)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_output_has_nothing_of_the_tower(model_type: str) -> None:
    model = build(model_type)
    given = inputs(prompt(START, image(model_type, 1), ASK))
    with enable(model), torch.no_grad():
        for _ in range(2):
            output = model(**given, logits_to_keep=1)
            assert output.image_outputs is None
            assert output.to_tuple()[0] is output.logits


class TestWhatIsNotServed:
    """The model's own code runs, with its own results and errors, and nothing is looked up."""

    @pytest.fixture(params=MODEL_TYPES)
    def model(self, request: pytest.FixtureRequest) -> PreTrainedModel:
        return build(request.param)

    @staticmethod
    def shown(model: PreTrainedModel) -> dict[str, Any]:
        return inputs(prompt(START, image(model.config.model_type, 1), ASK))

    def test_embeddings_of_the_callers(self, model: PreTrainedModel) -> None:
        given = self.shown(model)
        plain = logits(model, given)
        arguments = {name: given.pop(name) for name in ("pixel_values", "image_grid_thw") if name in given}
        with enable(model) as cache, torch.no_grad():
            encoded = model.base_model.get_image_features(**arguments, return_dict=True)
            if "image_grid_thw" in arguments:
                given["position_ids"], _ = model.base_model.get_rope_index(
                    **given, image_grid_thw=arguments["image_grid_thw"]
                )
            close(logits(model, given | {"mm_encoder_outputs": {"image": encoded}}), plain)
            assert cache.stats().lookups == 0

    def test_other_numbers_of_placeholders(self, model: PreTrainedModel) -> None:
        given = self.shown(model)
        is_one_less = torch.arange(given["input_ids"].shape[1]) != 20
        fewer = {name: value[:, is_one_less] if name in _BY_COLUMN else value for name, value in given.items()}
        with pytest.raises((ValueError, RuntimeError)) as plain:
            logits(model, fewer)
        with enable(model) as cache:
            for _ in range(2):
                with pytest.raises(type(plain.value), match=r"placeholder|match"):
                    logits(model, fewer, keep=1)
                logits(model, given)
            cache.check_integrity()

    def test_token_ids_that_are_numbers_of_media(self, model: PreTrainedModel) -> None:
        given = self.shown(model)
        with enable(model):
            logits(model, given)
            forged = given["input_ids"].clone()
            for number in range(2**31 - 1, 2**31 - 200, -1):
                forged[forged == IMAGE] = number
                with pytest.raises(IndexError):
                    logits(model, {"input_ids": forged}, keep=1)
                forged[forged == number] = IMAGE

    def test_an_image_in_a_later_forward(self, model: PreTrainedModel) -> None:
        given = self.shown(model)
        if (kinds := given.get("mm_token_type_ids")) is not None:
            given["position_ids"] = 20 + torch.arange(kinds.shape[1]).view(1, 1, -1).expand(3, -1, -1)
        with torch.no_grad():
            plain = model(**given, cache=model(START).cache).logits
            with enable(model) as cache:
                close(model(**given, cache=model(START).cache).logits, plain)
                assert cache.stats().lookups == 1

    @pytest.mark.parametrize("where", ["in two rows", "in padding"])
    def test_placeholders_of_one_image(self, where: str) -> None:
        model, shown = build("llava"), image("llava", 1)
        ids = join(text(8, seed=4), shown.ids[:, :2], ASK).repeat(2, 1)
        mask = torch.ones_like(ids)
        if where == "in padding":
            ids = torch.cat([shown.ids.repeat(2, 1)[:, :1], torch.cat([ids[:1], ids[:1]])], dim=1)
            ids[1, 9:11], ids[1, 0] = ids[1, 1:3], PAD
            ids[0, 8] = IMAGE
            mask = (torch.arange(ids.shape[1]) > 0).long().repeat(2, 1)
        given = {"input_ids": ids, "attention_mask": mask, "pixel_values": shown.pixels}
        plain = model.generate(**given, **GREEDY)
        with enable(model) as cache:
            for _ in range(2):
                assert torch.equal(model.generate(**given, **GREEDY), plain)
            assert cache.stats().lookups == 0

    def test_no_numbers_left(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = media._Numbers()
        numbers._next = media.LOWEST_NUMBER
        monkeypatch.setattr(media, "_numbers", numbers)
        first, second = (inputs(prompt(START, image(model.config.model_type, seed), ASK)) for seed in (1, 2))
        with enable(model) as cache:
            assert [hits(model, cache, given) for given in (first, second, second, first)] == [
                *(0, 0, 0),
                first["input_ids"].shape[1] - 1,
            ]
            assert cache.stats().lookups == 2


_BY_COLUMN = ("input_ids", "mm_token_type_ids")


def test_an_image_that_was_forgotten_gets_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = media._Numbers()
    monkeypatch.setattr(media, "_REMEMBERED", 2)
    first = [numbers.of(content) for content in (b"a", b"b", b"a", b"c")]
    assert first == [2**31 - 1, 2**31 - 2, 2**31 - 1, 2**31 - 3]
    assert numbers.of(b"a") == 2**31 - 1  # used since
    assert numbers.of(b"b") == 2**31 - 4


def test_what_a_digest_is_of() -> None:
    kind = media.modalities_of(build("qwen2_vl"))[0]
    pixels, grid = torch.arange(24.0).view(4, 6), torch.tensor([[1, 2, 2]])
    one = {"pixel_values": pixels, "image_grid_thw": grid}
    others = [
        media.Medium(kind, one, 1, ()),
        media.Medium(kind, one, 4, ()),
        media.Medium(kind, one, 1, (0.5,)),
        media.Medium(kind._replace(name="video"), one, 1, ()),
        media.Medium(kind, one | {"pixel_values": pixels.view(2, 12)}, 1, ()),
        media.Medium(kind, one | {"pixel_values": pixels.view(torch.int32)}, 1, ()),
        media.Medium(kind, one | {"pixel_values": pixels.flip(0)}, 1, ()),
        media.Medium(kind, one | {"image_grid_thw": torch.tensor([[1, 4, 1]])}, 1, ()),
    ]
    assert len({medium.digest() for medium in others}) == len(others)
    strided = torch.arange(48.0).view(4, 12)[:, ::2] / 2  # the same values, not one after another
    assert media.Medium(kind, one | {"pixel_values": strided}, 1, ()).digest() == others[0].digest()


class Detaching:
    """A streamer that detaches the cache when generate() has taken its prompt."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def put(self, ids: torch.Tensor) -> None:
        npc.disable(self._model)
        self.put: Callable[[torch.Tensor], None] = lambda ids: None

    def end(self) -> None:
        pass


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_detached_in_the_middle(model_type: str) -> None:
    model = build(model_type)
    given = inputs(prompt(START, image(model_type, 1), ASK))
    plain = model.generate(**given, **GREEDY)
    enable(model)
    assert torch.equal(model.generate(**given, **GREEDY, streamer=Detaching(model)), plain)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_attention_of_the_tower_stays_its_own(model_type: str) -> None:
    model = build(model_type, attn_implementation={"text_config": "eager", "vision_config": "sdpa"})
    before = [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]
    with enable(model):
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert model.config.text_config._attn_implementation == "npu_prompt_cache|eager"
        logits(model, inputs(prompt(START, image(model_type, 1), ASK)))
        npc.disable(model)
    after = [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]
    assert after == before


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_copy_has_no_cache_attached(model_type: str) -> None:
    model = build(model_type)
    given = inputs(prompt(START, image(model_type, 1), ASK))
    plain = model.generate(**given, **GREEDY)
    with enable(model) as cache:
        assert torch.equal(copy.deepcopy(model).generate(**given, **GREEDY), plain)
        assert cache.stats().lookups == 0


def test_every_supported_type_is_checked_and_in_the_readme() -> None:
    assert sorted(MODEL_TYPES) == sorted(SUPPORTED_MEDIA_TYPES)
    readme = README.read_text()
    assert all(f"`{model_type}`" in readme for model_type in MODEL_TYPES)


def test_other_models_that_read_images_are_refused() -> None:
    for model_type in ("llava_next", "gemma3", "internvl", "idefics3", "video_llava", "glm4v", "qwen2_audio"):
        kind = AutoModelForMultimodalLM if model_type == "qwen2_audio" else AutoModelForImageTextToText
        with torch.device("meta"):
            model = kind.from_config(AutoConfig.for_model(model_type))
        refused = f"^{type(model).__name__} cannot use the prompt cache: .{{20,}}"
        with pytest.raises(npc.UnsupportedModel, match=refused):
            npc.enable(model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts["vision_config"].update(model_type="pixtral", head_dim=16), "a 'pixtral' encodes"),
        (lambda parts: parts["text_config"].update(model_type="doge"), "model_type 'doge'"),
        (lambda parts: parts["text_config"].update(model_type="rembert", is_decoder=True), "'rembert' .* besides text"),
        (
            lambda parts: parts["text_config"].update(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rotary positions depend on lengths",
        ),
    ],
)
def test_a_part_that_is_not_served_is_refused(change: Callable[[dict[str, Any]], None], why: str) -> None:
    parts = tiny_media.parts_of("llava")
    change(parts)
    with pytest.raises(npc.UnsupportedModel, match=why):
        npc.enable(AutoModelForImageTextToText.from_config(AutoConfig.for_model("llava", **parts)).eval())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_threads(model_type: str) -> None:
    """Each with images of its own, through one model."""
    model = build(model_type)
    asked = [inputs(prompt(START, image(model_type, n % 5), ASK)) for n in range(12)]
    plain = [model.generate(**given, **GREEDY) for given in asked]
    with enable(model) as cache, ThreadPoolExecutor(4) as threads:
        written = list(threads.map(lambda given: model.generate(**given, **GREEDY), asked))
        assert all(map(torch.equal, written, plain))
        cache.check_integrity()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_pool_that_is_too_small(model_type: str) -> None:
    model = build(model_type)
    given = inputs(prompt(START, image(model_type, 1), ASK))
    plain = model.generate(**given, **GREEDY)
    with npc.enable(model, pool_bytes=2 * LAYERS * 2 << 20, block_size=512) as cache:
        all_tokens = cache.stats().free_bytes // cache.layout.token_bytes
        with cache.acquire([7] * all_tokens), pytest.warns(CacheBypassWarning, match="running uncached"):
            assert torch.equal(model.generate(**given, **GREEDY), plain)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tower_that_fails_leaves_nothing(model_type: str) -> None:
    model = build(model_type)
    given = inputs(prompt(START, image(model_type, 1), ASK))
    with enable(model) as cache:

        def fail(*args: Any) -> None:
            raise RuntimeError("a tower fell")

        tower = next(part for name, part in model.base_model.named_children() if name in ("visual", "vision_tower"))
        hook = tower.register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a tower fell"):
                model.generate(**given, **GREEDY)
        hook.remove()
        assert cache.stats().leases == cache.stats().entries == 0


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_half_precision(model_type: str) -> None:
    model = build(model_type).bfloat16()
    given = inputs(prompt(START, image(model_type, 1), ASK))
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**given, cache=plain)
        with enable(model):
            for keep in (len(given["input_ids"][0]), 1):
                paged = model(**given, logits_to_keep=keep).cache
                assert torch.equal(paged.layers[0].keys, plain.layers[0].keys)
                assert torch.equal(paged.layers[0].values, plain.layers[0].values)
