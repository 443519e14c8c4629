"""Every causal language model of transformers answers with the cache as it does without, or is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import LAYERS, LOADED_AS, MODEL_TYPES, NOT_BUILDABLE, WINDOW, build, tiny_config_of
from tiny import Embedded, join, left_padded, tokens
from transformers import CONFIG_MAPPING, DynamicCache, GPT2DoubleHeadsModel, PreTrainedModel
from transformers.models.cwm import modeling_cwm

import npu_prompt_cache as npc
from npu_prompt_cache.attention import cpu
from npu_prompt_cache.attention.kind import AttentionKind, Span
from npu_prompt_cache.integrations.transformers import SUPPORTED_MODEL_TYPES, attention, check_supported, models
from npu_prompt_cache.integrations.transformers.attention import kept_tokens

README = Path(__file__).parents[1] / "README.md"
BLOCK = 16
GREEDY = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}

#: Prompts that end before, at and after a block's end, each the beginning of the next.
BASE = tokens(2 * BLOCK + 1, seed=100)
PROMPTS = [BASE[:, : 2 * BLOCK - 1], BASE[:, : 2 * BLOCK], BASE, join(BASE, tokens(BLOCK, seed=1))]
#: What of them is new, one after another.
NEW = (2 * BLOCK - 1, 1, 1, BLOCK)
#: Rows that have all but a token, nothing, a part and nothing of them cached.
RAGGED = [BASE[:, :20], tokens(BLOCK + 11, seed=3), join(BASE[:, : BLOCK + 3], tokens(7, seed=4)), tokens(3, seed=6)]
RAGGED_NEW = (1, BLOCK + 11, 7, 3)
#: What the users of those four say next, and then.
SAID = [[tokens(n, seed=10 + n) for n in lengths] for lengths in ((5, BLOCK, 1, 9), (2, 1, 2 * BLOCK, 4))]
TURN = tokens(5, seed=2)


BUILDABLE = [name for name in MODEL_TYPES if name not in NOT_BUILDABLE]
TYPES = {name: LOADED_AS.get(name, CONFIG_MAPPING[name].model_type) for name in BUILDABLE}
SERVED = [name for name in BUILDABLE if TYPES[name] in SUPPORTED_MODEL_TYPES]


def enable(model: PreTrainedModel) -> npc.PromptCache:
    return npc.enable(model, pool_bytes=2 * LAYERS * 4 << 20, block_size=BLOCK)


def logits(model: PreTrainedModel, prompt: torch.Tensor, keep: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt, logits_to_keep=keep).logits


def converse(model: PreTrainedModel, embedded: Embedded) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Three turns of four conversations in one ragged batch: texts, logits of what was generated, tokens computed."""
    texts, scores, computed = [], [], []
    rows = RAGGED
    for said in (*SAID, None):
        output = model.generate(**left_padded(rows), **GREEDY, return_dict_in_generate=True, output_logits=True)
        texts.append(output.sequences)
        scores.extend(output.logits)
        computed.append(embedded.take())
        if said is not None:
            answers = [
                text[text.shape[0] - row.shape[1] - 4 :] for row, text in zip(rows, output.sequences, strict=True)
            ]
            rows = [join(answer[None], words) for answer, words in zip(answers, said, strict=True)]
    return texts, scores, computed


def check(model: PreTrainedModel) -> None:
    """Cold = hit = no cache, in logits and in text, and no token goes through the model that need not."""
    embedded = Embedded(model)
    plain = [logits(model, prompt, keep=0) for prompt in PROMPTS]
    texts = [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
    conversations = converse(model, embedded)
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
    for found, expected in zip(converse(model, embedded), (*conversations[:2], turns_computed()), strict=True):
        close(found, expected)
    assert torch.equal(model.generate(join(texts[-1], TURN), **GREEDY), turn)
    assert embedded.take() == 1 + TURN.shape[1] + 3
    cache.check_integrity()
    npc.disable(model)


def turns_computed() -> list[int]:
    """What is new, the last token of each answer, which was sampled and not computed; and three steps of four rows."""
    new = [sum(RAGGED_NEW), *(sum(1 + words.shape[1] for words in said) for said in SAID)]
    return [tokens + 3 * 4 for tokens in new]


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


#: Types of which a layer hides tokens that are further away than its window or before its chunk.
WINDOWED = [name for name in SERVED if any(kept_tokens(tiny_config_of(name).get_text_config()))]
LONG = tokens(4 * WINDOW + 3, seed=7)
#: Where hits end: before the first window is full, where it is, inside the last token's window, at its beginning, ….
ENDS = (WINDOW // 2, WINDOW - 1, WINDOW, 2 * WINDOW + 5, 3 * WINDOW + 3, 4 * WINDOW - 6, 4 * WINDOW + 2)


def test_these_types_have_windows() -> None:
    expected = (
        "afmoe beam cohere2 cohere2_moe cwm dots1 exaone4 exaone_moe flint gemma2 gemma3_text gpt_oss granite_swa "
        "granitemoe_swa kolibri1 laguna llama4_text mellum ministral ministral3 mistral mixtral modernbert-decoder "
        "olmo3 phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2 vaultgemma"
    )
    assert " ".join(WINDOWED) == expected


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in WINDOWED),
        ("mistral", {"sliding_window": 1}),  # of the token itself
        ("mistral", {"sliding_window": BLOCK}),
        ("mistral", {"sliding_window": 4 * WINDOW + 3}),
        ("llama4_text", {"layer_types": ["chunked_attention"] * LAYERS, "attention_chunk_size": 1}),
        ("llama4_text", {"layer_types": ["chunked_attention"] * LAYERS, "attention_chunk_size": 2 * BLOCK}),
    ],
)
def test_hits_end_before_inside_and_after_a_window(model_type: str, changes: dict[str, object]) -> None:
    model = build(tiny_config_of(model_type, **changes))
    embedded = Embedded(model)
    plain, count = logits(model, LONG, keep=0), LONG.shape[1]
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    cache = enable(model)
    for end in ENDS:
        cache.clear()
        logits(model, join(LONG[:, :end], tokens(20, seed=8)))
        embedded.take()
        close(logits(model, LONG, keep=count - end), plain[:, end:])
        assert embedded.take() == count - end
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "llama4_text", "mistral"])
def test_long_prompts_are_attended_to_in_pieces(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SMALLEST_PIECE", 1)
    model = build(tiny_config_of(model_type))
    plain = logits(model, LONG, keep=0)
    cut, pieces = cpu._cut, []

    def spy(*arguments: object) -> Iterator[object]:
        for piece in cut(*arguments):
            pieces.append((piece.stop - piece.start, piece.last - piece.first < 2 * WINDOW))
            yield piece

    monkeypatch.setattr(cpu, "_cut", spy)
    cache = enable(model)
    torch.testing.assert_close(logits(model, LONG, keep=LONG.shape[1]), plain, rtol=0, atol=1e-4)
    assert pieces[:5] == [*[(WINDOW, True)] * 4, (3, True)]
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("model_type", WINDOWED)
def test_decoding_passes_the_window_in_the_pool_and_outside_it(model_type: str) -> None:
    model = build(tiny_config_of(model_type))
    options = {"max_new_tokens": 2 * WINDOW, "min_new_tokens": 2 * WINDOW, "do_sample": False}
    prompts, more = left_padded([BASE[:, : WINDOW - 6], tokens(3, seed=9)]), tokens(2, seed=5)
    plain = model.generate(**prompts, **options)
    with torch.no_grad():
        wanted = model(join(LONG, more), logits_to_keep=2).logits
    cache = enable(model)
    assert torch.equal(model.generate(**prompts, **options), plain)
    assert torch.equal(model.generate(**prompts, **options), plain)
    with torch.no_grad():
        past = model(LONG).cache
        for each in (copy.deepcopy(past), past):  # outside the pool, where only the window is kept, and in it
            torch.testing.assert_close(model(more, cache=each).logits, wanted, rtol=0, atol=1e-4)
    cache.check_integrity()
    npc.disable(model)


#: What some of them ask for besides.
BESIDES = {
    **dict.fromkeys(("gemma2", "vaultgemma"), ("softcap",)),
    **dict.fromkeys(("flint", "gpt_oss", "granite_swa", "granitemoe_swa"), ("sinks",)),
}


@pytest.mark.parametrize("goes_on", ["detached", "in another model"])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_a_forward_that_is_not_served_goes_on_with_a_cache_of_the_pool(model_type: str, goes_on: str) -> None:
    """Its masks are of the windows that it will find outside the pool, from the first one on."""
    config = tiny_config_of(model_type)
    model, fresh = build(config), build(config)
    prompt, later = tokens(3 * WINDOW), [tokens(n, seed=n) for n in (1, 5)]
    with npc.PromptCache.for_model(model, pool_bytes=32 << 20, block_size=BLOCK) as cache, torch.no_grad():
        handle = cache.attach(model)
        ours, plain = model(prompt).cache, fresh(prompt).cache
        if goes_on == "detached":
            handle.detach()
        else:
            model = build(config)
        for turn in later:
            logits = model(turn, cache=ours).logits
            torch.testing.assert_close(logits, fresh(turn, cache=plain).logits, rtol=0, atol=1e-4)
        assert ours.is_sliding == plain.is_sliding
        assert cache.stats().leases == 0


@pytest.mark.parametrize("model_type", WINDOWED)
def test_the_checks_see_a_window_a_soft_cap_and_sinks(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each, left out alone, is seen: the checks above would fail."""
    model = build(tiny_config_of(model_type))
    plain = logits(model, LONG)
    seen, served = set(), attention._kind
    for left_out, nothing in (("span", Span()), ("softcap", None), ("sinks", None)):

        def kind(*arguments: object, left_out: str = left_out, nothing: object = nothing) -> AttentionKind:
            full = served(*arguments)
            if getattr(full, left_out) != nothing:
                seen.add(left_out)
            return dataclasses.replace(full, **{left_out: nothing})

        monkeypatch.setattr(attention, "_kind", kind)
        enable(model)
        difference = (logits(model, LONG) - plain).abs().max()
        npc.disable(model)
        assert (difference > 1e-3) == (left_out in seen)
    sinks = {"flint", "gpt_oss", "granite_swa", "granitemoe_swa"}
    assert seen == {
        "span",
        *(["softcap"] * (model_type in ("gemma2", "vaultgemma"))),
        *(["sinks"] * (model_type in sinks)),
    }


#: Models that are refused, and what their attention would have been asked for.
REFUSED = {
    "bert": ({"is_decoder": False}, "neither causal nor of a sliding window"),
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
    monkeypatch.setattr(attention, "_span", lambda function, size: Span())
    monkeypatch.setattr(attention.PagedForward, "span_of", lambda self, module, mask: Span())
    monkeypatch.setattr(attention.PagedForward, "layer_of", lambda self, module, key, value: module.layer_idx)
    with pytest.raises(AssertionError, match=seen):
        check(model)
    npc.disable(model)


def set_window(module: torch.nn.Module, kwargs: dict[str, object]) -> None:
    module.sliding_window = WINDOW + 1


def set_config(module: torch.nn.Module, kwargs: dict[str, object]) -> None:
    module.config.sliding_window = WINDOW + 1


def set_mask(module: torch.nn.Module, kwargs: dict[str, object]) -> None:
    kwargs["attention_mask"] = kwargs["attention_mask"].clone()


def set_bias(module: torch.nn.Module, kwargs: dict[str, object]) -> None:
    kwargs["position_bias"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("part", "meddle", "asked"),
    [
        ("model", set_config, "hides all but 25 tokens, where its config has 24 kept"),
        (
            "model.layers.2.self_attn",
            set_window,
            "a sliding_window of 25, where its mask has 24",
        ),
        ("model.layers.2.self_attn", set_mask, "by a mask that transformers' mask functions have not made"),
        ("model.layers.2.self_attn", set_bias, "asks its attention for position_bias, which is not served"),
    ],
)
def test_attention_that_is_asked_for_something_else_later_refuses(part: str, meddle, asked: str) -> None:
    model = build(tiny_config_of("cwm"))
    module = model.get_submodule(part)
    cache = enable(model)

    def hook(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        meddle(module, kwargs)
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(npc.UnsupportedModel, match=asked):
        logits(model, BASE)
    cache.check_integrity()
    npc.disable(model)


def test_a_mask_that_hides_something_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(tiny_config_of("cwm"))
    cache = enable(model)
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        with monkeypatch.context() as patch:
            made = getattr(modeling_cwm, name)
            patch.setattr(modeling_cwm, name, functools.partial(made, and_mask_function=lambda *_: torch.tensor(True)))
            with pytest.raises(npc.UnsupportedModel, match="neither causal nor of a sliding window"):
                logits(model, BASE)
    logits(model, BASE)
    assert cache.stats().committed_blocks == 3
    npc.disable(model)


#: Forms of supported types that their tiny config is not.
FORMS = {
    "deepseek_v3": {"q_lora_rank": None, "rope_interleave": False},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "glm4_moe_lite": {"kv_lora_rank": 48, "qk_rope_head_dim": 4, "head_dim": 4},
    "gpt_bigcode": {"multi_query": False, "num_key_value_heads": 4},
    "gpt_neox": {"use_parallel_residual": False},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    },
    "gemma2": {"attn_logit_softcapping": None},
    "llama4_text": {"no_rope_layers": [1, 0, 1], "use_qk_norm": False},
    "mellum": {"layer_types": ["full_attention"] * LAYERS},  # and a window of layers that it does not have
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": 10_000},
    "qwen3": {"use_sliding_window": False},
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
        ("falcon", {"alibi": True}, "ALiBi"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("gemma2", {"use_bidirectional_attention": True}, "it is an encoder"),
        ("lara_mini", {}, "layers of type linear_attention"),
        ("llama4_text", {"attn_temperature_tuning": True}, "by their column, padding included"),
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
    "layers that are no attention over all K/V so far, a window or a chunk": "layers of type",
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
