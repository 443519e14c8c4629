"""Decoders of transformers on ``npu:0``: their texts, gradients and training steps are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import left_padded, tiny_config, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "gemma2": {"sliding_window": 8},
    "gpt2": {},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, **MIXTURE},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        **MIXTURE,
    },
    "olmo2": {},
}
ONE = {"input_ids": tokens(17), "attention_mask": torch.ones(1, 17, dtype=torch.long)}
BATCH = left_padded([tokens(12, seed=1), tokens(10, seed=2), tokens(7, seed=3)])
SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 0.9}
WAYS: list[dict[str, Any]] = [{"do_sample": False}, SAMPLED, {"do_sample": False, "num_beams": 3}]


def tiny_pair(model_type: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model on the CPU and on the device."""
    config = tiny_config(model_type, num_hidden_layers=2, **MODELS[model_type])
    models = []
    for device in ("cpu", "npu"):
        torch.manual_seed(1)
        models.append(AutoModelForCausalLM.from_config(config).to(dtype).eval().to(device))
    return models[0], models[1]


def moved(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to("npu") for name, value in inputs.items()}


@pytest.fixture(autouse=True)
def _draws_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw of a token is seeded: on the device only the first numbers after seeding are the CPU's."""
    draw = torch.multinomial

    def seeded(*args: Any, **kwargs: Any) -> torch.Tensor:
        torch.manual_seed(torch.initial_seed() + 1)  # of the CPU and of the device
        return draw(*args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", seeded)


def generated(model: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> list[list[int]]:
    torch.manual_seed(5)
    return model.generate(**inputs, max_new_tokens=8, **options).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", MODELS)
def test_generate_gives_the_tokens_of_the_cpu(model_type: str, dtype: torch.dtype) -> None:
    model, on_npu = tiny_pair(model_type, dtype)
    for inputs in (ONE, BATCH):
        for options in WAYS:
            assert generated(on_npu, moved(inputs), options) == generated(model, inputs, options), options
    assert generated(model, ONE, SAMPLED) != generated(model, ONE, {"do_sample": False})  # sampling does something


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_bit_equal(attention: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model, on_npu = tiny_pair("llama", dtype)
        with torch.no_grad():
            for each in (model, on_npu):
                each.set_attn_implementation(attention)
            assert torch.equal(on_npu(**moved(BATCH)).logits.cpu(), model(**BATCH).logits)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")  # torch_npu's empty_like, once
def test_training_steps_are_those_of_the_cpu(model_type: str) -> None:
    models = tiny_pair(model_type)
    losses: list[list[float]] = [[], []]
    for model, inputs, found in zip(models, (BATCH, moved(BATCH)), losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]
    for theirs, mine in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.detach().cpu(), theirs.detach())


def test_autocast_casts_what_torch_npu_says_it_casts() -> None:
    model, on_npu = tiny_pair("llama")
    with torch.no_grad():
        with torch.autocast("npu", dtype=torch.bfloat16):
            mine = on_npu(**moved(BATCH)).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = model(**BATCH).logits
            assert on_npu.lm_head(mine.new_ones(1, 64).float()).dtype == torch.float32  # not the CPU's autocast
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert torch.allclose(mine.cpu().float(), theirs.float(), atol=0.05)  # the two lists of operators differ
