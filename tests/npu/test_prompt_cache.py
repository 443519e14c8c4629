"""The cache on ``npu:0`` inside transformers models, through the real torch_npu: the text that it gives on its own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny import LLAMA_LIKE, SYSTEM, join, left_padded, tiny_model, tokens
from transformers import LlamaForCausalLM, PreTrainedModel

import npu_prompt_cache as npc
from npu_prompt_cache import sim
from npu_prompt_cache.attention import npu
from npu_prompt_cache.attention.kind import AttentionKind
from npu_prompt_cache.attention.sequence import Sequence

DTYPES = [torch.float16, torch.bfloat16]

#: Shapes of attention that take different routes over the pool: changes of the tiny config.
SHAPES = {
    "TND, head_dim 128, grouped": {"head_dim": 128},
    "TND, head_dim 64": {"head_dim": 64, "num_key_value_heads": 4},
    "BSND, head_dim 64, grouped": {"head_dim": 64},
    "BSND, head_dim 80": {"head_dim": 80},
    "BSND, head_dim 16": {"head_dim": 16},
}


def mild_model(model_type: str = "llama", **changes: object) -> PreTrainedModel:
    """A tiny model that does not multiply rounding errors until they are all that is left."""
    options: dict[str, object] = {"initializer_range": 0.1}
    if model_type == "granite":
        options["attention_multiplier"] = 0.25
    return tiny_model(model_type, **{**options, **changes})


def on_npu(dtype: torch.dtype, model_type: str = "llama", **changes: object) -> PreTrainedModel:
    return mild_model(model_type, **changes).to("npu:0", dtype)


def generate(model: PreTrainedModel, prompt: torch.Tensor, count: int = 8, **options: object) -> torch.Tensor:
    return model.generate(prompt.to("npu:0"), max_new_tokens=count, do_sample=False, **options).cpu()


class Answers:
    """What the model gives without a cache, and whether another answer is the same.

    In float32 that is token by token. In half precision two logits may be nearer to each other than both attentions'
    rounding is; there, and only there, either token is right, and what follows it is another text.
    """

    def __init__(self, model: PreTrainedModel, exact: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
        self._exact = exact
        self.plain = [generate(model, prompt) for prompt in prompts]
        with torch.no_grad():
            found = [model(text[:, :-1].to("npu:0")).logits.cpu().double() for text in self.plain]
            wanted = [exact(text[:, :-1]).logits for text in self.plain]
        rounding = max((f - w).abs().max().item() for f, w in zip(found, wanted, strict=True))
        assert rounding < 0.02 * max(w.abs().max().item() for w in wanted)  # or the check below would say nothing
        self._bound = 0.0 if model.dtype is torch.float32 else 2 * rounding

    def check(self, number: int, answer: torch.Tensor) -> None:
        plain = self.plain[number]
        assert answer.shape == plain.shape
        different = (answer != plain)[0].nonzero()
        if len(different) == 0:
            return
        at = int(different[0])
        with torch.no_grad():
            logits = self._exact(plain[:, :at]).logits[0, -1]
        for text in (plain, answer):
            assert logits.max() - logits[text[0, at]] <= self._bound, f"another token at {at}, and no near-tie"


def check_batch(
    model: PreTrainedModel, cache: npc.PromptCache, batch: dict[str, torch.Tensor], answers: Answers
) -> None:
    """The left-padded prompts at once, after which no K/V have gone through the host."""
    rows = model.generate(**batch, max_new_tokens=8, do_sample=False).cpu()
    for number, (row, mask) in enumerate(zip(rows, batch["attention_mask"].cpu(), strict=True)):
        answers.check(number, row[None, int((mask == 0).sum()) :])
    assert cache.stats().copies["H2D"] == cache.stats().copies["D2H"] == 0
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("model_type", LLAMA_LIKE)
def test_cold_equals_hit_equals_no_cache(model_type: str, dtype: torch.dtype) -> None:
    model = on_npu(dtype, model_type)
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (100, 80, 33)]
    batch = {name: value.to("npu:0") for name, value in left_padded(prompts, extra=3).items()}
    answers = Answers(model, mild_model(model_type).to(dtype).double(), prompts)
    cache = npc.enable(model, pool_bytes=64 << 20)
    for repeat in range(2):
        for number, (prompt, new) in enumerate(zip(prompts, (600, 80, 33), strict=True)):
            before = cache.stats().computed_tokens
            answers.check(number, generate(model, prompt))
            assert cache.stats().computed_tokens - before == (1 if repeat else new)
    check_batch(model, cache, batch, answers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_route_gives_the_logits_of_no_cache(shape: str, dtype: torch.dtype) -> None:
    model = on_npu(dtype, **SHAPES[shape])
    exact = mild_model(**SHAPES[shape]).to(dtype).double()
    prompt = join(SYSTEM, tokens(100, seed=1))
    with torch.no_grad():
        wanted = exact(prompt, logits_to_keep=5).logits
        plain = model(prompt.to("npu:0"), logits_to_keep=5).logits.cpu().double()
        cache = npc.enable(model, pool_bytes=256 << 20)
        assert shape.startswith(npu.route(cache.layout, 4, AttentionKind()).layout)
        cold = model(prompt.to("npu:0"), logits_to_keep=5).logits.cpu().double()
        hit = model(prompt.to("npu:0"), logits_to_keep=5).logits.cpu().double()
    assert cache.stats().hit_tokens == 595
    npc.disable(model)
    # As near to the exact logits as the model without a cache is, give or take its own rounding.
    rounding = (plain - wanted).abs().max()
    for ours in (cold, hit):
        assert (ours - wanted).abs().max() <= 2 * rounding


#: What is attended to by torch's operators over the rows of all tokens, in any precision.
GATHERED: dict[str, dict[str, object]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "first_k_dense_replace": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "diffllama": {},
    "gpt_neox_japanese": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model_type", GATHERED)
def test_rows_of_all_tokens_give_the_answers_of_no_cache(model_type: str, dtype: torch.dtype) -> None:
    model = on_npu(dtype, model_type, **GATHERED[model_type])
    prompts = [join(SYSTEM[:, :150], tokens(n, seed=n)) for n in (40, 20, 33)]
    batch = {name: value.to("npu:0") for name, value in left_padded(prompts).items()}
    answers = Answers(model, mild_model(model_type, **GATHERED[model_type]).to(dtype).double(), prompts)
    cache = npc.enable(model, pool_bytes=64 << 20)
    for number, (prompt, new) in enumerate(zip(prompts, (190, 20, 33), strict=True)):
        before = cache.stats().computed_tokens
        answers.check(number, generate(model, prompt))
        assert cache.stats().computed_tokens - before == new
    check_batch(model, cache, batch, answers)


def test_layers_that_need_different_operators_go_by_torchs() -> None:
    layouts = {
        "TND": {"num_kv_heads": 2, "head_dim": 128},
        "BNSD": {"num_kv_heads": (2, 2), "head_dim": (128, 80)},
    }
    for layout, sizes in layouts.items():
        found = npu.route(npc.KVLayout(num_layers=2, dtype=torch.float16, **sizes), 4, AttentionKind())
        assert found.layout == layout
    differing = npc.KVLayout(num_layers=2, num_kv_heads=2, head_dim=128, value_head_dim=64, dtype=torch.float16)
    assert npu.route(differing, 4, AttentionKind()).layout == "BNSD"


MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
#: What layers may ask of their attention besides, and what serves them in half precision.
KINDS: dict[str, tuple[str, dict[str, object], set[str]]] = {
    "windows": ("mistral", {"head_dim": 128, "sliding_window": 200}, {"TND"}),
    "windows, head_dim 80": ("mistral", {"head_dim": 80, "sliding_window": 200}, {"BNSD"}),
    "windows in some layers": ("cwm", {**MIXED, "head_dim": 64, "sliding_window": 130}, {"BNSD", "BSND"}),
    "soft caps": ("gemma2", {**MIXED, "sliding_window": 130, "attn_logit_softcapping": 1.0}, {"BNSD"}),
    "chunks": (
        "llama4_text",
        {
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "attention_chunk_size": 130,
            "attn_temperature_tuning": False,
            "moe_layers": [],
            "intermediate_size_mlp": 96,
        },
        {"BNSD", "BSND"},
    ),
    "sinks": ("granite_swa", {**MIXED, "head_dim": 128, "sliding_window": 130, "attention_multiplier": 0.1}, {"TND"}),
    "sinks, head_dim 64": (
        "granite_swa",
        {**MIXED, "head_dim": 64, "sliding_window": 130, "attention_multiplier": 0.1},
        {"BNSD"},
    ),
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_logits_of_no_cache(name: str, dtype: torch.dtype, monkeypatch) -> None:
    model_type, changes, layouts = KINDS[name]
    model = on_npu(dtype, model_type, **changes)
    exact = mild_model(model_type, **changes).to(dtype).double()
    taken, route = set(), npu.route

    def spy(*arguments: object) -> npu.Route:
        taken.add(route(*arguments).layout)
        return route(*arguments)

    monkeypatch.setattr(npu, "route", spy)
    prompt, last = join(SYSTEM, tokens(100, seed=1)), 5
    on_device = prompt.to("npu:0")
    with torch.no_grad():
        wanted = exact(prompt, logits_to_keep=last).logits
        plain = model(on_device, logits_to_keep=last).logits.cpu().double()
        cache = npc.enable(model, pool_bytes=256 << 20)
        cold = model(on_device, logits_to_keep=last).logits
        hit = model(on_device, logits_to_keep=last).logits
        past, steps = model(on_device[:, :-last], logits_to_keep=1).cache, []
        for at in range(600 - last, 600):
            steps.append(model(on_device[:, at : at + 1], cache=past).logits)
    assert cache.stats().hit_tokens == 595 + 594
    npc.disable(model)
    if dtype is torch.float32 or (dtype is torch.float16 and "sinks" in name):  # that the operator does not take
        layouts = {"BNSD"}
    assert taken == layouts | {route(cache.layout, 4, AttentionKind()).layout}
    rounding = max((plain - wanted).abs().max(), 1e-6)
    for ours in (cold, hit, torch.cat(steps, dim=1)):
        assert (ours.cpu().double() - wanted).abs().max() <= 2 * rounding


@pytest.fixture(scope="module")
def twins() -> Iterator[tuple[PreTrainedModel, PreTrainedModel, npc.PromptCache]]:
    """The same model twice, without and with a cache."""
    plain, cached = on_npu(torch.float16), on_npu(torch.float16)
    cache = npc.enable(cached, pool_bytes=64 << 20)
    yield plain, cached, cache
    npc.disable(cached)


BOUNDARIES = [
    (length, end) for length in (1, 127, 128, 129, 255, 256, 257) for end in (0, 1, 127, 128, 129, 255) if end < length
]


@pytest.mark.parametrize(("length", "end"), BOUNDARIES)
def test_hits_that_end_at_any_place_of_a_block(twins, length: int, end: int) -> None:
    plain, cached, cache = twins
    cache.clear()
    prompt = tokens(length, seed=length)
    other = torch.where(prompt[:, end : end + 1] == 5, 6, 5)
    generate(cached, join(prompt[:, :end], other, tokens(20, seed=1)), count=2)
    hits = cache.stats().hit_tokens
    assert torch.equal(generate(cached, prompt), generate(plain, prompt))
    assert cache.stats().hit_tokens - hits == end
    assert torch.equal(generate(cached, prompt), generate(plain, prompt))
    assert cache.stats().hit_tokens - hits == end + length - 1
    cache.check_integrity()


def test_decoding_waits_no_more_often_than_without_a_cache(twins) -> None:
    plain, cached, _cache = twins
    prompt = tokens(200, seed=4)

    def waits(model: PreTrainedModel, count: int) -> dict[str, int]:
        sim.reset_counters()
        generate(model, prompt, count=count)
        counters = sim.counters()
        calls = {name: n for name, n in counters.calls.items() if "Synchronize" in name or name == "aclrtMemcpy"}
        return {**calls, "D2H": counters.copies["D2H"]}

    generate(cached, prompt)
    with_ours = [waits(cached, count) for count in (10, 74)]
    without = [waits(plain, count) for count in (10, 74)]
    for name in without[0]:
        assert with_ours[1][name] - with_ours[0][name] == without[1][name] - without[0][name], name


def test_a_request_that_goes_on_in_another_stream_waits_and_is_waited_for(twins) -> None:
    plain, cached, _ = twins
    prompt, more = tokens(140, seed=6).to("npu:0"), tokens(3, seed=7).to("npu:0")
    with torch.no_grad():
        wanted = plain(join(prompt, more), logits_to_keep=3).logits
        past = cached(prompt).cache
        sim.reset_counters()
        cached(more[:, :1], cache=past)
        assert sim.counters().calls["aclrtStreamWaitEvent"] == 0
        with torch.npu.stream(torch.npu.Stream()):
            found = cached(more[:, 1:], cache=past).logits
        assert sim.counters().calls["aclrtStreamWaitEvent"] == 2  # it for the stream before, that one for it
        torch.npu.synchronize()
    torch.testing.assert_close(found, wanted[:, 1:], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"head_dim": 128, "num_key_value_heads": 4}, 4),  # TND, planes of 16 blocks
        ({"head_dim": 96, "num_key_value_heads": 4}, 5),  # BSND, planes of 21
    ],
)
def test_rows_that_share_more_blocks_than_the_pool_has(changes: dict[str, int], rows: int) -> None:
    """The operator counts a shared block for each row, and refuses more blocks than there are: several calls then."""
    prompts = [join(SYSTEM, tokens(20, seed=row)) for row in range(rows)]
    batch = {name: value.to("npu:0") for name, value in left_padded(prompts).items()}
    model = on_npu(torch.float16, **changes)
    answers = Answers(model, mild_model(**changes).half().double(), prompts)
    cache = npc.enable(model, pool_bytes=16 << 20, watermark_bytes=0)
    generate(model, SYSTEM, count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = model.generate(**batch, max_new_tokens=8, do_sample=False).cpu()
    blocks = cache.key(0).shape[0]
    assert rows * 5 > blocks
    assert cache.stats().hit_tokens >= rows * 499
    for row, text in enumerate(texts):
        answers.check(row, text[None])
    npc.disable(model)


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_request_begun_in_one_mode_goes_on_in_another(twins, first) -> None:
    plain, cached, _ = twins
    second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    npu._causal_mask.cache_clear()
    prompt, more = tokens(250, seed=11).to("npu:0"), tokens(9, seed=12).to("npu:0")
    with first():
        past = cached(prompt).cache
    with second():
        found = cached(more, cache=past).logits
        wanted = plain(join(prompt, more), logits_to_keep=9).logits
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def far_positions(arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What somebody may do to the forwards of generate(): other positions in decoding."""
    if arguments["input_ids"].shape[1] == 1:
        arguments["position_ids"] = arguments["position_ids"] + 100
    return arguments


class OwnSampling(LlamaForCausalLM):
    def _sample(self, *args, **kwargs):
        forward = self.forward
        self.forward = lambda *a, **k: forward(*a, **far_positions(k))
        try:
            return super()._sample(*args, **kwargs)
        finally:
            self.forward = forward


class OwnCall(LlamaForCausalLM):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **far_positions(kwargs))


def wrap_forward(model: PreTrainedModel) -> None:
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *a, **k: forward(*a, **far_positions(k)))


def wrap_in_class(name: str, model: PreTrainedModel) -> None:
    """As a patch of the library's own class would."""
    real = getattr(type(model), name)

    def called(self, *args, **kwargs):  # its arguments are altered
        return real(self, *args, **far_positions(kwargs))

    def prepared(self, *args, **kwargs):  # its result is
        return far_positions(real(self, *args, **kwargs))

    patched = functools.wraps(real)(called if name == "__call__" else prepared)
    model.__class__ = type(type(model).__name__, (type(model),), {name: patched, "__module__": type(model).__module__})


wrap_call = functools.partial(wrap_in_class, "__call__")
wrap_preparation = functools.partial(wrap_in_class, "prepare_inputs_for_generation")


def hook(model: PreTrainedModel) -> None:
    model.register_forward_pre_hook(lambda _module, args, kwargs: (args, far_positions(kwargs)), with_kwargs=True)


@pytest.mark.parametrize("meddle", [wrap_forward, wrap_call, wrap_preparation, hook, OwnSampling, OwnCall])
def test_whoever_alters_the_forwards_of_generate_is_seen(meddle) -> None:
    texts = []
    for with_cache in (False, True):
        model = on_npu(torch.float32)
        if isinstance(meddle, type):
            model.__class__ = meddle
        cache = npc.enable(model, pool_bytes=64 << 20) if with_cache else None
        if not isinstance(meddle, type):
            meddle(model)
        texts.append(generate(model, tokens(40, seed=6)))
        if cache is not None:
            cache.close()
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], generate(on_npu(torch.float32), tokens(40, seed=6)))


def test_more_sequences_than_a_call_takes() -> None:
    """4096, and as many blocks as the pool has."""
    layout = npc.KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float16)
    count = 4097
    keys = torch.zeros(count + 1, 128, 1, 64, dtype=torch.float16, device="npu:0")
    first = torch.randn(count, 1, 64).half()
    keys[1:, 0] = first.to("npu:0")
    sequences = [Sequence(i, i + 1, 1, np.array([1 + i], np.int32)) for i in range(count)]
    batch = npu.paged_attention(layout, 1, keys.device).batch(sequences, 128 * (1 + np.arange(count)))
    found = batch.attend(torch.randn(1, 1, count, 64).half().to("npu:0"), keys, keys, AttentionKind())
    torch.testing.assert_close(found.cpu()[0], first, rtol=1e-3, atol=1e-3)  # of one key: its value


def test_tables_change_in_place(twins, monkeypatch) -> None:
    _, cached, _ = twins
    seen = []
    attend = npu.PagedAttention.attend

    def spy(self, query, keys, values, table, *rest):
        seen.append((table.data_ptr(), self._slots.data_ptr()))
        return attend(self, query, keys, values, table, *rest)

    monkeypatch.setattr(npu.PagedAttention, "attend", spy)
    generate(cached, tokens(120, seed=8), count=20)  # past the end of its first block
    assert len(seen) == 20 * 4
    assert len(set(seen)) == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("dtype", "changes", "options", "text"),
    [
        (torch.float16, {}, {"block_size": 64}, "takes blocks of 128, 256, 384 or 512 tokens"),
        (torch.float16, {}, {"block_size": 640}, "takes blocks of 128, 256, 384 or 512 tokens"),
        (torch.float16, {"head_dim": 24}, {}, "a multiple of 16, at most 512"),
        (torch.float16, {"head_dim": 528}, {}, "a multiple of 16, at most 512"),
        (
            torch.float16,
            {"hidden_size": 264, "num_attention_heads": 264, "num_key_value_heads": 264},
            {},
            "at most 256 query",
        ),
        (torch.float16, {"hidden_size": 130, "num_attention_heads": 130}, {}, "at most 64 query heads"),
    ],
)
def test_what_no_operator_takes_is_refused_by_reason(dtype, changes, options, text: str) -> None:
    model = on_npu(dtype, num_hidden_layers=1, **changes)
    cache = npc.PromptCache.for_model(model, pool_bytes=64 << 20, **options)
    with pytest.raises(npc.UnsupportedModel, match=text):
        cache.attach(model)
    assert "forward" not in vars(model)
    cache.close()


def test_a_model_elsewhere_than_the_cache_is_refused() -> None:
    model = tiny_model().half()
    cache = npc.PromptCache.for_model(model, device="npu:0", pool_bytes=64 << 20)
    with pytest.raises(ValueError, match="is on cpu, the cache on npu:0"):
        cache.attach(model)
    cache.close()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_deterministic_hits_give_the_logits_of_the_cold_run_bit_for_bit(shape: str, dtype: torch.dtype) -> None:
    model = on_npu(dtype, **SHAPES[shape])
    cache = npc.enable(model, pool_bytes=256 << 20, deterministic=True)
    prompts = [join(SYSTEM, tokens(n, seed=n)) for n in (100, 12, 13)]
    batch = {name: value.to("npu:0") for name, value in left_padded(prompts).items()}
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    cold = torch.stack(model.generate(**batch, **options).logits).cpu()
    hits = cache.stats().hit_tokens
    hit = torch.stack(model.generate(**batch, **options).logits).cpu()
    assert cache.stats().hit_tokens - hits == 512 + 384 + 512
    alone = torch.stack(model.generate(prompts[0].to("npu:0"), **options).logits).cpu()
    assert torch.equal(hit, cold)
    assert torch.equal(alone[:, 0], cold[:, 0])
    cache.check_integrity()
    npc.disable(model)
