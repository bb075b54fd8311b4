"""Pair: the target's tokenizer and the draft's, and which tokens mean the same to both."""

from __future__ import annotations

from functools import cached_property

from outpace.cross_tokenizer.vocabulary import Vocabulary, complete

WINDOW = 8  # tokens of the target before a guess that are read with it
NEARLY_ALL = 0.98  # of a text is spelled with shared tokens: their guesses are then as good as the draft's own
MOST = 0.6  # of a text: enough for the shared noise to be worth more than the other tokens


class Pair:
    """`ours` is the target's side, `theirs` the draft's."""

    def __init__(self, ours: Vocabulary, theirs: Vocabulary):
        self.ours, self.theirs = ours, theirs
        self.special, self.special_back = _specials(ours, theirs)
        spelled = {i: theirs.ids[piece] for i, piece in enumerate(ours.spelled) if piece in theirs.ids}
        self.to_draft = spelled | self.special
        # Several tokens of one side may spell the same; a probability goes from one to one.
        shared = {theirs.ids[piece]: i for piece, i in ours.ids.items() if piece in theirs.ids}
        self.to_target = shared | {there: i for there, i in self.special_back.items() if self.special.get(i) == there}

    @cached_property
    def overlap(self) -> float:
        """The share of an ordinary text that shared tokens spell, if a token is as frequent as its id is low.

        Vocabularies are learned from the frequent to the rare and numbered so; by Zipf's distribution the i-th token
        has a share of about 1 / i. The first ones, single bytes and marks, are not that frequent.
        """
        weights = {i: 1 / (i + 1000) for i, piece in enumerate(self.ours.spelled) if piece}
        return sum(w for i, w in weights.items() if i in self.to_draft) / (sum(weights.values()) or 1.0)

    def by_text(self, greedy: bool) -> bool:
        """Whether to guess in text: always right, but blind to the noise with which a sampling target chooses."""
        return self.overlap < (NEARLY_ALL if greedy else MOST)

    def respell(self, tokens: list[int], guess: bytes) -> list[int]:
        """The target's tokens of what the draft guessed to follow `tokens`."""
        before = self._before(tokens)
        try:
            whole = (before + guess).decode()
        except UnicodeDecodeError as error:  # the guess ends within a character, or is wrong
            whole = (before + guess)[: error.start].decode()
        data = whole.encode()
        if not before or len(data) <= len(before):
            return self._alone(data[len(before) :])
        found: list[int] = []
        at = len(data)  # the end of the guess is known, so tokens are laid from there
        for token in reversed(self.ours.encode(whole)):
            piece = self.ours.bytes_of(token)
            if piece == b" " + data[:at]:
                piece = data[:at]  # the space that is written before every text
            if not piece or data[max(0, at - len(piece)) : at] != piece:
                return self._alone(data[len(before) :])
            at -= len(piece)
            if at < len(before):  # it would be one token with what is committed already
                rest = self.ours.segment(piece[len(before) - at :])
                return [] if rest is None else rest + found[::-1]
            found.append(token)
            if at == len(before):
                break
        return found[::-1]

    def _before(self, tokens: list[int]) -> bytes:
        """The bytes of the last tokens, from the start of a character on."""
        pieces: list[bytes] = []
        for token in reversed(tokens):
            piece = self.ours.bytes_of(token)
            if piece is None:
                break
            pieces.append(piece)
            if len(pieces) >= WINDOW and pieces[-1][:1] and pieces[-1][0] & 0xC0 != 0x80:
                return _from_character(b"".join(reversed(pieces)))
        before = b"".join(reversed(pieces))
        if self.ours.prefix_space and before[:1] == b" ":
            before = before[1:]
        return _from_character(before)

    def _alone(self, guess: bytes) -> list[int]:
        """The guess by itself: at the start of a text, and if the tokenizer does not spell texts as they are."""
        tokens = self.ours.encode(complete(guess)[0])
        end = next((i for i, token in enumerate(tokens) if self.ours.bytes_of(token) is None), len(tokens))
        return tokens[:end]


def _from_character(data: bytes) -> bytes:
    """Without wrong bytes: what comes after the last of them."""
    while data:
        try:
            data.decode()
            return data
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return data  # a guess may go on there
            data = data[error.end :]
    return data


def _specials(ours: Vocabulary, theirs: Vocabulary) -> tuple[dict[int, int], dict[int, int]]:
    """Special tokens of the same name, else of the same role; from the target to the draft, and back."""
    named = {name: i for i, name in reversed(theirs.specials.items())}
    there = {i: named[name] for i, name in ours.specials.items() if name in named}
    back = {theirs_id: i for i, theirs_id in reversed(there.items())}
    for role, i in ours.roles.items():
        if role in theirs.roles and i < ours.vocab and theirs.roles[role] < theirs.vocab:
            there.setdefault(i, theirs.roles[role])
            if role == "eos":  # the only one that is ever guessed
                back.setdefault(theirs.roles[role], i)
    return there, back
