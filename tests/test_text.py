"""Text: pieces add up to the whole, stop strings cut where they would token by token, and streams never take back."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tokenizers import Regex, Tokenizer as Rust, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outpace import Chunk, Drafter, Model, Sequence
from outpace.core.tree import Budget, Tree
from outpace.errors import UsageError
from outpace.testing import ByteTokenizer, ToyLM
from outpace.text import Detokenizer, TextSpan, TextStream, encode, is_chat, is_ids

steady = settings(derandomize=True, deadline=None, max_examples=150)
LINES = [
    "Speculative decoding guesses a few tokens and lets the target judge them.",
    "Ein schöner Tag, naïve café, 你好世界，今天天气很好。 こんにちは世界",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 and more 😀😀😀, END\n\nUser: stop. STOP! stop",
    "def f(x):\n    return x + 1  # Größe\n",
]
REPLACEMENT = "\ufffd"


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2 and Llama 3: a token may hold half a character."""
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<eos>"], initial_alphabet=alphabet)
    rust.train_from_iterator(LINES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece BPE as in Llama 2: spaces are marked, one is put in front, and unknown characters are bytes."""
    rust = Rust(models.BPE(unk_token="<unk>"))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<eos>"], limit_alphabet=40)
    rust.train_from_iterator(LINES * 3, trainer)
    learned = json.loads(rust.to_str())["model"]
    vocab = learned["vocab"] | {f"<0x{byte:02X}>": len(learned["vocab"]) + byte for byte in range(256)}
    merges = [tuple(merge) for merge in learned["merges"]]
    rust.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", eos_token="<eos>")


TOKENIZERS = {"bytes": ByteTokenizer, "byte-level": byte_level, "byte-fallback": byte_fallback}
everywhere = pytest.mark.parametrize("name", TOKENIZERS)
half_characters = pytest.mark.parametrize("name", ["bytes", "byte-level"])

# Letters of several lengths in UTF-8, things that combine, and a few words that repeat so that stops are found.
words = st.sampled_from(
    ["a", "b", "ab", " ", "\n", "é", "e\u0301", "ß", "你", "好", "世界", "😀", "👩‍👩‍👧", "🇩🇪", "END", "stop"]
)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
texts = st.one_of(st.lists(words, max_size=14).map("".join), plain_text)


def pieces(tokenizer: Any, tokens: Seq[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def decode(tokenizer: Any, tokens: Seq[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def test_the_tokenizers_are_what_the_tests_need() -> None:
    level, fallback = byte_level(), byte_fallback()
    assert any(REPLACEMENT in level.decode([t]) for t in level.encode("漢字 🦜"))
    assert len(level.encode(LINES[0])) < len(LINES[0]) / 2
    assert [fallback.convert_ids_to_tokens(t) for t in fallback.encode("🦜")][1:] == [
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
        "<0x9C>",
    ]
    assert fallback.decode(fallback.encode(LINES[1])) == LINES[1]
    assert max(len(fallback.decode([t])) for t in range(len(fallback))) > 3


# Token by token


@everywhere
@given(text=texts)
@example(text="👩‍👩‍👧‍👦🇩🇪 e\u0301 你好")
@example(text="a\ufffdb\ufffd")
@example(text="  two  spaces ")
@steady
def test_pieces_of_text_add_up(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(text)
    found = pieces(tokenizer, tokens)
    assert "".join(found) == decode(tokenizer, tokens)
    if REPLACEMENT not in text:
        assert decode(tokenizer, tokens) == text
        assert not any(REPLACEMENT in piece for piece in found) and found[-1] == ""  # no half characters


@half_characters
@given(data=st.data())
@settings(steady, max_examples=250)
def test_pieces_of_any_tokens_add_up(name: str, data: st.DataObject) -> None:
    """Bytes that are no text, special tokens, halves of characters in any order."""
    tokenizer = TOKENIZERS[name]()
    halves = tokenizer.encode("你👍é")
    some = st.integers(0, len(tokenizer) - 1) | st.sampled_from([*halves, tokenizer.eos_token_id])
    tokens = data.draw(st.lists(some, max_size=16))
    found = pieces(tokenizer, tokens)
    assert "".join(found) == decode(tokenizer, tokens)
    # A piece is given out as soon as no later token can change it: when the text does not end in half a character.
    given = ""
    for n, piece in enumerate(found[:-1], start=1):
        given += piece
        whole = decode(tokenizer, tokens[:n])
        assert given == whole or whole.endswith(REPLACEMENT)


def test_bytes_of_a_character_wait() -> None:
    assert pieces(ByteTokenizer(), [*"aé".encode(), 0xFF, 0x62, 0xE4, 0xBD]) == [
        "a",
        "",
        "é",
        "",
        "\ufffdb",
        "",
        "",
        "\ufffd",
    ]


def test_special_tokens_are_no_text() -> None:
    assert pieces(ByteTokenizer(), [256, 0x61, 256, 0xC3, 256, 0xA9]) == ["", "a", "", "", "", "é", ""]


def test_the_first_space_is_dropped_as_in_the_whole() -> None:
    fallback = byte_fallback()
    found = pieces(fallback, [fallback.eos_token_id, *fallback.encode("a b  c")])
    assert "".join(found) == "a b  c" and found[0] == ""


# Stop strings


@dataclass
class Ending:
    """What a stream must come to: its text, and after how many tokens a stop string ended it."""

    text: str
    pushed: int
    stopped: bool


def brute_force(tokenizer: Any, tokens: Seq[int], stops: Seq[str], min_tokens: int = 0) -> Ending:
    """After every token, look at every place of the text; a stop counts if it was not complete before `min_tokens`."""
    known = [""]
    for n in range(1, len(tokens) + 1):
        whole = decode(tokenizer, tokens[:n])
        known.append(known[-1] if whole.endswith(REPLACEMENT) else whole)
    ignored = len(known[min(max(0, min_tokens - 1), len(tokens))])
    for n, text in [*enumerate(known[1:], start=1), (len(tokens), decode(tokenizer, tokens))]:
        if n < min_tokens:
            continue
        ends = range(ignored + 1, len(text) + 1)
        for end in ends:
            fitting = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
            if fitting:
                return Ending(text[: min(fitting)], n, True)
    return Ending(decode(tokenizer, tokens), len(tokens), False)


def watch(tokenizer: Any, tokens: Seq[int], stops: Seq[str], min_tokens: int = 0) -> Ending:
    """Push until stopped, taking what is certain after every token; what was taken must never be taken back."""
    stream = TextStream(tokenizer, stops, min_tokens)
    spans, seen, pushed, sizes = [], [], 0, []
    for token in tokens:
        stream.push(token)
        pushed += 1
        sizes.append(len(stream.text))
        spans += stream.take()
        seen.append(joined(spans))
        if stream.stopped:
            break
        # What is held back could become a stop string, and nothing else is.
        held = stream.text[len(seen[-1]) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    stream.finish()
    spans += stream.take()
    assert joined(spans) == stream.text and stream.take() == []
    assert all(stream.text.startswith(earlier) for earlier in seen)
    check_spans(spans, sizes)
    return Ending(stream.text, pushed, stream.stopped)


def joined(spans: Seq[TextSpan]) -> str:
    return "".join(span.text for span in spans)


def check_spans(spans: Seq[TextSpan], sizes: Seq[int]) -> None:
    """Every span names the token that completed it; `sizes` is how much text there was after each token."""
    end = 0
    for span in spans:
        start, end = end, end + len(span.text)
        before = sizes[span.token - 1] if span.token else 0
        assert span.text and before <= start
        assert end <= sizes[span.token] or span.token == len(sizes) - 1  # what the end set free goes to the last one


stop_strings = st.lists(
    st.one_of(
        st.lists(words, min_size=1, max_size=3).map("".join),
        st.text("ab", min_size=1, max_size=4),
        st.sampled_from(["好世", "界", "é", "\u0301", "\u200d", "👩‍👩", "\n\n", "\nUser:", "\ufffd", "b END"]),
    ),
    max_size=4,
)


@everywhere
@given(text=texts | st.text("ab", max_size=14), stops=stop_strings, min_tokens=st.integers(0, 9))
@example(text="xabcy", stops=["abcd", "bc"], min_tokens=0)
@example(text="aababb", stops=["abb", "ab"], min_tokens=0)
@example(text="aababb", stops=["ab"], min_tokens=3)
@example(text="你好世界", stops=["好世", "世"], min_tokens=0)
@settings(steady, max_examples=300)
def test_stop_strings_cut_as_they_would_token_by_token(name: str, text: str, stops: list[str], min_tokens: int) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(text)
    assert watch(tokenizer, tokens, stops, min_tokens) == brute_force(tokenizer, tokens, stops, min_tokens)


@half_characters
@given(data=st.data(), stops=stop_strings, min_tokens=st.integers(0, 5))
@settings(steady, max_examples=300)
def test_stop_strings_in_any_tokens(name: str, data: st.DataObject, stops: list[str], min_tokens: int) -> None:
    tokenizer = TOKENIZERS[name]()
    some = st.integers(0, len(tokenizer) - 1) | st.sampled_from(tokenizer.encode("ab END stop你好😀é"))
    tokens = data.draw(st.lists(some, max_size=16))
    assert watch(tokenizer, tokens, stops, min_tokens) == brute_force(tokenizer, tokens, stops, min_tokens)


@given(text=texts | st.text("ab", max_size=14), stops=stop_strings)
@steady
def test_without_min_tokens_the_text_does_not_depend_on_the_tokens(text: str, stops: list[str]) -> None:
    cuts = {watch(make(), make().encode(text), stops).text for make in TOKENIZERS.values()}
    first = min(((text.find(s) + len(s), text.find(s)) for s in stops if s in text), default=(0, len(text)))
    assert cuts == {text[: first[1]]}


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("one EN", ["END"], "one EN"),  # what was held back in vain comes with the end
        ("aaab", ["aab"], "a"),
        ("xabcy", ["abcd", "bc"], "xa"),  # the one that is complete first, not the one that starts first
        ("xabcy", ["bc", "abc"], "x"),  # of two that end together the longer
        ("END", ["END"], ""),
        ("日本語。テスト", ["。"], "日本語"),
        ("a👩‍👩‍👧b", ["\u200d👩"], "a👩"),
    ],
)
@everywhere
def test_stop_strings_by_hand(name: str, text: str, stops: list[str], cut: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert watch(tokenizer, tokenizer.encode(text), stops).text == cut


def test_what_could_become_a_stop_is_held_back_and_no_more() -> None:
    stream = TextStream(ByteTokenizer(), ["END", "DX"])
    given = []
    for token in b"aENaENDb":
        stream.push(token)
        given.append([(span.text, span.token) for span in stream.take()])
    assert given == [[("a", 0)], [], [], [("E", 1), ("N", 2), ("a", 3)], [], [], [], []]
    assert stream.stopped and stream.text == "aENa"
    stream.finish()
    assert stream.take() == [] and stream.text == "aENa"


def test_a_stop_string_may_not_be_empty() -> None:
    with pytest.raises(UsageError, match="empty"):
        TextStream(ByteTokenizer(), ["END", ""])


# Prompts


def test_encode_takes_text_ids_and_chats() -> None:
    level = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, eos_token="<eos>")
    level.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert encode("héllo", ByteTokenizer(), 257) == list("héllo".encode())
    assert encode([3, 1, 2], None, 4) == [3, 1, 2]
    assert encode((3, 1), None, 4) == [3, 1]
    chat = [{"role": "user", "content": "hi"}]
    assert level.decode(encode(chat, level, len(level))) == "user: hi\nassistant:"
    assert is_chat(chat) and not is_chat("hi") and not is_chat([1]) and not is_chat([])
    assert is_ids([1, 2]) and is_ids([]) and not is_ids("12") and not is_ids(chat) and not is_ids([1.0])


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "message"),
    [
        ("", ByteTokenizer(), "the prompt is empty"),
        ([], None, "the prompt is empty"),
        ([], ByteTokenizer(), "the prompt is empty"),
        ([1, 257], None, "token 257, but the vocabulary ends at 256"),
        ([1, -1], ByteTokenizer(), "token -1, but the vocabulary ends at 256"),
        ("hi", None, "no tokenizer"),
        ([{"role": "user", "content": "hi"}], None, "no tokenizer"),
        ([{"role": "user", "content": "hi"}], ByteTokenizer(), "no chat template"),
        (7, ByteTokenizer(), "not int"),
        ([1, "a"], ByteTokenizer(), "a list of token ids, not list"),
        ([1.5], ByteTokenizer(), "a list of token ids, not list"),
        (None, None, "not NoneType"),
    ],
)
def test_encode_refuses_what_it_cannot_take(prompt: Any, tokenizer: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(prompt, tokenizer, 257)


def test_a_model_refuses_before_it_runs() -> None:
    model = Model(ToyLM(vocab=257), ByteTokenizer())
    for prompt in ("", [], ["fine", ""], [{"role": "user", "content": "hi"}], [1, 257], [[1], [257]]):
        with pytest.raises(UsageError):
            model.generate(prompt, max_tokens=2)
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        Model(ToyLM()).generate([1], stop="x")
    with pytest.raises(UsageError, match="a stop string is empty"):
        model.generate("hi", stop=["a", ""])


# Through the engine: stop strings in the middle of an accepted run


@dataclass(eq=False)
class Replay(Drafter):
    """Draft what is known to come."""

    answer: list[int]
    limit = Budget(depth=9, nodes=9)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        done = len(seq.generated)
        return Tree.chain([seq.tokens[-1], *self.answer[done : done + budget.depth]])


@cache
def toy() -> Model:
    return Model(ToyLM(vocab=257), ByteTokenizer(), stop_token_ids=[256])


ASCII = {token: -100.0 for token in range(257) if not 32 <= token < 127}
KINDS: dict[str, dict[str, Any]] = {
    "greedy ascii": {"logit_bias": ASCII},
    "sampled ascii": {"logit_bias": ASCII, "temperature": 1.0, "seed": 5},
    "sampled bytes": {"temperature": 1.5, "seed": 3, "ignore_eos": True},
}
LENGTH = 48


@cache
def answer(kind: str) -> tuple[int, ...]:
    return tuple(toy().generate("Hello", method="plain", max_tokens=LENGTH, **KINDS[kind]).tokens)


def streamed(kind: str, **options: Any) -> list[Chunk]:
    found = list(toy().stream("Hello", method=Replay(list(answer(kind))), max_tokens=LENGTH, **KINDS[kind], **options))
    assert [piece.completion is not None for piece in found] == [False] * (len(found) - 1) + [True]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_draft_is_accepted_whole(kind: str) -> None:
    found = streamed(kind)
    assert len(answer(kind)) == LENGTH and len(found) == -(-LENGTH // 10)
    assert found[-1].completion.tokens == list(answer(kind)) and found[-1].completion.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(steady, max_examples=15)
def test_stops_inside_an_accepted_run_end_it_there(kind: str, data: st.DataObject) -> None:
    text = decode(ByteTokenizer(), answer(kind))
    spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 4)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(spans | st.text("ab", min_size=1, max_size=2), min_size=1, max_size=3))
    options = {"stop": stops, "min_tokens": data.draw(st.sampled_from([0, 0, 7, 20]))}
    wanted = brute_force(ByteTokenizer(), answer(kind), stops, options["min_tokens"])
    plain = toy().generate("Hello", method="plain", max_tokens=LENGTH, **KINDS[kind], **options)
    found = streamed(kind, **options)
    fast = found[-1].completion
    assert fast is not None and (fast.tokens, fast.text) == (plain.tokens, plain.text)
    assert fast.finish_reason == plain.finish_reason
    assert plain.text == wanted.text and plain.tokens == list(answer(kind)[: wanted.pushed])
    given = ""
    for piece in found:
        given += piece.text
        assert fast.text.startswith(given)
    assert given == fast.text and [t for piece in found for t in piece.tokens] == fast.tokens
    assert fast.stats.tokens == len(fast.tokens)


def test_a_text_that_ends_in_half_a_character_has_all_its_bytes() -> None:
    kind = "sampled bytes"
    for n in range(1, LENGTH + 1):
        cut = toy().generate("Hello", method=Replay(list(answer(kind))), max_tokens=n, **KINDS[kind])
        assert cut.tokens == list(answer(kind)[:n]) and cut.text == decode(ByteTokenizer(), cut.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_tell_guesses_from_choices(kind: str) -> None:
    """All but the last token of a pass were drafted; text counts as drafted when the token that completed it was."""
    found = streamed(kind)
    runs = [(text, drafted) for piece in found for text, drafted in piece.spans]
    assert "".join(text for text, _ in runs) == found[-1].completion.text
    assert all("".join(text for text, _ in piece.spans) == piece.text for piece in found)
    wanted = []
    for i, text in enumerate(pieces(ByteTokenizer(), answer(kind))):
        wanted += [i % 10 != 9 and i < LENGTH - 1] * len(text)
    assert [drafted for text, drafted in runs for _ in text] == wanted


class Breaks(ToyLM):
    """Gives no numbers from some position on."""

    def run(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        logits, states = super().run(tokens)
        logits[20:] = torch.nan
        return logits, states


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_fails_inside_an_accepted_run_keeps_what_it_has(temperature: float) -> None:
    model, prompt = Model(Breaks(vocab=257), ByteTokenizer()), "Hello"
    options: dict[str, Any] = {"temperature": temperature, "logit_bias": ASCII}
    plain = model.generate([prompt], method="plain", max_tokens=LENGTH, **options)[0]
    assert plain.finish_reason == "error" and len(plain.tokens) == 16 and "non-finite" in plain.error
    found = list(model.stream(prompt, method=Replay([*plain.tokens, 1, 2, 3]), max_tokens=LENGTH, **options))
    fast = found[-1].completion
    assert fast is not None and (fast.tokens, fast.text, fast.error) == (plain.tokens, plain.text, plain.error)
    assert "".join(piece.text for piece in found) == plain.text
    assert [token for piece in found for token in piece.tokens] == plain.tokens
    assert fast.stats.tokens == plain.stats.tokens == 16


def test_rows_of_a_batch_stop_each_for_itself() -> None:
    prompts = ["Hello", "Hello there", "x"]
    options: dict[str, Any] = {"max_tokens": 40, "logit_bias": ASCII}
    whole = toy().generate(prompts, method="plain", **options)
    stop = [completion.text[5 + 7 * i : 8 + 7 * i] for i, completion in enumerate(whole)]
    alone = [toy().generate(prompt, method="plain", stop=stop, **options) for prompt in prompts]
    given = dict.fromkeys(range(3), "")
    for piece in toy().stream(prompts, method="ngram", stop=stop, **options):
        given[piece.index] += piece.text
        assert alone[piece.index].text.startswith(given[piece.index])
        if piece.completion is not None:
            assert piece.completion.tokens == alone[piece.index].tokens
            assert piece.completion.finish_reason == "stop"
    assert list(given.values()) == [completion.text for completion in alone]
