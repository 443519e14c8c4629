"""Adapters of peft: they are part of the namespace, and switching back finds what was cached before."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tiny import join, left_padded, tiny_model, tokens
from transformers.generation.streamers import BaseStreamer

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import CacheBypassWarning

# peft asks transformers for an attribute that has another name now.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*past_key_values. is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _transformers_takes_this_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks for peft 0.22, which is not published; what it calls is all in 0.21."""
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.21.0")


PREFIX = tokens(200, seed=7)
PROMPT = join(PREFIX, tokens(5))
NEW = 4


def lora(**changes: object) -> peft.LoraConfig:
    """Weights of both halves are random: an adapter that begins as nothing would pass for the base model."""
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**options, "task_type": "CAUSAL_LM", **changes})


def adapted(*configs: peft.PeftConfig) -> peft.PeftModel:
    """A model with the adapters "one" and "two", of which "one" is active."""
    first, *others = configs or (lora(), lora(r=8))
    model = peft.get_peft_model(tiny_model(), first, "one")
    for name, config in zip(("two", "three"), others, strict=False):
        model.add_adapter(name, config)
    with torch.no_grad():  # some begin as nothing whatever they are told
        for name, weight in model.named_parameters():
            if "ia3" in name or "modules_to_save" in name or "magnitude" in name:
                weight.mul_(torch.rand(weight.shape) + 0.5)
    return model.eval()


def text(model: torch.nn.Module, prompt: torch.Tensor = PROMPT, **options: object) -> torch.Tensor:
    return model.generate(input_ids=prompt, max_new_tokens=NEW, do_sample=False, **options)


class Embedded:
    """Counts the tokens that go through the embedding layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._total = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._total += args[0].numel()

    def take(self) -> int:
        total, self._total = self._total, 0
        return total


def served(model: torch.nn.Module, prompt: torch.Tensor = PROMPT) -> tuple[torch.Tensor, int]:
    """The text, and how many tokens of the prompt were computed for it."""
    cache = (
        model.forward.attachment.cache if "forward" in vars(model) else model.get_base_model().forward.attachment.cache
    )
    before = cache.stats().computed_tokens
    out = text(model, prompt)
    return out, cache.stats().computed_tokens - before


# ---- switching ----


def with_peft(model: transformers.PreTrainedModel) -> Callable[[str | None, torch.Tensor], torch.Tensor]:
    wrapper = peft.get_peft_model(model, lora(), "one")
    wrapper.add_adapter("two", lora(r=8))
    wrapper.eval()

    def run(adapter: str | None, prompt: torch.Tensor) -> torch.Tensor:
        if adapter is None:
            with wrapper.disable_adapter():
                return text(wrapper, prompt)
        wrapper.set_adapter(adapter)
        return text(wrapper, prompt)

    return run


def with_transformers(model: transformers.PreTrainedModel) -> Callable[[str | None, torch.Tensor], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        model.add_adapter(lora(), "one")
        model.add_adapter(lora(r=8), "two")
    model.eval()

    def run(adapter: str | None, prompt: torch.Tensor) -> torch.Tensor:
        if adapter is None:
            model.disable_adapters()
        else:
            model.enable_adapters()
            model.set_adapter(adapter)
        return text(model, prompt)

    return run


@pytest.mark.parametrize("way", [with_peft, with_transformers])
@pytest.mark.parametrize("attached", ["before", "after"])
def test_two_adapters_and_the_base_interleaved(way: Callable[..., Callable[..., torch.Tensor]], attached: str) -> None:
    model, plain = tiny_model(), tiny_model()
    embedded = Embedded(model)
    if attached == "before":
        npc.enable(model, pool_bytes=64 << 20)
    torch.manual_seed(5)
    run = way(model)
    torch.manual_seed(5)
    run_plain = way(plain)
    if attached == "after":
        npc.enable(model, pool_bytes=64 << 20)
    prompts = [join(PREFIX, torch.tensor([[10 + i]]), tokens(20 + i, seed=i)) for i in range(5)]
    wanted = {(a, i): run_plain(a, prompts[i]) for a in ("one", "two", None) for i in range(5)}
    for i in range(5):  # adapters that matter
        assert len({tuple(wanted[a, i][0, -NEW:].tolist()) for a in ("one", "two", None)}) == 3
    requests, seen, seen_adapters = random.Random(3), set(), set()
    embedded.take()
    for _ in range(100):
        request = adapter, which = requests.choice(list(wanted))
        assert torch.equal(run(adapter, prompts[which]), wanted[request])
        cached = len(prompts[which][0]) - 1 if request in seen else 200 if adapter in seen_adapters else 0
        assert embedded.take() == len(prompts[which][0]) - cached + NEW - 1
        seen.add(request)
        seen_adapters.add(adapter)
    assert len(seen) == 15
    npc.disable(model)


def test_whatever_it_is_attached_to_everything_is_served() -> None:
    model = adapted()
    base = model.get_base_model()
    wanted = text(model)
    for target in (model, model.base_model, base):
        cache = npc.enable(target, pool_bytes=64 << 20)
        with pytest.raises(ValueError, match="attached already"):
            cache.attach(model)
        computed = []
        for caller in (model, model.base_model, base):
            out, count = served(base) if caller is base else served(model)
            assert torch.equal(out, wanted)
            computed.append(count)
        assert computed == [205, 1, 1]
        assert cache.lookup(PROMPT[0]).cached_tokens == 205
        with torch.no_grad():
            assert torch.equal(model(input_ids=PROMPT, logits_to_keep=1).logits.argmax(-1)[0], wanted[0, 205:206])
        assert torch.equal(text(model.base_model), wanted)
        npc.disable(model)
    assert "forward" not in vars(base)


# ---- what makes another namespace ----


def train(model: peft.PeftModel) -> None:
    model.train()
    optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=1.0)
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


def tuners(model: peft.PeftModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "set_scale")]


def scale(model: peft.PeftModel, by: float) -> None:
    for layer in tuners(model):
        layer.set_scale("one", by)


def combine(model: peft.PeftModel) -> None:
    model.add_weighted_adapter(["one", "two"], [0.7, 0.5], "both", combination_type="cat")
    model.set_adapter("both")


def merge_and_unmerge(model: peft.PeftModel) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def replace_under_its_name(model: peft.PeftModel) -> None:
    model.delete_adapter("one")
    torch.manual_seed(11)
    model.add_adapter("one", lora())
    model.set_adapter("one")
    model.eval()


CHANGES = {
    "trained": train,
    "scaled": lambda m: scale(m, 3.0),
    "one layer scaled": lambda m: tuners(m)[2].set_scale("one", 0.1),
    "two combined": combine,
    "two at once": lambda m: m.base_model.set_adapter(["one", "two"]),
    "merged": lambda m: m.merge_adapter(),
    "merged safely": lambda m: m.merge_adapter(safe_merge=True),
    "merged and unmerged": merge_and_unmerge,
    "merged for good": lambda m: m.merge_and_unload(),
    "unloaded": lambda m: m.unload(),
    "another of this name": replace_under_its_name,
    "one layer switched off": lambda m: tuners(m)[0].enable_adapters(False),
    "one layer on another": lambda m: tuners(m)[0].set_adapter("two"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:Adapter one was active which is now deleted")
def test_adapters_that_changed_are_never_hit(change: str) -> None:
    model = adapted()
    plain = copy.deepcopy(model)
    cache = npc.enable(model, pool_bytes=64 << 20)
    assert served(model.get_base_model())[1] == 205
    for each in (model, plain):
        CHANGES[change](each)
    assert cache.lookup(PROMPT[0]) is None
    for expected in (205, 1):
        out, computed = served(model.get_base_model())
        assert computed == expected
        assert torch.equal(out, text(plain.get_base_model()))
    npc.disable(model)


def test_switching_back_hits_again() -> None:
    model = adapted()
    npc.enable(model, pool_bytes=64 << 20)
    ways = {
        "one": lambda: model.set_adapter("one"),
        "scaled": lambda: scale(model, 2.0),
        "scaled back": lambda: scale(model, 1.0),
        "two": lambda: model.set_adapter("two"),
        "both": lambda: model.base_model.set_adapter(["one", "two"]),
        "both, the other way round": lambda: model.base_model.set_adapter(["two", "one"]),
        "off": lambda: model.base_model.disable_adapter_layers(),
    }
    computed = {}
    for way, turn in itertools.chain(ways.items(), ways.items()):
        model.base_model.enable_adapter_layers()
        turn()
        computed.setdefault(way, []).append(served(model)[1])
    assert computed.pop("scaled back") == [1, 1]
    assert computed.pop("one") == [205, 1]
    assert all(counts == [205, 1] for counts in computed.values()), computed
    npc.disable(model)


def test_switched_off_while_merged() -> None:
    """peft takes the merged adapters out in the middle of the forward."""
    model = adapted()
    plain = copy.deepcopy(model)
    npc.enable(model, pool_bytes=64 << 20)
    outputs = []
    for each in (model, plain):
        each.merge_adapter()
        merged = text(each)
        with each.disable_adapter():
            outputs.append([merged, text(each), text(each), text(each)])
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    with model.disable_adapter():
        assert served(model)[1] == 1
    npc.disable(model)


class Calling(BaseStreamer):
    """Calls a function at the second token."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self._function()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("way", ["chosen", "chosen and back", "off, a request, on"])
def test_a_switch_in_the_middle_of_a_request_publishes_nothing(way: str) -> None:
    model = adapted()
    cache = npc.enable(model, pool_bytes=64 << 20)

    def switch() -> None:
        if way == "off, a request, on":
            with model.disable_adapter(), torch.no_grad():
                model(input_ids=tokens(20), logits_to_keep=1)
            return
        model.set_adapter("two")
        if way == "chosen and back":
            model.set_adapter("one")

    text(model, streamer=Calling(switch))
    assert cache.lookup(PROMPT[0]) is None
    assert served(model)[1] == 205
    assert served(model)[1] == 1
    npc.disable(model)


def test_a_batch_of_several_adapters_runs_uncached_and_leaves_entries_alone() -> None:
    model = adapted()
    batch = left_padded([join(PREFIX, tokens(n, seed=n)) for n in (5, 9, 2)])
    options = {**batch, "adapter_names": ["one", "__base__", "two"], "max_new_tokens": NEW, "do_sample": False}
    plain = model.generate(**options)
    cache = npc.enable(model, pool_bytes=64 << 20)
    assert served(model)[1] == 205
    with pytest.warns(CacheBypassWarning, match="adapter_names"):
        assert torch.equal(model.generate(**options), plain)
    assert cache.stats().computed_tokens == 205
    assert served(model)[1] == 1
    npc.disable(model)


# ---- kinds of adapters ----

KINDS = {
    "dora": lambda: lora(use_dora=True),
    "rslora": lambda: lora(use_rslora=True, lora_alpha=3),
    "dropout": lambda: lora(lora_dropout=0.5),
    "embeddings": lambda: lora(target_modules=["embed_tokens", "k_proj"]),
    "dora of embeddings": lambda: lora(target_modules=["embed_tokens", "k_proj"], use_dora=True),
    "whole modules": lambda: lora(modules_to_save=["input_layernorm", "lm_head"]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str) -> None:
    model = adapted(KINDS[kind](), KINDS[kind]())
    plain = copy.deepcopy(model)
    npc.enable(model, pool_bytes=64 << 20)
    counts: dict[str, list[int]] = {}
    for way in ("one", "two", "off") * 2:
        wanted = []
        for each in (model, plain):
            each.base_model.enable_adapter_layers()
            if way == "off":
                each.base_model.disable_adapter_layers()
            else:
                each.set_adapter(way)
            wanted.append(served(each) if each is model else text(each))
        assert torch.equal(wanted[0][0], wanted[1])
        counts.setdefault(way, []).append(wanted[0][1])
    assert counts == {"one": [205, 1], "two": [205, 1], "off": [205, 1]}
    npc.disable(model)


def test_gpt2_keeps_its_weights_the_other_way_round() -> None:
    gpt2 = tiny_model("gpt2", num_key_value_heads=4)
    model = peft.get_peft_model(gpt2, lora(target_modules=["c_attn"], fan_in_fan_out=True)).eval()
    wanted = text(model)
    npc.enable(model, pool_bytes=64 << 20)
    for expected in (205, 1):
        out, computed = served(model)
        assert torch.equal(out, wanted)
        assert computed == expected
    npc.disable(model)


def refused(model: object) -> str:
    with pytest.raises(npc.UnsupportedModel) as caught:
        npc.enable(model, pool_bytes=64 << 20)
    return str(caught.value)


PROMPT_LEARNING = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "P_TUNING": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_virtual_tokens_are_refused_and_bypassed(kind: str) -> None:
    model = peft.get_peft_model(tiny_model(), PROMPT_LEARNING[kind]()).eval()
    assert f"'default' ({kind}) puts virtual tokens before the prompt" in refused(model)
    with torch.no_grad():
        plain = model(input_ids=PROMPT).logits
    cache = npc.enable(model.get_base_model(), pool_bytes=64 << 20)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(input_ids=PROMPT).logits, plain)
    assert cache.stats().entries == 0
    npc.disable(model)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: peft.LoHaConfig(target_modules=["q_proj"]), "peft.tuners.loha.layer.Linear"),
        (lambda: peft.VeraConfig(target_modules=["q_proj"]), "peft.tuners.vera.layer.Linear"),
        (lambda: lora(trainable_token_indices=[5]), "peft.utils.other.TrainableTokensWrapper"),
        (lambda: lora(alora_invocation_tokens=[5, 6]), "ALoraLinearVariant"),
    ],
)
def test_other_kinds_are_refused_by_name_and_bypassed(config: Callable[[], peft.PeftConfig], named: str) -> None:
    base = tiny_model()
    cache = npc.enable(base, pool_bytes=64 << 20)
    model = peft.get_peft_model(base, config()).eval()
    with pytest.warns(CacheBypassWarning, match=named):
        out = text(model)
    assert cache.stats().entries == 0
    npc.disable(model)
    assert torch.equal(out, text(model))
    assert named in refused(model)


def test_an_adapter_layer_with_a_forward_of_somebodys_is_refused() -> None:
    model = adapted()
    layer = tuners(model)[0]
    layer.forward = lambda x: layer.base_layer(x)
    assert "the forward of an adapter layer (peft.tuners.lora.layer.Linear) was replaced" in refused(model)


def test_dropout_that_is_switched_on_runs_uncached() -> None:
    model = adapted(lora(lora_dropout=0.5))
    cache = npc.enable(model, pool_bytes=64 << 20)
    dropout = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    dropout.train()
    with pytest.warns(CacheBypassWarning, match="dropout"):
        text(model)
    assert cache.stats().entries == 0
    dropout.eval()
    assert served(model)[1] == 205
    npc.disable(model)


# ---- coming and going ----


def test_adapters_loaded_from_a_file_into_an_attached_model(tmp_path: Path) -> None:
    saved = adapted()
    saved.save_pretrained(str(tmp_path))
    wanted = text(saved)
    model = tiny_model()
    npc.enable(model, pool_bytes=64 << 20)
    without, computed = served(model)
    assert computed == 205
    model.load_adapter(str(tmp_path / "one"), "x")
    for expected in (205, 1):
        out, computed = served(model)
        assert torch.equal(out, wanted)
        assert computed == expected
    model.delete_adapter("x")
    assert torch.equal(served(model)[0], without)
    npc.disable(model)


def test_copies_have_ordinary_lists() -> None:
    model = adapted()
    npc.enable(model, pool_bytes=64 << 20)
    text(model)
    assert type(tuners(model)[0].merged_adapters) is not list
    assert type(tuners(copy.deepcopy(model))[0].merged_adapters) is list
    assert type(tuners(pickle.loads(pickle.dumps(model.get_base_model())))[0].merged_adapters) is list
    npc.disable(model)


def test_nothing_that_a_model_drops_is_kept_alive() -> None:
    model = adapted()
    npc.enable(model, pool_bytes=64 << 20)
    text(model)
    base = model.get_base_model()
    mlp = base.model.layers[0].mlp
    parts = (mlp.down_proj, mlp.down_proj.base_layer.weight, mlp.down_proj.lora_A.one.weight, mlp.up_proj.weight)
    dropped = [weakref.ref(part) for part in parts]
    del parts
    mlp.down_proj = torch.nn.Linear(96, 64, bias=False)
    mlp.up_proj.weight = torch.nn.Parameter(torch.rand(96, 64))
    gc.collect()
    assert [ref() for ref in dropped] == [None] * 4
    npc.disable(model)
