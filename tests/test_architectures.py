"""Every causal language model of transformers answers with the cache as it does without, or is refused by name."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import LAYERS, LOADED_AS, MODEL_TYPES, NOT_BUILDABLE, build, tiny_config_of
from tiny import join, left_padded, tokens
from transformers import CONFIG_MAPPING, DynamicCache, GPT2DoubleHeadsModel, PreTrainedModel

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import SUPPORTED_MODEL_TYPES, attention, check_supported, models

README = Path(__file__).parents[1] / "README.md"
BLOCK = 16
GREEDY = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}

#: Prompts that end before, at and after a block's end, each the beginning of the next.
BASE = tokens(2 * BLOCK + 1, seed=100)
PROMPTS = [BASE[:, : 2 * BLOCK - 1], BASE[:, : 2 * BLOCK], BASE, join(BASE, tokens(BLOCK, seed=1))]
#: What of them is new, one after another.
NEW = (2 * BLOCK - 1, 1, 1, BLOCK)
RAGGED = [BASE[:, :20], tokens(BLOCK + 11, seed=3), join(BASE[:, : BLOCK + 3], tokens(7, seed=4))]
RAGGED_NEW = 1 + (BLOCK + 11) + 7
TURN = tokens(5, seed=2)


BUILDABLE = [name for name in MODEL_TYPES if name not in NOT_BUILDABLE]
TYPES = {name: LOADED_AS.get(name, CONFIG_MAPPING[name].model_type) for name in BUILDABLE}
SERVED = [name for name in BUILDABLE if TYPES[name] in SUPPORTED_MODEL_TYPES]


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _code_of_models_is_not_looked_at_again(_frozen: None) -> None:
    """The collection after each test would walk all that was imported so far: half of the time of these tests."""
    gc.freeze()


class Embedded:
    """Counts the tokens that go through the model's embedding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tokens = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._tokens += output.shape[:-1].numel()

    def take(self) -> int:
        taken, self._tokens = self._tokens, 0
        return taken


def enable(model: PreTrainedModel) -> npc.PromptCache:
    return npc.enable(model, pool_bytes=2 * LAYERS * 4 << 20, block_size=BLOCK)


def logits(model: PreTrainedModel, prompt: torch.Tensor, keep: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt, logits_to_keep=keep).logits


def check(model: PreTrainedModel) -> None:
    """Cold = hit = no cache, in logits and in text, and no token goes through the model that need not."""
    embedded = Embedded(model)
    plain = [logits(model, prompt, keep=0) for prompt in PROMPTS]
    texts = [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
    batch = model.generate(**left_padded(RAGGED), **GREEDY)
    turn = model.generate(join(texts[-1], TURN), **GREEDY)
    # Where the last logits say nothing about the first token, what is below could not fail.
    another = logits(model, join(tokens(1, seed=5), PROMPTS[-1][:, 1:]))
    assert (another - plain[-1][:, -1:]).abs().max() > 1e-2
    embedded.take()

    cache = enable(model)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    close(logits(model, PROMPTS[0], keep=NEW[0]), plain[0])
    assert embedded.take() == NEW[0]
    for prompt, expected, new in zip(PROMPTS[1:], plain[1:], NEW[1:], strict=True):
        close(logits(model, prompt, keep=new), expected[:, -new:])
        assert embedded.take() == new
    for prompt, expected, text in zip(PROMPTS, plain, texts, strict=True):
        close(logits(model, prompt), expected[:, -1:])
        assert embedded.take() == 1
        assert torch.equal(model.generate(prompt, **GREEDY), text)
        assert embedded.take() == 1 + 3
    assert torch.equal(model.generate(**left_padded(RAGGED), **GREEDY), batch)
    assert embedded.take() == RAGGED_NEW + 3 * 3
    assert torch.equal(model.generate(join(texts[-1], TURN), **GREEDY), turn)
    assert embedded.take() == 1 + TURN.shape[1] + 3
    cache.check_integrity()
    npc.disable(model)


@functools.cache
def reason(model_type: str) -> str:
    """Why the cache refuses the type; empty where it serves it. Of a model without weights: some are large."""
    try:
        check_supported(build(tiny_config_of(model_type), "meta"))
    except npc.UnsupportedModel as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_answers_as_without_a_cache_or_is_refused_by_name(model_type: str) -> None:
    if model_type in NOT_BUILDABLE:
        pytest.skip(NOT_BUILDABLE[model_type])
    config = tiny_config_of(model_type)
    if model_type not in SERVED:
        model = build(config, "meta")
        with pytest.raises(
            npc.UnsupportedModel, match=f"^{type(model).__name__} cannot use the prompt cache: .{{20,}}"
        ):
            npc.enable(model)
    else:
        check(build(config))


@pytest.mark.parametrize("model_type", SERVED)
def test_half_precision_and_eager_attention_cache_what_the_model_caches(model_type: str) -> None:
    model = build(tiny_config_of(model_type), attn_implementation="eager").bfloat16()
    plain, prompt = DynamicCache(config=model.config), PROMPTS[-1]
    with torch.no_grad():
        model(prompt, cache=plain)
        enable(model)
        paged = model(prompt, logits_to_keep=1).cache
        # Of the first layer: what later ones cache depends on how attention rounds.
        assert torch.equal(paged.layers[0].keys, plain.layers[0].keys)
        assert torch.equal(paged.layers[0].values, plain.layers[0].values)
        bypassed = model(prompt, use_cache=False).logits
    npc.disable(model)
    assert torch.equal(bypassed, logits(model, prompt, keep=0))


_FULL = {"layer_types": ["full_attention"] * LAYERS}
#: Models that are refused, and what their attention would have been asked for.
REFUSED = {
    "bert": ({"is_decoder": False}, "later tokens"),
    "gemma2": (_FULL | {"attn_logit_softcapping": 1.0}, "softcap"),
    "gpt_oss": (_FULL, "s_aux"),
    "jetmoe": ({}, "other keys or values"),
    "mistral": ({"sliding_window": 24}, "sliding_window"),
    "qwen3": ({"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, "sliding_window"),
}


def served_anyway(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    with pytest.raises(npc.UnsupportedModel):
        npc.enable(model)
    monkeypatch.setattr(models, "check_supported", lambda model: model.config)
    return model


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_refused_is_refused_again_where_attention_is_asked_for_it(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, asked = REFUSED[model_type]
    model = served_anyway(build(tiny_config_of(model_type, **changes)), monkeypatch)
    with pytest.raises(npc.UnsupportedModel, match=asked):
        check(model)
    npc.disable(model)


@pytest.mark.parametrize(
    ("model_type", "seen"),
    [
        *((name, "not close") for name in REFUSED),
        ("camembert", "not close"),  # positions that do not count from 0
        ("bloom", "32 == 1"),  # ALiBi
        ("xglm", "32 == 1"),  # no registry: never cached
    ],
)
def test_the_check_sees_what_is_refused(model_type: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, _ = REFUSED.get(model_type, ({}, ""))
    model = served_anyway(build(tiny_config_of(model_type, **changes)), monkeypatch)
    monkeypatch.setattr(attention, "_refuse_what_is_not_served", lambda module, kwargs: None)
    monkeypatch.setattr(attention.PagedForward, "check_same", lambda self, module, key, value: None)
    with pytest.raises(AssertionError, match=seen):
        check(model)
    npc.disable(model)


#: Forms of supported types that their tiny config is not.
FORMS = {
    "gpt_bigcode": {"multi_query": False, "num_key_value_heads": 4},
    "gpt_neox": {"use_parallel_residual": False},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    },
    "mellum": {"sliding_window": 8},  # of layers that it does not have
    "opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
}


@pytest.mark.parametrize("model_type", FORMS)
def test_other_forms_of_supported_types(model_type: str) -> None:
    check(build(tiny_config_of(model_type, **FORMS[model_type])))


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("bert", {"is_decoder": False}, "it is an encoder"),
        ("gpt2", {"add_cross_attention": True}, "it has cross-attention"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "sliding_attention"),
        ("mixtral", {"sliding_window": 8}, "sliding_window=8"),
        (
            "hunyuan_v1_moe",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'",
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
            "'dynamic'",
        ),
    ],
)
def test_forms_of_supported_types_that_are_refused(model_type: str, changes: dict[str, object], why: str) -> None:
    with pytest.raises(npc.UnsupportedModel, match=why):
        npc.enable(build(tiny_config_of(model_type, **changes)))


def test_a_class_of_a_supported_type_with_another_forward_is_refused() -> None:
    with pytest.raises(npc.UnsupportedModel, match=r"GPT2DoubleHeadsModel cannot .* takes no logits_to_keep"):
        npc.enable(GPT2DoubleHeadsModel(tiny_config_of("gpt2")))


def test_who_asks_for_router_logits_gets_them_uncached() -> None:
    """They, and the loss that is made of them, are of all tokens of the prompt."""
    model = build(tiny_config_of("mixtral"))
    mask = torch.ones_like(BASE)
    with torch.no_grad():
        plain = model(BASE, attention_mask=mask, output_router_logits=True)
    cache = enable(model)
    for options in ({"output_router_logits": True}, {}):
        with torch.no_grad():
            asked = model(BASE, attention_mask=mask, **options)
        torch.testing.assert_close(asked.aux_loss, plain.aux_loss)
        model.config.output_router_logits = True
    assert cache.stats().lookups == 0
    npc.disable(model)


def test_every_supported_type_is_checked() -> None:
    assert {TYPES[name] for name in SERVED} == set(SUPPORTED_MODEL_TYPES)


#: Reasons of refusals as they stand in the README, by what the messages have in common.
KINDS = {
    "other layers than full attention: windows, chunks, recurrent, convolutions": "layers of type|sliding window",
    "K/V from latents": "latents",
    "a forward that takes no positions, cache or choice of logits": "forward takes no",
    "attention outside transformers' registry": "registry",
    "images or sound besides text": "text is only a part|reads images|attend to images",
    "other reasons, which the message names": "",
}


def table() -> str:
    """The README's: every causal language model type of transformers in one of its rows."""
    rows: dict[str, list[str]] = {"**supported**": sorted(SUPPORTED_MODEL_TYPES), **{kind: [] for kind in KINDS}}
    for model_type in BUILDABLE:
        if why := reason(model_type):
            rows[next(kind for kind, words in KINDS.items() if re.search(words, why))].append(model_type)
    rows["not looked at"] = sorted(NOT_BUILDABLE)
    lines = [f"| {kind} | {len(of)} | {', '.join(f'`{name}`' for name in of)} |" for kind, of in rows.items()]
    return "\n".join(["| | | model types |", "|---|---|---|", *lines])


def test_the_readme_has_the_table_of_models() -> None:
    begin, end = "<!-- supported models -->\n", "\n<!-- /supported models -->"
    found = README.read_text().split(begin)[1].split(end)[0]
    assert found == table(), f"in README.md put this between {begin.strip()} and {end.strip()}:\n\n{table()}"
