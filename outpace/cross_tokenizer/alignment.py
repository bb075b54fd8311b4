"""Pair: aligns the vocabularies of the target and the draft, that is, finds the tokens that mean the same in both."""

from __future__ import annotations

from functools import cached_property

from outpace.cross_tokenizer.vocabulary import Vocabulary, complete

WINDOW = 8  # the target's last committed tokens, which are encoded together with a draft
NEARLY_ALL = 0.98  # of a text in shared tokens: drafts in them are then as good as in the draft's own tokens
MOST = 0.6  # of a text in shared tokens: the shared noise is then worth more than the other tokens


class Pair:
    """The shared tokens of two vocabularies: `ours` is the target's, `theirs` is the draft's."""

    def __init__(self, ours: Vocabulary, theirs: Vocabulary):
        self.ours, self.theirs = ours, theirs
        self.special, self.special_back = _specials(ours, theirs)
        spelled = {i: theirs.ids[piece] for i, piece in enumerate(ours.spelled) if piece in theirs.ids}
        self.to_draft = spelled | self.special
        # Several tokens of one vocabulary may spell the same bytes; a probability maps from one token to one token.
        shared = {theirs.ids[piece]: i for piece, i in ours.ids.items() if piece in theirs.ids}
        self.to_target = shared | {there: i for there, i in self.special_back.items() if self.special.get(i) == there}

    @cached_property
    def overlap(self) -> float:
        """Estimate the share of an ordinary text that shared tokens spell, from the ids of these tokens.

        Vocabularies are learned and numbered from frequent to rare tokens. In a Zipf distribution, the i-th token has a
        share of about 1 / i. The offset accounts for the first ids, single bytes and marks, which are less frequent.
        """
        weights = {i: 1 / (i + 1000) for i, piece in enumerate(self.ours.spelled) if piece}
        return sum(w for i, w in weights.items() if i in self.to_draft) / (sum(weights.values()) or 1.0)

    def by_text(self, greedy: bool) -> bool:
        """Whether to draft in text: this works with any token, but cannot share the noise of a sampling target."""
        return self.overlap < (NEARLY_ALL if greedy else MOST)

    def respell(self, tokens: list[int], drafted: bytes) -> list[int]:
        """The target's tokens for the text that the draft predicts after `tokens`."""
        before = self._before(tokens)
        try:
            whole = (before + drafted).decode()
        except UnicodeDecodeError as error:  # the text ends inside a character, or is invalid
            whole = (before + drafted)[: error.start].decode()
        data = whole.encode()
        if not before or len(data) <= len(before):
            return self._alone(data[len(before) :])
        found: list[int] = []
        at = len(data)  # the end of the text is known, so tokens are matched backwards from there
        for token in reversed(self.ours.encode(whole)):
            piece = self.ours.bytes_of(token)
            if piece == b" " + data[:at]:
                piece = data[:at]  # without the space that the tokenizer puts before every text
            if not piece or data[max(0, at - len(piece)) : at] != piece:
                return self._alone(data[len(before) :])
            at -= len(piece)
            if at < len(before):  # the token would include committed text
                rest = self.ours.segment(piece[len(before) - at :])
                return [] if rest is None else rest + found[::-1]
            found.append(token)
            if at == len(before):
                break
        return found[::-1]

    def _before(self, tokens: list[int]) -> bytes:
        """The bytes of the last tokens, starting at the first byte of a character."""
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

    def _alone(self, data: bytes) -> list[int]:
        """Encode the draft alone: at the start of a text, or if the tokenizer does not reproduce texts exactly."""
        tokens = self.ours.encode(complete(data)[0])
        end = next((i for i, token in enumerate(tokens) if self.ours.bytes_of(token) is None), len(tokens))
        return tokens[:end]


def _from_character(data: bytes) -> bytes:
    """The data after its last invalid byte."""
    while data:
        try:
            data.decode()
            return data
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return data  # a draft may complete the character
            data = data[error.end :]
    return data


def _specials(ours: Vocabulary, theirs: Vocabulary) -> tuple[dict[int, int], dict[int, int]]:
    """Match special tokens by name, else by role: maps from the target to the draft, and back."""
    named = {name: i for i, name in reversed(theirs.specials.items())}
    there = {i: named[name] for i, name in ours.specials.items() if name in named}
    back = {theirs_id: i for i, theirs_id in reversed(there.items())}
    for role, i in ours.roles.items():
        if role in theirs.roles and i < ours.vocab and theirs.roles[role] < theirs.vocab:
            there.setdefault(i, theirs.roles[role])
            if role == "eos":  # the only one that is ever drafted
                back.setdefault(theirs.roles[role], i)
    return there, back
