"""Every supported model type on ``npu:0``, through the real torch_npu: it answers with the cache as it does without."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch
from architectures import LAYERS, LOADED_AS, MODEL_TYPES, NOT_BUILDABLE, WINDOW, build, tiny_config_of
from tiny import Embedded, join, left_padded, tokens
from tiny_media import build as build_media
from tiny_media import image, inputs, prompt
from tiny_media import text as words
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

import npu_prompt_cache as npc
from npu_prompt_cache.attention import npu
from npu_prompt_cache.attention.kind import AttentionKind
from npu_prompt_cache.integrations.transformers import SUPPORTED_MODEL_TYPES
from npu_prompt_cache.integrations.transformers.models import SUPPORTED_MEDIA_TYPES, Way, way_of

SERVED = [
    name
    for name in MODEL_TYPES
    if name not in NOT_BUILDABLE and LOADED_AS.get(name, CONFIG_MAPPING[name].model_type) in SUPPORTED_MODEL_TYPES
]
STEPS = 3
POOL = {"pool_bytes": 2 * LAYERS * 4 << 20}


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _code_of_models_is_not_looked_at_again(_frozen: None) -> None:
    """Collections would walk all that was imported so far."""
    gc.freeze()


def logits(model: PreTrainedModel, prompt: torch.Tensor, keep: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt.to(model.device), logits_to_keep=keep).logits.cpu()


def generate(model: PreTrainedModel, rows: list[torch.Tensor], steps: int = STEPS, **options: object) -> ModelOutput:
    """Texts of a left-padded batch, and what ``generate`` tells besides."""
    batch = {name: value.to(model.device) for name, value in left_padded(rows).items()}
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, **options}
    return model.generate(**batch, **options, return_dict_in_generate=True, output_logits=True, output_scores=True)


# ---- float32: torch's own operators on the device ----

BLOCK = 16
LONG = tokens(4 * WINDOW + 3, seed=7)
#: Where hits end: before the first window is full, at a block's end, inside one, before the last token.
ENDS = (WINDOW // 2, 2 * WINDOW, 4 * WINDOW - 6, LONG.shape[1] - 1, LONG.shape[1])
#: Rows that have all but a token, a part and nothing of them cached.
ROWS = [LONG[:, : 2 * WINDOW + 5], join(LONG[:, : BLOCK + 3], tokens(17, seed=4)), tokens(9, seed=6)]
ROWS_NEW = 1 + 17 + 9

close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", SERVED)
def test_in_float32_cold_equals_hit_equals_no_cache(model_type: str) -> None:
    model = build(tiny_config_of(model_type)).to("npu:0")
    embedded = Embedded(model)
    plain, texts = logits(model, LONG), generate(model, ROWS)
    embedded.take()
    cache = npc.enable(model, **POOL, block_size=BLOCK)
    close(logits(model, LONG), plain)
    assert embedded.take() == LONG.shape[1]
    cache.clear()
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        close(logits(model, LONG[:, :end], keep=end - start), plain[:, start:end])
        assert embedded.take() == end - start
    for new in (ROWS_NEW, len(ROWS)):
        found = generate(model, ROWS)
        assert torch.equal(found.sequences, texts.sequences)
        close(found.logits, texts.logits)
        assert embedded.take() == new + (STEPS - 1) * len(ROWS)
    assert cache.stats().copies["H2D"] == cache.stats().copies["D2H"] == 0
    cache.check_integrity()
    npc.disable(model)


# ---- bfloat16: the operator that fits what a layer asks for, as the README's table says ----

PAGE = 128
PROMPT = tokens(PAGE + 30, seed=7)
#: Two rows that need equally many new tokens, which one call takes without packing, and others.
PACKED = [PROMPT, PROMPT[:, : PAGE + 1], join(PROMPT[:, :100], tokens(17, seed=4)), tokens(9, seed=6)]
PACKED_NEW = 1 + 1 + 17 + 9
#: What keeps rounding errors small: no weights that multiply them, and no experts that a last bit chooses.
MILD = {
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 4),
    "attention_multiplier": 0.25,
}
#: Two experts of those that always take two, and no threshold between them.
BOTH = {"phimoe": {"num_local_experts": 2, "router_jitter_noise": 0.0}}
#: The layout of the operator's call by what a layer asks for, where TND takes the shape of the heads and elsewhere.
TABLE = {
    "softcap": ("BNSD", "BNSD"),
    "chunk": ("BNSD", "BNSD"),
    "sinks": ("TND", "BNSD"),
    "window": ("TND", "BNSD"),
    "nothing": ("TND", "BSND"),
}
#: Every route and kind: those of TND, which no config takes as it is.
PACKS = {"head_dim": 128}
ROUTED = {
    "llama": PACKS,
    "granite": PACKS,
    "cwm": PACKS,
    "ministral": PACKS,
    "laguna": PACKS,
    "gpt_oss": PACKS,
    "granite_swa": PACKS,
    "flint": PACKS,
    "gemma2": PACKS,
    "gemma3_text": PACKS,
    "llama4_text": PACKS,
}


def asked(kind: AttentionKind) -> str:
    """The first of these that decides."""
    said = {
        "softcap": kind.softcap,
        "chunk": kind.span.chunk,
        "sinks": kind.sinks,
        "window": kind.span.window,
    }
    return next((name for name, value in said.items() if value is not None), "nothing")


def mild(config: PreTrainedConfig) -> PreTrainedConfig:
    for part in (config, config.get_text_config(), getattr(config, "ffn_config", None)):
        for name, value in MILD.items():
            if hasattr(part, name):
                setattr(part, name, value)
    return config


class Exact:
    """What a model would answer without rounding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._logits = functools.cache(lambda text: logits(model, torch.tensor([text])))

    def error(self, found: torch.Tensor, text: torch.Tensor) -> float:
        """Of the last logits of a text, ``[1, n, vocabulary]``."""
        return (found.float() - self._logits(tuple(text[0].tolist()))[:, -found.shape[1] :]).abs().max().item()

    def error_of_rows(self, found: ModelOutput) -> float:
        """Of what was generated, given the text before it: another near-tie is another text, and no error."""
        scores, texts = torch.stack(found.logits, dim=1).cpu(), found.sequences.cpu()
        length = texts.shape[1] - STEPS
        return max(
            self.error(scores[row : row + 1], texts[row : row + 1, length - prompt.shape[1] : -1])
            for row, prompt in enumerate(PACKED)
        )


@pytest.mark.parametrize(
    ("model_type", "changes"), [*((name, {}) for name in SERVED), *ROUTED.items()], ids=lambda value: str(value)
)
def test_in_bfloat16_hits_are_as_near_to_the_exact_logits_as_no_cache(
    model_type: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mild(tiny_config_of(model_type, **changes, **BOTH.get(model_type, {})))
    model, exact = build(config).bfloat16(), Exact(build(config).bfloat16().float())
    model.to("npu:0")
    embedded = Embedded(model)
    plain = logits(model, PROMPT)
    rounding = max(exact.error(plain, PROMPT), exact.error_of_rows(generate(model, PACKED)))
    assert rounding < 0.05 * plain.abs().max()  # or what is below would say nothing
    embedded.take()
    routes, route = set(), npu.route

    def spy(layout: npc.KVLayout, heads: int, kind: AttentionKind) -> npu.Route:
        way = route(layout, heads, kind)
        routes.add((asked(kind), way.layout))
        return way

    cache = npc.enable(model, **POOL)
    monkeypatch.setattr(npu, "route", spy)
    for start, end in ((0, 120), (120, PROMPT.shape[1] - 1), (PROMPT.shape[1] - 1, PROMPT.shape[1])):
        assert exact.error(logits(model, PROMPT[:, :end], keep=end - start), PROMPT[:, :end]) <= 2 * rounding
        assert embedded.take() == end - start
    assert exact.error_of_rows(generate(model, PACKED)) <= 2 * rounding
    assert embedded.take() == PACKED_NEW + (STEPS - 1) * len(PACKED)
    assert routes == {(kind, TABLE[kind][changes != PACKS]) for kind, _ in routes}
    assert bool(routes) == (way_of(config.get_text_config()) is Way.PAGED)  # others attend by themselves
    assert cache.stats().copies["H2D"] == cache.stats().copies["D2H"] == 0
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ({"head_dim": 128, "num_kv_heads": (2, 4)}, "TND"),
        ({"head_dim": (80, 16), "num_kv_heads": 2}, "BSND"),
        ({"head_dim": (128, 80), "num_kv_heads": 2}, "BNSD"),  # each of another operator
        ({"head_dim": 128, "num_kv_heads": 2, "value_head_dim": 64}, "BNSD"),
        ({"head_dim": 24, "num_kv_heads": 2, "value_head_dim": 8}, "BNSD"),
    ],
)
def test_layers_of_different_shapes_take_one_route(sizes: dict[str, object], way: str) -> None:
    layout = npc.KVLayout(num_layers=2, dtype=torch.bfloat16, **sizes)
    assert npu.route(layout, 4, AttentionKind()).layout == way


# ---- media ----


@pytest.mark.parametrize("model_type", SUPPORTED_MEDIA_TYPES)
def test_media_in_float32_and_bfloat16(model_type: str) -> None:
    shown, start = image(model_type, seed=1), words(PAGE - 9, seed=1)  # a picture over the end of a block
    prompts = [inputs(prompt(start, shown, words(n, seed=n))) for n in (5, 4)]
    new = prompts[0]["input_ids"].shape[1], 4

    def asked(model: PreTrainedModel, given: dict[str, torch.Tensor], keep: int) -> torch.Tensor:
        with torch.no_grad():
            moved = {name: value.to(model.device) for name, value in given.items()}
            return model(**moved, logits_to_keep=keep).logits.cpu().float()

    for dtype in (torch.float32, torch.bfloat16):
        model, exact = build_media(model_type).to(dtype), build_media(model_type).to(dtype).float()
        model.to("npu:0")
        wanted = [asked(exact, given, keep) for given, keep in zip(prompts, new, strict=True)]
        plain = [asked(model, given, keep) for given, keep in zip(prompts, new, strict=True)]
        rounding = max((found - right).abs().max() for found, right in zip(plain, wanted, strict=True))
        embedded, cache = Embedded(model), npc.enable(model, **POOL)
        for given, keep, right in zip(prompts, new, wanted, strict=True):
            found = asked(model, given, keep)
            assert (found - right).abs().max() <= max(2 * rounding, 1e-4)
            assert embedded.take() == keep
        assert rounding < 0.06 * wanted[0].abs().max()  # or this would say nothing
        cache.check_integrity()
        npc.disable(model)


# ---- beams ----

BEAMS = 3


@pytest.mark.parametrize("model_type", ["mistral", "gpt_oss"])
def test_beams_of_models_with_windows_and_sinks(model_type: str) -> None:
    """They part inside a block and pass its end, behind the first window and in it."""
    model = build(tiny_config_of(model_type)).to("npu:0")
    embedded = Embedded(model)
    options = {"steps": 10, "num_beams": BEAMS, "num_return_sequences": BEAMS}
    plain = generate(model, ROWS, **options)
    embedded.take()
    cache = npc.enable(model, **POOL, block_size=BLOCK)
    prompts = sum(row.shape[1] for row in ROWS) - BLOCK - 3  # which two rows begin with
    for new in (prompts, len(ROWS)):
        found = generate(model, ROWS, **options)
        assert torch.equal(found.sequences, plain.sequences)
        close(found.sequences_scores, plain.sequences_scores)
        assert embedded.take() == new + (BEAMS - 1) * len(ROWS) + 9 * BEAMS * len(ROWS)
    assert cache.stats().copies["H2D"] == cache.stats().copies["D2H"] == 0
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("changes", [{}, PACKS], ids=["BNSD", "TND"])
@pytest.mark.parametrize("model_type", ["mistral", "gpt_oss"])
def test_beams_in_bfloat16_are_as_near_to_the_exact_logits_as_no_cache(
    model_type: str, changes: dict[str, object]
) -> None:
    config = mild(tiny_config_of(model_type, **changes))
    model, exact = build(config).bfloat16().to("npu:0"), Exact(build(config).bfloat16().float())
    rounding = exact.error(logits(model, PROMPT), PROMPT)
    cache = npc.enable(model, **POOL)
    for _ in range(2):
        found = generate(model, [PROMPT], num_beams=BEAMS, num_return_sequences=BEAMS)
        for text, rows in zip(found.sequences.cpu(), found.beam_indices.tolist(), strict=True):
            # The row that each step of the text was computed in.
            steps = [scores[row] for scores, row in zip(found.logits, rows, strict=True)]
            assert exact.error(torch.stack(steps)[None].cpu(), text[None, :-1]) <= 2 * rounding
    cache.check_integrity()
    npc.disable(model)
