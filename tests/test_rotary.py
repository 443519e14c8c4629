"""Rotary positions that depend on the length of a forward: cached keys are those that the request would compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from architectures import LAYERS, build, tiny_config_of
from tiny import Embedded, join, left_padded, tokens
from transformers import PreTrainedModel

import npu_prompt_cache as npc

SWITCH, BLOCK = 40, 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": SWITCH,
}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
#: Of models that hold on to the keys of the first regime, and of those that compute all again (Phi-3, PhiMoE).
LONG_MODELS = {
    "llama": {"rope_parameters": LONGROPE},
    "minicpm3": {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH},
    "phimoe": {"rope_parameters": LONGROPE | MSCALES, "original_max_position_embeddings": SWITCH},
}
DYNAMIC_MODELS = {
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH},
    "olmo3": {
        "rope_parameters": {
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "max_position_embeddings": SWITCH,
    },
}
LONG = tokens(2 * SWITCH, seed=11)


def make(model_type: str, changes: dict[str, object]) -> PreTrainedModel:
    return build(tiny_config_of(model_type, **changes))


def logits(model: PreTrainedModel, prompt: torch.Tensor, keep: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt, logits_to_keep=keep).logits


def fresh(model_type: str, changes: dict[str, object], prompt: torch.Tensor, keep: int = 1) -> torch.Tensor:
    """Of a model that has seen nothing: dynamic scaling remembers longer prompts."""
    return logits(make(model_type, changes), prompt, keep)


_enabled: list[PreTrainedModel] = []


@pytest.fixture(autouse=True)
def _disabled() -> Iterator[None]:
    yield
    while _enabled:
        npc.disable(_enabled.pop())


def enable(model: PreTrainedModel) -> npc.PromptCache:
    _enabled.append(model)
    return npc.enable(model, pool_bytes=2 * LAYERS * 4 << 20, block_size=BLOCK)


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", LONG_MODELS)
def test_longrope_keys_of_both_regimes_are_cached_apart(model_type: str) -> None:
    changes = LONG_MODELS[model_type]
    model = make(model_type, changes)
    wanted = {n: fresh(model_type, changes, LONG[:, :n], keep=0) for n in (30, SWITCH, SWITCH + 1, 70)}
    assert (wanted[SWITCH + 1][:, : SWITCH - 1] - wanted[SWITCH][:, : SWITCH - 1]).abs().max() > 1e-2
    cache, embedded = enable(model), Embedded(model)
    for length, new in ((70, 70), (30, 30), (SWITCH, SWITCH - 30), (SWITCH + 1, 1), (70, 1), (30, 1)):
        assert_close(logits(model, LONG[:, :length], keep=new), wanted[length][:, -new:])
        assert embedded.take() == new
    assert cache.lookup(LONG[0, :SWITCH]).cached_tokens == SWITCH
    assert cache.lookup(LONG[0, :70]).cached_tokens == 70
    cache.check_integrity()


@pytest.mark.parametrize("model_type", LONG_MODELS)
def test_a_short_row_beside_a_long_one_has_the_keys_of_the_long_regime(model_type: str) -> None:
    changes = LONG_MODELS[model_type]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    batch = left_padded([LONG[:, :20], LONG[:, :60], tokens(33, seed=3)])
    plain = make(model_type, changes).generate(**batch, **options)
    model = make(model_type, changes)
    enable(model)
    alone = fresh(model_type, changes, LONG[:, :20], keep=0)
    for _ in range(2):
        assert torch.equal(model.generate(**batch, **options), plain)
        assert_close(logits(model, LONG[:, :20]), alone[:, -1:])


@pytest.mark.parametrize("model_type", LONG_MODELS)
@pytest.mark.parametrize("begin", [SWITCH - 5, SWITCH - 1, SWITCH])
def test_decoding_past_the_switch_is_as_without_a_cache_and_publishes_no_mixed_keys(
    model_type: str, begin: int
) -> None:
    changes = LONG_MODELS[model_type]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    plain = make(model_type, changes).generate(LONG[:, :begin], **options)
    model = make(model_type, changes)
    cache = enable(model)
    for _ in range(2):
        assert torch.equal(model.generate(LONG[:, :begin], **options), plain)
    # Keys beyond the switch, and those before it that a longer prompt would have, are computed as that prompt's.
    for length in (SWITCH - 2, begin, begin + 8, begin + 12):
        prompt = plain[:, :length]
        assert_close(logits(model, prompt), fresh(model_type, changes, prompt))
    longer = join(plain, tokens(5, seed=6))
    assert_close(logits(model, longer, keep=1), fresh(model_type, changes, longer))
    cache.check_integrity()


def test_what_is_decoded_before_the_switch_is_published() -> None:
    model = make("llama", LONG_MODELS["llama"])
    cache = enable(model)
    text = model.generate(LONG[:, : SWITCH - 5], max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert cache.lookup(text[0, :SWITCH]).cached_tokens == SWITCH
    assert cache.lookup(text[0]) is None


def test_beams_past_the_switch() -> None:
    options = {"num_beams": 3, "max_new_tokens": 9, "do_sample": False, "num_return_sequences": 3}
    prompt = LONG[:, : SWITCH - 4]
    plain = make("llama", LONG_MODELS["llama"]).generate(prompt, **options)
    model = make("llama", LONG_MODELS["llama"])
    cache = enable(model)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, **options), plain)
    for row in plain:
        for length in (SWITCH - 1, SWITCH + 3):
            part = row[None, :length]
            assert_close(logits(model, part), fresh("llama", LONG_MODELS["llama"], part))
    cache.check_integrity()


@pytest.mark.parametrize(("before", "removed"), [(50, 4), (38, 2), (38, 10)])
def test_a_cropped_cache_past_the_switch_publishes_no_mixed_keys(before: int, removed: int) -> None:
    model = make("llama", LONG_MODELS["llama"])
    enable(model)
    more, at = tokens(8, seed=8), before - removed
    with torch.no_grad():
        past = model(LONG[:, :35]).cache
        model(LONG[:, 35:before], cache=past)
        past.crop(-removed)
        model(more, cache=past)
    text = join(LONG[:, :at], more)
    for prompt in (text, text[:, :39], LONG[:, :39], LONG[:, :60]):
        assert_close(logits(model, prompt), fresh("llama", LONG_MODELS["llama"], prompt))


@pytest.mark.parametrize("model_type", DYNAMIC_MODELS)
def test_dynamic_scaling_is_served_where_frequencies_are_fixed(model_type: str) -> None:
    changes = DYNAMIC_MODELS[model_type]
    model = make(model_type, changes)
    cache, embedded = enable(model), Embedded(model)
    lengths = (30, SWITCH - 1, SWITCH, 60, 30, 50)
    # What is longer depends on what the model saw before, and is the model's own.
    before = make(model_type, changes)
    for each in (model, before):
        logits(each, LONG[:, :70])
    embedded.take()
    wanted = [logits(before, LONG[:, :length]) for length in lengths]
    for length, expected, new in zip(lengths, wanted, (30, SWITCH - 1 - 30, SWITCH, 60, 1, 50), strict=True):
        assert_close(logits(model, LONG[:, :length]), expected)
        assert embedded.take() == new
    for _ in range(3):  # longer prompts, but for the first, do not make what is cached unreachable
        logits(model, LONG[:, :50])
        logits(model, LONG[:, :30])
        embedded.take()
        logits(model, LONG[:, :30])
        assert embedded.take() == 1
    assert cache.lookup(LONG[0, :30]).cached_tokens == 30
    assert cache.lookup(LONG[0, :50]) is None
    cache.check_integrity()


@pytest.mark.parametrize("model_type", DYNAMIC_MODELS)
def test_decoding_past_the_length_of_dynamic_scaling_goes_on_outside_the_pool(model_type: str) -> None:
    changes = DYNAMIC_MODELS[model_type]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    batch = left_padded([LONG[:, : SWITCH - 5], tokens(9, seed=2)])
    plain = make(model_type, changes).generate(**batch, **options)
    model = make(model_type, changes)
    cache = enable(model)
    for _ in range(2):  # the first time the model puts other frequencies in the place of its own
        assert torch.equal(model.generate(**batch, **options), plain)
    assert cache.lookup(plain[0, : SWITCH - 1]).cached_tokens == SWITCH - 1  # what was computed before
    assert torch.equal(model.generate(**batch, **options), plain)
    assert cache.stats().leases == 0
    cache.check_integrity()


def test_forwards_of_several_threads_come_one_after_another() -> None:
    """Each sets the frequencies that it reads, in a buffer of the model."""
    changes = LONG_MODELS["llama"]
    model, wrong, inside = make("llama", changes), [], []
    wanted = {length: fresh("llama", changes, LONG[:, :length]) for length in (30, 70)}
    enable(model)

    def enter(module: torch.nn.Module, inputs: object) -> None:
        inside.append(threading.get_ident())
        time.sleep(0.01)
        wrong.extend(inside[1:])

    model.model.embed_tokens.register_forward_pre_hook(enter)
    model.model.norm.register_forward_hook(lambda *_: inside.remove(threading.get_ident()))

    def run(length: int) -> None:
        for _ in range(5):
            if (logits(model, LONG[:, :length]) - wanted[length]).abs().max() > 1e-4:
                wrong.append(length)

    threads = [threading.Thread(target=run, args=(length,)) for length in (30, 70)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_deterministic_cache_runs_prompts_in_pieces_and_refuses_longrope() -> None:
    with pytest.raises(npc.UnsupportedModel, match="LlamaForCausalLM cannot use a deterministic cache: its LongRoPE"):
        npc.enable(make("llama", LONG_MODELS["llama"]), pool_bytes=64 << 20, deterministic=True)


def test_frequencies_that_are_written_to_are_another_model() -> None:
    model = make("llama", DYNAMIC_MODELS["llama"])
    cache = enable(model)
    logits(model, LONG[:, :30])
    model.model.rotary_emb.inv_freq.mul_(2)
    assert cache.lookup(LONG[0, :30]) is None


def test_an_unknown_scaling_is_refused() -> None:
    model = make("llama", {})
    model.model.rotary_emb.rope_type = "stretched"
    with pytest.raises(npc.UnsupportedModel, match="rope_type 'stretched' is not one of default"):
        npc.enable(model)


def test_warming_runs_the_beginning_of_a_longer_prompt_where_it_has_keys_of_its_own() -> None:
    model = make("llama", LONG_MODELS["llama"])
    cache, embedded = enable(model), Embedded(model)
    assert cache.warm([LONG[0, :20], LONG[0, :70], LONG[0, :30]]).cached_tokens == [20, 70, 30]
    assert embedded.take() == 30 + 70
