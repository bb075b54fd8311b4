"""GGUF models through llama.cpp: its own greedy text, and every method that needs only tokens and logits equals it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import outpace
from outpace import registry
from outpace.api import demo_weights
from outpace.api.model import Model
from outpace.cli.common import app
from outpace.core.tree import Tree
from outpace.errors import CacheFull, HeadNotFound, OutpaceError, UnsupportedModel, UsageError
from outpace.models.gguf import raw_logits, repack, tokenizer as reading
from outpace.models.gguf.lm import SLOTS, UNREAD, FetchedLogits, LlamaLM
from outpace.models.gguf.repack import load_faster
from outpace.models.gguf.runtime import BATCH, BF16, FEW, BatchEntry, File, Runtime
from outpace.models.gguf.tokenizer import PROBES, LlamaTokenizer, tokenizer
from outpace.text import encode
from tests.conftest import LOSSLESS

pytest.importorskip("cyllama")
NAME = "smollm2-135m-instruct.gguf"
TEXTS: list[Any] = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    [{"role": "user", "content": "Write a Python function that adds two numbers, and then one that adds three."}],
    "One, two, three, one, two, three, one,",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {30: 1.0}, "seed": 4},
}
DEEP = {"eagle3", "mtp", "medusa", "block", "layerskip", "pruned", "via_sd"}  # they need more than tokens and logits
TOKENS = 12
METHODS = [name for name in LOSSLESS if name not in DEEP]
SMALL = {
    "draft": {"depth": 3},
    "lookahead": {"window": 2, "guesses": 2, "price": 0.0},
    "recycling": {"nodes": 8},
    "graft": {"nodes": 8, "inner": "recycling:nodes=8"},
}
TREES = {"draft": {"depth": 3, "width": 2, "nodes": 8}, "ngram": {"matches": 2}, "suffix": {"width": 2}}


@pytest.fixture(scope="module")
def model() -> Model:
    return outpace.load(NAME)


@pytest.fixture(scope="module")
def file(model: Model) -> File:
    assert isinstance(model.lm, LlamaLM)
    return model.lm.file


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[str, list[list[int]]]:
    given = {"method": "plain", "max_tokens": TOKENS}
    return {name: [model.generate(text, **given, **SETTINGS[name]).tokens for text in TEXTS] for name in SETTINGS}


def options(name: str, draft: Any) -> dict[str, Any]:
    known = registry.options(registry.find(name))
    return ({"draft": draft} if "draft" in known else {}) | SMALL.get(name, {})


def q4_k(random: np.random.Generator, size: tuple[int, int]) -> Any:
    """Random weights in blocks of 256: two scales, those of eight parts, and four bits a weight."""
    blocks = random.integers(0, 256, (size[0], size[1] // 256, 144), dtype=np.uint8)
    blocks[..., :4] = np.array([2e-4, 1e-3], dtype=np.float16).view(np.uint8)
    return blocks.reshape(size[0], -1)


def written(path: Path, kind: str, heads: int = 2) -> Path:
    """A small model of random weights in numbers of this kind, that has no words for its tokens."""
    import gguf

    numbers, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    width = 256 if kind == "Q4_K" else 64
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("none")
    sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
    sizes |= {"ffn_gate": (2 * width, width), "ffn_up": (2 * width, width), "ffn_down": (width, 2 * width)}
    matrices = {f"blk.{i}.{name}.weight": size for i in range(2) for name, size in sizes.items()}
    for name, size in ({"token_embd.weight": (96, width), "output.weight": (96, width)} | matrices).items():
        values = random.normal(0, 0.2, size).astype(np.float32)
        raw = q4_k(random, size) if kind == "Q4_K" else gguf.quants.quantize(values, numbers)
        writer.add_tensor(name, raw, raw_dtype=numbers)
    for name in ["output_norm.weight", *(f"blk.{i}.{part}_norm.weight" for i in range(2) for part in ("attn", "ffn"))]:
        writer.add_tensor(name, np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def own_greedy(file: File, tokens: list[int], count: int) -> list[int]:
    """llama.cpp's own loop: one token at a time, the likeliest by its own sampler."""
    runtime, said = Runtime(file, 512), list[int]()
    runtime.decode([BatchEntry(token, i, [0], i == len(tokens) - 1) for i, token in enumerate(tokens)])
    said.append(runtime.greedy(len(tokens) - 1))
    while len(said) < count and not file.tokens.is_eog(said[-1]):
        runtime.decode([BatchEntry(said[-1], len(tokens) + len(said) - 1, [0], True)])
        said.append(runtime.greedy(0))
    return said


def test_plain_decoding_is_that_of_llama_cpp(model: Model, file: File, plain: dict[str, list[list[int]]]) -> None:
    for text, said in zip(TEXTS, plain["greedy"], strict=True):
        prompt = encode(text, model.tokenizer, file.vocab)
        assert own_greedy(file, prompt, TOKENS) == said


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_equals_plain(name: str, setting: str, model: Model, plain: dict[str, list[list[int]]]) -> None:
    given = {**options(name, model), **SETTINGS[setting], "max_tokens": TOKENS}
    together = model.generate(TEXTS, method=name, **given)
    assert [done.tokens for done in together] == plain[setting]
    if setting == "greedy":
        trees = {**given, **TREES.get(name, {})}
        assert [model.generate(text, method=name, **trees).tokens for text in TEXTS] == plain[setting]


def test_drafts_of_both_runtimes(model: Model, smollm2: Model, plain: dict[str, list[list[int]]]) -> None:
    done = model.generate(TEXTS, method="draft", draft=smollm2, max_tokens=TOKENS)
    assert [found.tokens for found in done] == plain["greedy"] and done[0].stats.tokens_per_pass > 2
    theirs = smollm2.generate(TEXTS[0], method="draft", draft=model, max_tokens=12)
    assert theirs.tokens == smollm2.generate(TEXTS[0], method="plain", max_tokens=12).tokens


@pytest.mark.parametrize("policy", registry.POLICIES)
def test_every_policy_with_a_draft(policy: str, model: Model, plain: dict[str, list[list[int]]]) -> None:
    given = {"method": "draft", "draft": model, "policy": policy, "max_tokens": TOKENS}
    assert [done.tokens for done in model.generate(TEXTS, **given)] == plain["greedy"]


def test_residual_verification_and_rollouts(model: Model) -> None:
    given = {"method": "draft", "draft": model, "verifier": "residual", "temperature": 1.0, "max_tokens": TOKENS}
    done = model.generate(TEXTS[0], **given, depth=3)
    assert len(done.tokens) == TOKENS and done.stats.acceptance > 0.9  # it is its own draft
    found = outpace.rollout(model, TEXTS[:1], n=2, max_tokens=6, method="draft", draft=model)
    assert len(found) == 2 and all(len(one.logprobs) == len(one.tokens) and max(one.logprobs) <= 0 for one in found)


@pytest.mark.parametrize("name", sorted(DEEP))
def test_methods_that_need_more_say_so(name: str, model: Model) -> None:
    with pytest.raises((HeadNotFound, UnsupportedModel), match=r"embeddings|hidden|layers"):
        model.generate(TEXTS[0], method=name, max_tokens=4)


def test_a_grammar_and_log_probabilities(model: Model) -> None:
    given = {"regex": "[0-9]{3} (apples|pears)", "max_tokens": 16, "logprobs": 2}
    done = [model.generate(TEXTS[0], method=method, **given) for method in ("plain", "suffix")]
    assert done[0].text == done[1].text and done[0].text[3:] in (" apples", " pears")
    assert done[0].logprobs == done[1].logprobs and len(done[0].logprobs) == len(done[0].tokens)


def assert_same_bits(lm: LlamaLM, vocab: int) -> None:
    """Alone, in a chain, in a tree whose other branches come to nothing, beside another row, and after all that."""
    tokens, text = [i % vocab for i in (905, 1096, 314, 260, 1834)], [i % vocab for i in range(1000, 1300)]
    row, other = lm.acquire([]), lm.acquire([])
    lm.feed([text, text[::-1]], [row, other])
    alone = []
    for token in tokens:
        alone.append(lm.score([Tree([token])], [row])[0].logits.all().clone())
        lm.keep([[0]], [row])
    assert torch.equal(lm.reference().native(text + tokens, len(tokens)), torch.cat(alone))
    lm.release(row)
    row = lm.acquire([])  # it has its text already
    lm.feed([text], [row])
    tree = Tree(tokens[:1])
    for parent, token in ((0, 77), (0, tokens[1]), (1, 78), (2, 79), (2, tokens[2])):
        tree.add(parent, token)
    scores = lm.score([tree, Tree([5])], [row, other])
    assert torch.equal(scores[0].logits.all()[[0, 2, 5]], torch.cat(alone[:3]))
    lm.keep([[0, 2, 5], [0]], [row, other])
    chain = Tree.chain([*tokens[3:], 9])
    scores = lm.score([chain], [row])
    assert torch.equal(scores[0].logits.all()[:2], torch.cat(alone[3:]))
    lm.keep([[0]], [row])
    assert torch.equal(lm.score([Tree(tokens[4:])], [row])[0].logits.all(), alone[4])


def test_bits_do_not_depend_on_what_else_is_scored(file: File) -> None:
    assert not file.paired
    assert_same_bits(LlamaLM(file), file.vocab)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K"])
def test_weights_of_any_kind_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Where llama.cpp multiplies one token differently from several, none is alone."""
    path = written(tmp_path / f"{kind}.gguf", kind)
    file = File(path)
    assert file.paired == (kind in ("F32", "F16", "BF16")) and not File(path, bitwise=False).paired
    lm = LlamaLM(file)
    assert_same_bits(lm, file.vocab)
    model = Model(lm, None, set(), kind)
    plain = model.generate([[1, 2, 3, 1, 2], [4] * 9], method="plain", max_tokens=40)
    for method in ("suffix", "recycling"):
        found = model.generate([[1, 2, 3, 1, 2], [4] * 9], method=method, max_tokens=40)
        assert [done.tokens for done in found] == [done.tokens for done in plain]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_reordered_weights_have_the_same_bits_in_calls_of_a_few(kind: str, tmp_path: Path) -> None:
    file = File(written(tmp_path / f"{kind}.gguf", kind), together=FEW)
    assert file.together == FEW and not file.paired
    lm, prompts = LlamaLM(file), [[1, 2, 3, 1, 2], [4] * 9, [7, 8], [9, 1, 9, 1, 9], [5]]
    assert_same_bits(lm, file.vocab)
    model = Model(lm, None, set(), kind)
    for given in ({}, {"temperature": 0.8, "seed": 2}):
        alone = [model.generate(prompt, method="plain", max_tokens=30, **given).tokens for prompt in prompts]
        for method in ("plain", "suffix", "recycling", "auto"):
            assert [done.tokens for done in model.generate(prompts, method=method, max_tokens=30, **given)] == alone


def test_a_pass_of_several_calls_says_what_each_of_them_said(tmp_path: Path) -> None:
    file = File(written(tmp_path / "model.gguf", "Q8_0"), together=FEW)
    entries = [BatchEntry(token, i, [0], i != 2) for i, token in enumerate([5, 6, 7, 8, 9, 10, 11])]
    runtime, alone = Runtime(file, 256), Runtime(file, 256)
    runtime.decode(entries)
    for i, entry in enumerate(entries):
        alone.decode([entry])
        if entry.wanted:
            assert torch.equal(runtime.logits(i), alone.logits(0)) and runtime.greedy(i) == alone.greedy(0)
    runtime.decode([BatchEntry(1, 7, [0], True)])
    assert runtime.logits(0).argmax() == runtime.greedy(0)


def test_the_faster_order_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, timed = written(tmp_path / "model.gguf", "Q8_0"), list[int]()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(repack, "_worth", lambda *files: timed.append(1) or True)
    monkeypatch.setattr(repack, "_same_logits", lambda file: False)
    assert [load_faster(path, False).together for _ in range(2)] == [FEW] * 2 and timed == [1]
    for kept in (tmp_path / "cache").rglob("*.json"):
        kept.write_text("{")
    monkeypatch.setattr(repack, "_worth", lambda *files: timed.append(2) or False)
    assert [load_faster(path, False).together for _ in range(2)] == [BATCH] * 2 and timed == [1, 2]
    path.touch()  # another file, perhaps
    monkeypatch.setattr(repack, "free", lambda device: 0)
    assert load_faster(path, False).together == BATCH and timed == [1, 2]  # there is no room for both
    with pytest.raises(OutpaceError, match="there is no file"):
        load_faster(tmp_path / "gone.gguf", False)


def test_both_orders_are_tried_on_single_tokens_and_on_many(file: File) -> None:
    assert repack._worth(file, file) in (True, False) and repack._processor()
    few = File(file.path, together=FEW)  # of Q4_1, which llama.cpp leaves as it is
    assert repack._same_logits(few)


def test_heads_of_an_odd_size_have_a_cache_in_bfloat16(tmp_path: Path) -> None:
    file = File(written(tmp_path / "odd.gguf", "Q8_0", heads=4))
    assert file.keys == BF16 and file.token_bytes == 2 * 2 * 64 * 2
    assert_same_bits(LlamaLM(file), file.vocab)


def test_a_cache_that_is_full_is_made_anew_and_larger(file: File, model: Model) -> None:
    lm = LlamaLM(file)
    lm.runtime = Runtime(file, 256)  # of which rejected nodes soon take most
    small = Model(lm, model.tokenizer, {2}, "small")
    expected = model.generate(TEXTS, method="plain", max_tokens=45, ignore_eos=True)
    done = small.generate(TEXTS, method="recycling", nodes=4, price=0.0, max_tokens=45, ignore_eos=True)
    assert [found.tokens for found in done] == [found.tokens for found in expected]
    assert lm.runtime.cells > 256 and len(lm._branches) == UNREAD - SLOTS


def test_what_does_not_fit_is_refused_with_numbers(file: File) -> None:
    with pytest.raises(UsageError, match="hold 100 tokens of this model, the minimum is 256"):
        LlamaLM(file, cache_limit=100 * file.token_bytes)
    lm = LlamaLM(file, cache_limit=2048 * file.token_bytes)
    row = lm.acquire([])
    with pytest.raises(CacheFull, match="3000 tokens do not fit into a cache of 2048"):
        lm.feed([[1] * 3000], [row])
    assert lm.weights.memory(4096).fits is False
    with pytest.raises(CacheFull, match="2049 tokens exceed the limit of 2048 per pass"):
        lm.score([Tree.chain([1] * 2049)], [lm.acquire([])])


def test_logits_are_fetched_when_they_are_looked_at(file: File) -> None:
    runtime = Runtime(file, 256)
    runtime.decode([BatchEntry(token, i, [0], True) for i, token in enumerate([5, 6, 7])])
    rows = FetchedLogits(runtime, [0, 1, 2])
    assert len(rows) == 3 and rows[2].argmax() == runtime.greedy(2)
    assert rows.all().shape == (3, file.vocab) and torch.equal(rows.all()[1:], torch.stack([rows[1], rows[2]]))
    stale = FetchedLogits(runtime, [0])
    runtime.decode([BatchEntry(8, 3, [0], True)])
    with pytest.raises(AssertionError, match="before the next pass"):
        stale[0]


def test_the_likeliest_token_is_asked_for_where_the_text_gets_to(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, greedy = list[int](), Runtime.greedy
    monkeypatch.setattr(Runtime, "greedy", lambda self, index: asked.append(index) or greedy(self, index))
    done = model.generate(TEXTS[0], method="ngram", depth=4, max_tokens=TOKENS)
    assert done.stats.drafted > done.stats.accepted and len(asked) == len(done.tokens)


def test_auto_does_without_those_that_look_at_every_logit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "logits", None)  # who looked would call it
    method = registry.method("auto")
    assert model.generate(TEXTS[2], method=method, max_tokens=TOKENS).tokens
    assert [part.name for part in method._parts] == ["prediction", "suffix"]  # type: ignore[attr-defined]


def test_text_is_split_as_the_model_learnt_it(model: Model, file: File, smollm2: Model) -> None:
    own, chat = LlamaTokenizer(file), TEXTS[1]
    for text in (*PROBES, "", "<|im_start|>user\n1234"):
        ids = own.encode(text)
        assert model.tokenizer is not None and model.tokenizer.encode(text) == ids == smollm2.tokenizer.encode(text)  # type: ignore[union-attr]
        assert own.decode(ids) == model.tokenizer.decode(ids) == text
    spelled = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)  # type: ignore[union-attr]
    assert own.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == spelled
    assert own.encode(spelled) == own.apply_chat_template(chat, add_generation_prompt=True)
    assert own.decode([1, 905], skip_special_tokens=True) == own.decode([905]) and len(own) == file.vocab
    assert 2 in model.stop_token_ids


def test_a_file_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    bare = outpace.load(written(tmp_path / "bare.gguf", "Q8_0"))
    assert bare.tokenizer is None and len(bare.generate([5, 9, 2], max_tokens=4).tokens) == 4


def test_a_tokenizer_is_read_from_its_file_once(file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    read, first = reading._transformers, tokenizer(file)
    monkeypatch.setattr(reading, "_transformers", None)  # who read it would call it
    again = tokenizer(file)
    for said in (*PROBES, "<|im_start|>user\n1234"):
        assert again.encode(said) == first.encode(said) and again.decode(first.encode(said)) == said
    assert again.apply_chat_template(TEXTS[1], tokenize=False) == first.apply_chat_template(TEXTS[1], tokenize=False)
    assert again.all_special_ids == first.all_special_ids and again.eos_token_id == first.eos_token_id
    monkeypatch.setattr(reading, "_transformers", read)
    (kept,) = tmp_path.rglob("tokenizer.json")
    kept.write_text("{")
    assert tokenizer(file).encode(PROBES[0]) == first.encode(PROBES[0]) and len(kept.read_text()) > 1000


def test_bad_files_and_settings_get_an_answer(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="there is no file"):
        outpace.load(tmp_path / "gone.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF?")
    with pytest.raises(OutpaceError, match="cannot load"):
        outpace.load(tmp_path / "broken.gguf")
    with pytest.raises(UsageError, match="run as it is"):
        outpace.load(NAME, dtype="float32")
    with pytest.raises(OutpaceError, match="CPU only"):
        outpace.load(NAME, device="cuda")


def test_the_command_line_takes_a_file() -> None:
    path = str(demo_weights.gguf(NAME))
    run = CliRunner().invoke(
        app, ["generate", "--model", path, "--method", "suffix", "--max-tokens", "8", "Say hello."]
    )
    assert run.exit_code == 0 and run.stdout.strip()
    wrong = CliRunner().invoke(app, ["generate", "--model", path, "--method", "eagle3", "Say hello."])
    assert wrong.exit_code and "eagle3 needs a model's layers" in wrong.output


# Logits, read where llama.cpp keeps them

READ_IN_PLACE = pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="logits are found on Linux only")


def listed(runtime: Runtime, entry: int) -> torch.Tensor:
    return torch.tensor(runtime._context.get_logits_ith(entry))


@READ_IN_PLACE
def test_logits_in_place_are_those_that_llama_cpp_hands_out(file: File) -> None:
    """Of chains and trees, with entries between whose logits are not wanted, in one part and in several."""
    runtime = Runtime(file, 2048)
    passes = [
        [BatchEntry(token, i, [0], i != 1) for i, token in enumerate([5, 6, 7, 8])],
        [BatchEntry(9, 4, [0, 70], True), BatchEntry(10, 5, [0], True), BatchEntry(11, 5, [70], True)],
        [BatchEntry(i % 900, 6 + i, [0], i % 3 == 0) for i in range(700)],
        [BatchEntry(3, 6, [70], True)],
    ]
    for entries in passes:
        runtime.decode(entries)
        runtime.share(0, 70, 0, 4)
        for i, entry in enumerate(entries):
            if entry.wanted and i % 5 < 3:
                assert torch.equal(runtime.logits(i), listed(runtime, i))
                assert torch.equal(runtime.peek(i), listed(runtime, i))
                assert runtime.greedy(i) == int(listed(runtime, i).argmax())
                assert runtime.top_k(i, 4)[0].equal(listed(runtime, i).topk(4).indices)
    assert runtime._raw._field and not runtime._raw._left
    kept = runtime.logits(0)
    before = kept.clone()
    runtime.decode([BatchEntry(4, 7, [70], True)])
    assert torch.equal(kept, before), "a row that was read stays as it was"


@READ_IN_PLACE
def test_logits_that_differ_in_place_are_read_as_lists(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(file, 256)
    runtime.decode([BatchEntry(5, 0, [0], True)])
    runtime.logits(0)
    assert runtime._raw._field
    monkeypatch.setattr(raw_logits, "_read", lambda *given: b"something else")
    assert torch.equal(runtime.logits(0), listed(runtime, 0))
    assert not runtime._raw._field
    assert torch.equal(runtime.logits(0), listed(runtime, 0))


@pytest.mark.parametrize("why", ["setting", "not found"])
def test_without_logits_in_place_they_are_lists(file: File, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "setting":
        monkeypatch.setenv("OUTPACE_RAW_LOGITS", "0")
    else:
        monkeypatch.setattr(raw_logits, "_read", lambda *given: b"")
    runtime = Runtime(file, 256)
    runtime.decode([BatchEntry(token, i, [0], True) for i, token in enumerate([5, 6])])
    for i in (0, 1):
        assert torch.equal(runtime.logits(i), listed(runtime, i))
        assert runtime.greedy(i) == int(listed(runtime, i).argmax())
    assert not runtime._raw._field
