"""Models that are given the rows of all tokens: what could make them silently wrong is refused where it happens."""

from __future__ import annotations

import pytest
import torch
from architectures import LAYERS, build, tiny_config_of
from tiny import left_padded, tokens
from transformers import PreTrainedModel

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import models

BLOCK = 16
MULTI_HEAD = {"multi_query": False}


def enable(model: PreTrainedModel) -> npc.PromptCache:
    return npc.enable(model, pool_bytes=2 * LAYERS * 4 << 20, block_size=BLOCK)


def logits(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt, logits_to_keep=1).logits


@pytest.mark.parametrize(
    ("model_type", "changes", "key", "value"),
    [
        ("deepseek_v3", {}, (1, 32), (1, 8)),
        ("minicpm3", {"kv_lora_rank": 64}, (1, 64), (1, 8)),
        ("jetmoe", {}, (2, 16), (2, 16)),
        ("falcon", {}, (1, 16), (1, 16)),
        ("falcon", MULTI_HEAD, (4, 16), (4, 16)),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, (4, 16), (4, 16)),
    ],
)
def test_the_pool_holds_what_the_model_caches(
    model_type: str, changes: dict[str, object], key: tuple[int, int], value: tuple[int, int]
) -> None:
    model = build(tiny_config_of(model_type, **changes))
    prompt = tokens(2 * BLOCK + 3, seed=1)
    cache = enable(model)
    plain = logits(model, prompt)
    assert (tuple(cache.key(0).shape[2:]), tuple(cache.value(0).shape[2:])) == (key, value)
    assert cache.lookup(prompt[0]).cached_tokens == prompt.shape[1]
    torch.testing.assert_close(logits(model, prompt), plain, rtol=0, atol=1e-4)
    npc.disable(model)
    torch.testing.assert_close(logits(model, prompt), plain, rtol=0, atol=1e-4)


def test_a_model_that_has_its_own_attention_keeps_its_name() -> None:
    """It reads it: under another one it would run other code."""
    model = build(tiny_config_of("falcon"))
    enable(model)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    plain, batch = tokens(20, seed=2), left_padded([tokens(20, seed=2), tokens(33, seed=3)])
    options = {"max_new_tokens": 4, "do_sample": False}
    texts = [model.generate(plain, **options), model.generate(**batch, **options)]
    npc.disable(model)
    assert torch.equal(model.generate(plain, **options), texts[0])
    assert torch.equal(model.generate(**batch, **options), texts[1])


def test_attention_over_other_tokens_than_it_was_given_is_refused() -> None:
    model = build(tiny_config_of("deepseek_v3"))
    enable(model)
    attention = model.model.layers[1].self_attn
    expand = attention.expand_kv
    attention.expand_kv = lambda latents, rotary: [each[:, :, 1:] for each in expand(latents, rotary)]
    with pytest.raises(npc.UnsupportedModel, match=r"DeepseekV3Attention attends over 19 keys and 19 values, .* 20"):
        logits(model, tokens(20))
    npc.disable(model)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(1, "layer 1 cached its keys and values and did not attend"), (LAYERS - 1, "3 cached in the pool and 2 attended")],
)
def test_a_layer_that_caches_and_does_not_attend_is_refused(
    layer: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(tiny_config_of("diffllama"))
    enable(model)
    attention = model.model.layers[layer].self_attn

    def without_attention(hidden_states: torch.Tensor, cache: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        states = hidden_states.new_zeros(1, 2, hidden_states.shape[1], 16)
        cache.update(states, states, layer)
        return torch.zeros_like(hidden_states), None

    monkeypatch.setattr(attention, "forward", without_attention)
    with pytest.raises(npc.UnsupportedModel, match=message):
        logits(model, tokens(20))
    npc.disable(model)


def test_a_layer_that_caches_twice_is_refused() -> None:
    model = build(tiny_config_of("deepseek_v3"))
    enable(model)
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(npc.UnsupportedModel, match="layer 1 caches twice in one forward"):
        logits(model, tokens(20))
    npc.disable(model)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "jetmoe"])
def test_without_the_rows_of_all_tokens_these_are_refused(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_GATHERED", frozenset())
    model = build(tiny_config_of(model_type))
    enable(model)
    with pytest.raises(npc.UnsupportedModel, match="attends over other keys or values than it caches"):
        logits(model, tokens(20))
    npc.disable(model)


def test_without_their_mask_others_are_seen_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch would see one another: the tests of all models would fail."""
    model = build(tiny_config_of("falcon"))
    batch = left_padded([tokens(20, seed=2), tokens(33, seed=3)])
    with torch.no_grad():
        plain = model(**batch, position_ids=(batch["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits[:, -1]
        monkeypatch.setattr("npu_prompt_cache.attention.cpu.BatchReader.hidden", no_other_row_is_hidden)
        enable(model)
        seen = model(**batch, position_ids=(batch["attention_mask"].cumsum(1) - 1).clamp(min=0), logits_to_keep=1)
    assert (seen.logits[:, -1] - plain).abs().max() > 1e-2
    npc.disable(model)


def no_other_row_is_hidden(reader: object) -> torch.Tensor:
    tokens = sum(sequence.tokens for sequence in reader.sequences)
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu_(1)
