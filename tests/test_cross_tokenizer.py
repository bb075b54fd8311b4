"""Drafts with other tokenizers: what tokens spell, how a draft follows, and that no guess ever changes an answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import outpace
from outpace import registry
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.bench.contestants import OutpaceContestant
from outpace.bench.specs import MethodSpec
from outpace.core.lm import DraftShape, DraftToken
from outpace.cross_tokenizer.alignment import Pair
from outpace.cross_tokenizer.by_tokens import TranslatedLM
from outpace.cross_tokenizer.follower import Follower, TokenFollower
from outpace.cross_tokenizer.vocabulary import Vocabulary, complete, join
from outpace.errors import UsageError
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.sampler import Pick
from outpace.testing import ByteTokenizer, ToyLM
from tests.tiny_models import build
from tests.tiny_tokenizers import CORPUS, EXACT, KINDS, Reciter, characters, random_model, reciting

TEXT = "The naïve fox, in 2024: “Où est 東京?” 🙂🙂\n\n    def add(a, b):\n        return a + b  # Привет\n" * 2
WAYS = ("tokens", "text")
PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b]
SMALL = [pair for pair in PAIRS if "smollm2" not in pair]  # a vocabulary of 49,152 takes its time
EXACT_PAIRS = [(a, b) for a in EXACT for b in EXACT if a != b]
# SentencePiece has its mark for a space, and SmolLM2 has no token for these control characters and for planes 4 to 11.
UNSPELLED = "\u2581\x04\x06\x13\x14\x16\x1d"
CHARACTERS = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=UNSPELLED)
texts = st.text(CHARACTERS, max_size=40) | st.text("ab \n\tÅé東🙂'1", max_size=60)
steady = settings(derandomize=True, deadline=None, max_examples=40)


@cache
def pieces(kind: str) -> Vocabulary:
    tokenizer = KINDS[kind]()
    return Vocabulary(tokenizer, len(tokenizer) + 3)


@cache
def joined(target: str, draft: str) -> Pair:
    return Pair(pieces(target), pieces(draft))


def spelled(kind: str, ids: Seq[int]) -> bytes | None:
    """The bytes of a text's tokens, without what the tokenizer puts before it."""
    known, ids = pieces(kind), list(ids)
    ids = ids[len(known.start) :] if ids[: len(known.start)] == known.start else ids
    found = join(map(known.bytes_of, ids))
    return found[1:] if found and known.prefix_space else found


# What tokens spell


@pytest.mark.parametrize("kind", EXACT)
@steady
@given(text=texts)
def test_tokens_spell_their_text(kind: str, text: str) -> None:
    assert spelled(kind, pieces(kind).encode(text)) == text.encode()
    data = text.encode()
    segments = pieces(kind).segment(data)
    assert segments is not None and join(map(pieces(kind).bytes_of, segments)) == data


def test_spellings_that_are_no_text() -> None:
    for known in map(pieces, KINDS):
        assert all(known.bytes_of(i) is None for i in known.specials)
        assert known.bytes_of(known.vocab - 1) is None and known.bytes_of(10**9) is None  # beyond the tokenizer
    think = KINDS["tiktoken"]().convert_tokens_to_ids("<think>")
    assert pieces("tiktoken").bytes_of(think) == b"<think>"  # added, but text
    byte = KINDS["sentencepiece"]().convert_tokens_to_ids("<0x0A>")
    assert pieces("sentencepiece").bytes_of(byte) == b"\n"
    assert pieces("wordpiece").bytes_of(KINDS["wordpiece"]().convert_tokens_to_ids("##e")) == b"e"
    assert Vocabulary(ByteTokenizer(), 300).bytes_of(0x41) == b"A"


@steady
@given(data=st.binary(max_size=12) | texts.map(str.encode), cut=st.integers(0, 12))
def test_a_character_is_whole_or_waits(data: bytes, cut: int) -> None:
    text, rest = complete(data[:cut])
    assert len(rest) < 4
    if not rest:
        assert text == data[:cut].decode(errors="replace")
    try:
        whole = data.decode()
    except UnicodeDecodeError:
        return
    assert whole.startswith(text) and text.encode() + rest == data[:cut]


# What both have


def test_special_tokens_by_name_and_by_role() -> None:
    tiktoken, smollm2, llama = (KINDS[kind]() for kind in ("tiktoken", "smollm2", "sentencepiece"))
    named = joined("tiktoken", "smollm2").special
    for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert named[tiktoken.convert_tokens_to_ids(name)] == smollm2.convert_tokens_to_ids(name)
    roles = joined("sentencepiece", "smollm2")
    assert roles.special[llama.eos_token_id] == smollm2.eos_token_id
    assert roles.special_back[smollm2.eos_token_id] == llama.eos_token_id
    assert tiktoken.convert_tokens_to_ids("<|im_start|>") not in joined("tiktoken", "sentencepiece").special


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_shared_tokens_are_one_to_one(names: tuple[str, str]) -> None:
    pair = joined(*names)
    assert len(set(pair.to_target.values())) == len(pair.to_target)
    for theirs, ours in pair.to_target.items():
        assert pair.to_draft[ours] == theirs
        assert pair.ours.bytes_of(ours) == pair.theirs.bytes_of(theirs)
    assert 0 <= pair.overlap <= 1


def test_the_way_is_chosen_by_what_is_shared() -> None:
    pair = copy.copy(joined("tiktoken", "smollm2"))
    for overlap, greedy, sampled in ((0.3, True, True), (0.8, True, False), (0.99, False, False)):
        pair.__dict__["overlap"] = overlap
        assert (pair.by_text(greedy=True), pair.by_text(greedy=False)) == (greedy, sampled)


# How a draft follows


@pytest.mark.parametrize("names", EXACT_PAIRS, ids="-".join)
@pytest.mark.parametrize("follows", [Follower, TokenFollower])
@settings(steady, max_examples=15)
@given(text=texts, seed=st.integers(0, 99))
@example(text=TEXT, seed=3)
def test_what_is_followed_is_spelled_as_it_was_said(
    names: tuple[str, str], follows: type[Follower], text: str, seed: int
) -> None:
    """Whatever pieces the text comes in, parts of characters among them."""
    pair = joined(*names)
    tokens = pair.ours.encode(text)
    follower, at = follows(pair, 4096), 0
    while at < len(tokens):
        at = min(len(tokens), at + 1 + (7 * at + seed) % 5)
        found = follower.follow(tokens[:at])
        said, ids = spelled(names[0], tokens[:at]), found[len(pair.theirs.start) :]
        assert said is not None and (not said or join(map(pair.theirs.bytes_of, ids)) in (said, b" " + said))
    if tokens:
        assert follower.follow(tokens) == found  # asked again, nothing changes


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_text_is_followed_as_if_it_had_come_at_once(names: tuple[str, str]) -> None:
    pair = joined(*names)
    for text in (TEXT, " ".join(CORPUS)):
        tokens = pair.ours.encode(text)
        follower = Follower(pair, 4096)
        for at in range(1, len(tokens) + 1, 3):
            follower.follow(tokens[:at])
        whole = Follower(pair, 4096).follow(tokens)
        assert follower.follow(tokens) == whole
        if names[0] in EXACT:
            assert whole == pair.theirs.start + pair.theirs.encode(text)


def test_a_chat_is_followed_as_the_draft_would_write_it() -> None:
    messages = [{"role": "user", "content": "Où est 東京?"}, {"role": "assistant", "content": "Là."}]
    tiktoken, smollm2 = KINDS["tiktoken"](), KINDS["smollm2"]()
    text = tiktoken.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for follows in (Follower, TokenFollower):
        found = follows(joined("tiktoken", "smollm2"), 4096).follow(tiktoken.encode(text))
        assert found == smollm2.encode(text)
    # Marks that the draft does not have are left out; the end is its own.
    pair = joined("tiktoken", "sentencepiece")
    found = Follower(pair, 4096).follow(tiktoken.encode("<|im_start|>user\nhi<|im_end|>\n"))
    llama = KINDS["sentencepiece"]()
    assert found == [*llama.encode("user\nhi"), llama.eos_token_id, *llama.encode("\n", add_special_tokens=False)]


def test_every_text_begins_as_the_drafts_tokenizer_begins_one() -> None:
    llama, smollm2 = KINDS["sentencepiece"](), KINDS["smollm2"]()
    with_bos = llama.encode("The fox")
    assert with_bos[0] == llama.bos_token_id
    assert Follower(joined("sentencepiece", "smollm2"), 4096).follow(with_bos) == smollm2.encode("The fox")
    assert Follower(joined("smollm2", "sentencepiece"), 4096).follow(smollm2.encode("The fox")) == with_bos
    twice = Pair(pieces("sentencepiece"), pieces("sentencepiece"))
    assert Follower(twice, 4096).follow(with_bos) == with_bos


def test_a_token_that_is_nothing_to_the_draft_is_left_out() -> None:
    pair = joined("tiktoken", "smollm2")
    fox, padded = pair.ours.encode("The fox"), pair.ours.vocab - 1
    for follows in (Follower, TokenFollower):
        assert follows(pair, 4096).follow([padded]) == [pair.theirs.filler]
        follower = follows(pair, 4096)
        known = list(follower.follow(fox))
        assert follower.follow([*fox, padded]) == known


def test_followers_slide_when_the_drafts_context_is_full() -> None:
    pair = joined("tiktoken", "smollm2")
    tokens = pair.ours.encode(" ".join(CORPUS * 3))
    for follows in (Follower, TokenFollower):
        follower, longest = follows(pair, 200), 0
        for at in range(1, len(tokens), 5):
            found = follower.follow(tokens[:at])
            longest = max(longest, len(found))
            said, heard = join(map(pair.ours.bytes_of, tokens[:at])), join(map(pair.theirs.bytes_of, found))
            assert said is not None and heard is not None and said.endswith(heard)
        assert 100 <= longest <= 200 - 64


def test_a_text_that_changes_is_followed_anew() -> None:
    pair = joined("tiktoken", "smollm2")
    one, other = pair.ours.encode("The quick fox"), pair.ours.encode("The lazy dog")
    for follows in (Follower, TokenFollower):
        follower = follows(pair, 4096)
        follower.follow(one)
        assert follower.follow(other) == pair.theirs.encode("The lazy dog")


# How its guesses are told again


@pytest.mark.parametrize("kind", EXACT)
@steady
@given(text=texts, at=st.integers(0, 60), cut=st.booleans())
@example(text="naïve 東京 🙂", at=4, cut=True)
def test_a_guess_is_respelled_as_it_was_guessed(kind: str, text: str, at: int, cut: bool) -> None:
    """After a token of the text, or after a part of a character."""
    known = pieces(kind)
    pair, data = joined(kind, "wordpiece"), text.encode()
    said = known.segment(data[:at]) if cut else known.encode(text)[:at]
    assert said is not None
    before = join(map(known.bytes_of, said))
    assert before is not None
    start = len(before) - (known.prefix_space and not cut and bool(before))
    found = pair.respell(said, data[start:])
    guess = spelled(kind, found) if known.prefix_space and not said else join(map(known.bytes_of, found))
    assert guess == data[start:]


@pytest.mark.parametrize("kind", EXACT)
def test_a_guess_is_respelled_as_the_target_would_write_it(kind: str) -> None:
    known, pair = pieces(kind), joined(kind, "wordpiece")
    for text in (TEXT, " ".join(CORPUS)):
        tokens = known.encode(text)
        for at in range(len(tokens) - 12):
            guess = join(map(known.bytes_of, tokens[at : at + 12]))
            assert guess is not None
            guess = guess[1:] if known.prefix_space and not at else guess
            found = pair.respell(tokens[:at], guess)  # the end of a guess may be one token with what follows it
            assert found[:6] == tokens[at : at + 6]


def test_wrong_guesses_are_nothing() -> None:
    pair = joined("smollm2", "tiktoken")
    start = pair.ours.segment("東".encode()[:1])
    assert start is not None
    assert pair.respell(start, b"abc") == []  # no character goes on so
    assert pair.respell(start, b"") == []
    assert pair.respell(pair.ours.encode("a"), b"\xff\xfe") == []
    assert pair.respell(pair.ours.encode("a"), b"bc\xe6") == pair.respell(pair.ours.encode("a"), b"bc")


# Answers


SAMPLED = {"temperature": 1.0, "seed": 7}
PROMPTS = ["The quick brown", "東京は 🙂", "def add(a, b):\n    return"]


def tokens_of(completions: Any) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def ids(model: Model) -> list[list[int]]:
    return [model.tokenizer.encode(text) or [5] for text in PROMPTS]  # type: ignore[union-attr]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", [*SMALL, ("tiktoken", "smollm2")], ids="-".join)
def test_random_models_agree_with_plain(names: tuple[str, str], way: str) -> None:
    """They say parts of characters, special tokens and ids that no tokenizer has; prompts of several lengths."""
    target, draft = random_model(names[0]), random_model(names[1], seed=1)
    for sampling in ({}, SAMPLED):
        given = {**sampling, "max_tokens": 12}
        plain = tokens_of(target.generate(ids(target), method="plain", **given))
        method = {"method": "draft", "draft": draft, "align": way, "depth": 3}
        assert tokens_of(target.generate(ids(target), **method, **given)) == plain
        assert target.generate(ids(target)[1], **method, width=2, **given).tokens == plain[1]


@settings(steady, max_examples=8)
@given(text=texts.filter(bool), sampled=st.booleans(), way=st.sampled_from(WAYS))
def test_any_prompt(text: str, sampled: bool, way: str) -> None:
    target, draft = random_model("tiktoken"), random_model("sentencepiece", seed=1)
    settings = {**(SAMPLED if sampled else {}), "max_tokens": 8}
    plain = target.generate(text, method="plain", **settings).tokens
    assert target.generate(text, method="draft", draft=draft, align=way, depth=3, **settings).tokens == plain


def test_ids_beyond_the_tokenizer_are_said_and_survived() -> None:
    target, draft = random_model("tiktoken", padding=2000), random_model("sentencepiece", padding=900)
    plain = target.generate(PROMPTS, method="plain", max_tokens=30)
    assert any(token >= len(KINDS["tiktoken"]()) for c in plain for token in c.tokens)
    for way in WAYS:
        found = target.generate(PROMPTS, method="draft", draft=draft, align=way, max_tokens=30)
        assert tokens_of(found) == tokens_of(plain)


@pytest.mark.parametrize(
    ("names", "width"), [*((names, 1) for names in EXACT_PAIRS), (("tiktoken", "sentencepiece"), 3)], ids=str
)
def test_text_that_both_know_is_guessed(names: tuple[str, str], width: int) -> None:
    """Two models that recite one text, each in its own tokens: nearly all that is drafted is accepted."""
    target, draft = (reciting(kind, TEXT) for kind in names)
    given = {"max_tokens": 60, "ignore_eos": True}
    plain = target.generate(TEXT[:30], method="plain", **given)
    assert TEXT[30:].startswith(plain.text[:30])
    found = target.generate(TEXT[:30], method="draft", draft=draft, align="text", depth=6, width=width, **given)
    assert found.tokens == plain.tokens
    assert found.stats.tokens_per_pass > 2.5


def test_a_draft_that_has_no_bytes_guesses_the_rest_of_a_character() -> None:
    """The target ends within a character, which the draft cannot be told: its guess must begin with what there is."""
    text = "首都は東京、人口は多い。" * 6
    target, draft = reciting("smollm2", text), reciting(characters(text), text)
    given = {"max_tokens": 60, "ignore_eos": True}
    steps = [piece.step for piece in target.stream(text[:12], method="draft", draft=draft, align="text", **given)]
    ends = [join(map(pieces("smollm2").bytes_of, step.tokens)) for step in steps if step is not None]
    assert any(end and complete(end)[1] for end in ends)
    done = target.generate(text[:12], method="draft", draft=draft, align="text", **given)
    assert done.tokens == target.generate(text[:12], method="plain", **given).tokens
    assert done.stats.tokens_per_pass > 5


def test_the_end_of_a_text_is_guessed_too() -> None:
    target, draft = (reciting(kind, "The fox") for kind in ("smollm2", "sentencepiece"))
    found = target.generate("The", method="draft", draft=draft, align="text")
    assert found.tokens == target.generate("The", method="plain").tokens
    assert found.finish_reason == "stop" and found.stats.passes == 1


def test_what_the_draft_read_is_kept() -> None:
    """By text or by tokens, a draft reads a long prompt once; later only what is new, and its own guesses."""
    for way in WAYS:
        draft = reciting("sentencepiece", TEXT * 4)
        target = reciting("tiktoken", TEXT * 4)
        prompt = (TEXT * 4)[:200]
        target.generate(prompt, method="draft", draft=draft, align=way, max_tokens=1)
        lm = draft.lm
        assert isinstance(lm, Reciter)
        lm.fed = 0
        done = target.generate(prompt, method="draft", draft=draft, align=way, max_tokens=60, ignore_eos=True)
        assert lm.fed < len(draft.tokenizer.encode(prompt)) + 12 * done.stats.passes  # type: ignore[union-attr]


class Renamed:
    """The same tokenizer with other ids."""

    def __init__(self, tokenizer: Any):
        self.inner, self.size = tokenizer, len(tokenizer)
        self.all_special_ids = [self.there(i) for i in tokenizer.all_special_ids]
        self.eos_token_id = self.there(tokenizer.eos_token_id)
        self.added_tokens_decoder = {self.there(i): token for i, token in tokenizer.added_tokens_decoder.items()}
        self.chat_template = None

    def there(self, token: int) -> int:
        return (token + 100) % self.size

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {name: self.there(i) for name, i in self.inner.get_vocab().items()}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return self.inner.convert_ids_to_tokens([(i - 100) % self.size for i in ids])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.there(i) for i in self.inner.encode(text, add_special_tokens=add_special_tokens)]


class RenamedLM(ToyLM):
    """The same model with other ids."""

    def run(self, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits, states = super().run([(i - 100) % self.vocab for i in tokens])
        return logits.roll(100, dims=-1), states


@pytest.mark.parametrize("verifier", ["match", "residual"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_shared_tokens_are_guessed_as_well_as_by_a_draft_of_the_same_vocabulary(
    sampling: dict[str, Any], verifier: str
) -> None:
    """The noise is keyed by the target's ids, so that a draft in which only the ids differ guesses just the same."""
    tokenizer = KINDS["tiktoken"]()
    target = Model(ToyLM(layers=2, vocab=len(tokenizer)), tokenizer)
    same, other = ToyLM(layers=1, vocab=len(tokenizer)), RenamedLM(layers=1, vocab=len(tokenizer))
    for width in (1, 2):
        given = {**sampling, "method": "draft", "width": width, "max_tokens": 40, "verifier": verifier}
        one = target.generate(PROMPTS, draft=same, **given)
        two = target.generate(PROMPTS, draft=Model(other, Renamed(tokenizer)), align="tokens", **given)
        assert tokens_of(one) == tokens_of(two)
        assert [c.stats.accepted for c in one] == [c.stats.accepted for c in two]
        assert sum(c.stats.accepted for c in two) > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_that_makes_chains_by_itself(way: str) -> None:
    """As one on a GPU does; where it says what the target has no token for, its chain ends."""

    class Chaining(Reciter):
        made = 0

        def draft(
            self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
        ) -> list[list[DraftToken]]:
            self.made += 1
            chains, steps = [], max(shape.depth for shape in shapes)
            for row, token in zip(rows, tokens, strict=True):
                said = [*self.slots[row].tokens, *self.slots[row].pending, token]
                for _ in range(steps):
                    said.append(self.following(said))
                chains.append([DraftToken(token, 0.9, i - 1) for i, token in enumerate(said[-steps:])])
            return chains

    tokenizer, target = KINDS["sentencepiece"](), reciting("tiktoken", TEXT)
    lm = Chaining(tokenizer, TEXT)
    lm.drafts = lm
    given = {"max_tokens": 30, "ignore_eos": True}
    plain = tokens_of(target.generate([TEXT[:20], TEXT[:40]], method="plain", **given))
    method = {"method": "draft", "draft": Model(lm, tokenizer), "align": way}
    found = target.generate([TEXT[:20], TEXT[:40]], **method, **given)
    assert tokens_of(found) == plain and lm.made > 0
    assert sum(c.stats.accepted for c in found) > 0


@pytest.mark.parametrize("policy", sorted(registry.POLICIES))
@pytest.mark.parametrize("way", WAYS)
def test_under_every_policy_and_in_auto(policy: str, way: str) -> None:
    target, draft = reciting("tiktoken", TEXT, sure=3.0), reciting("sentencepiece", TEXT, sure=6.0)
    prompts = [TEXT[:n] for n in (3, 45)]
    for sampling in ({}, SAMPLED):
        given = {**sampling, "max_tokens": 12, "ignore_eos": True}
        plain = tokens_of(target.generate(prompts, method="plain", **given))
        for method in ({"method": "draft", "align": way}, {"method": "auto"}):
            found = target.generate(prompts, **method, draft=draft, policy=policy, **given)
            assert tokens_of(found) == plain


def test_one_batch_of_all_ways() -> None:
    target, draft = random_model("tiktoken"), random_model("smollm2", seed=1)
    rows, plain = [], []
    for i, prompt in enumerate(PROMPTS * 2):
        given = {**(SAMPLED if i % 2 else {}), "max_tokens": 8 + i, "repetition_penalty": 1.0 + 0.1 * i}
        rows.append(
            Request.from_keywords(prompt, {**given, "method": "draft", "draft": draft, "align": ("auto", *WAYS)[i % 3]})
        )
        plain.append(target.generate(prompt, method="plain", **given).tokens)
    assert tokens_of(target.generate(rows)) == plain


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_5_text"])
def test_state_space_drafts(kind: str) -> None:
    """A state that cannot be cut back: tokens that what follows may still change stay out of it."""
    shape: dict[str, Any] = dict(num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8)
    if kind != "mamba2":
        shape = dict(
            num_key_value_heads=2, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
            linear_num_value_heads=4, layer_types=["linear_attention", "full_attention", "linear_attention"],
        )  # fmt: skip
    tokenizer = KINDS["sentencepiece"]()
    draft = outpace.wrap(build(kind, vocab_size=len(tokenizer), **shape), tokenizer)
    assert not draft.lm.trees
    target = reciting("tiktoken", TEXT)
    prompts = [TEXT[:n] for n in (60, 90)]
    for sampling in ({}, SAMPLED):
        given = {**sampling, "max_tokens": 12, "ignore_eos": True}
        plain = tokens_of(target.generate(prompts, method="plain", **given))
        for way in WAYS:
            # Trees are asked for, and chains are what such a draft can do.
            found = target.generate(prompts, method="draft", draft=draft, align=way, depth=3, width=2, **given)
            assert tokens_of(found) == plain


def test_a_state_is_not_read_again_from_the_start() -> None:
    class Stateful(Reciter):
        """Cannot be cut back, as a state-space model."""

        trees = False

        def crop(self, row: int, length: int) -> int:
            return 0

        def copy(self, source: int, target: int, length: int) -> bool:
            return False

    text = TEXT * 3
    tokenizer = KINDS["sentencepiece"]()
    lm = Stateful(tokenizer, text)
    target = reciting("tiktoken", text)
    done = target.generate(
        text[:200], method="draft", draft=Model(lm, tokenizer), align="text", max_tokens=80, ignore_eos=True
    )
    assert done.stats.tokens_per_pass > 2
    assert lm.fed < len(tokenizer.encode(text[:200])) + 30 * done.stats.passes


def test_neither_model_nor_tokenizer_is_changed() -> None:
    tokenizer = copy.deepcopy(KINDS["sentencepiece"]())
    model = build("llama", vocab_size=len(tokenizer), num_key_value_heads=2)
    weights, spelling = copy.deepcopy(model.state_dict()), tokenizer.backend_tokenizer.to_str()
    theirs = KINDS["tiktoken"]()
    ours = theirs.backend_tokenizer.to_str()
    draft, target = outpace.wrap(model, tokenizer), random_model("tiktoken")
    for way in WAYS:
        target.generate(PROMPTS, method="draft", draft=draft, align=way, max_tokens=8, **SAMPLED)
    assert tokenizer.backend_tokenizer.to_str() == spelling and theirs.backend_tokenizer.to_str() == ours
    assert model.config.vocab_size == len(tokenizer)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_a_draft_whose_context_is_short() -> None:
    class Short(ToyLM):
        def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
            assert all(max(job.positions) < self.max_length for job in jobs)
            return super().forward(jobs, taps)

    target = random_model("tiktoken")
    prompt = " ".join(CORPUS)[:300]
    plain = target.generate(prompt, method="plain", max_tokens=20).tokens
    tokenizer = KINDS["sentencepiece"]()
    other = Model(Short(layers=1, vocab=len(tokenizer), max_length=100), tokenizer)
    for way in WAYS:
        found = target.generate(prompt, method="draft", draft=other, align=way, max_tokens=20)
        assert found.tokens == plain and found.stats.drafted > 0
    same = Short(layers=1, vocab=target.lm.vocab, max_length=100)
    assert target.generate(prompt, method="draft", draft=same, max_tokens=20).tokens == plain


# What is asked for


def test_with_the_same_tokenizer_nothing_changes() -> None:
    target, draft = random_model("tiktoken"), random_model("tiktoken", seed=1)
    assert target.draft_of(draft) is draft.lm
    assert target.draft_of(draft.lm) is draft.lm
    other = random_model("smollm2")
    assert isinstance(target.draft_of(other), TranslatedLM)
    assert target.draft_of(other) is target.draft_of(other)  # what was learned with it serves the next call


def test_wrong_wishes() -> None:
    target, same, other = random_model("tiktoken"), random_model("tiktoken", seed=1), random_model("smollm2")
    with pytest.raises(UsageError, match="unknown align 'txt'; did you mean 'text'"):
        target.generate("a", method="draft", draft=other, align="txt")
    for draft in (same, same.lm):
        with pytest.raises(UsageError, match=r"another tokenizer than the target's.*wrap\(model, tokenizer\)"):
            target.generate("a", method="draft", draft=draft, align="text")
    with pytest.raises(UsageError, match=r"needs both tokenizers; .* wrap\(model, tokenizer\)"):
        target.generate("a", method="draft", draft=Model(other.lm, name="bare"))
    with pytest.raises(UsageError, match=r"needs both tokenizers"):
        Model(target.lm, name="bare").generate([1], method="draft", draft=other)


def test_by_name() -> None:
    target, draft = random_model("tiktoken"), random_model("smollm2", seed=1)
    plain = target.generate(PROMPTS[0], method="plain", max_tokens=8).tokens
    assert target.generate(PROMPTS[0], method="draft:align=text,depth=2", draft=draft, max_tokens=8).tokens == plain


def test_bench_measures_such_drafts() -> None:
    target, draft = random_model("tiktoken"), random_model("smollm2", seed=1)
    ours = OutpaceContestant(target, MethodSpec.parse("draft:align=text"), draft)
    assert isinstance(ours.options["draft"], TranslatedLM)
