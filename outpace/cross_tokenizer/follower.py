"""Followers: the target's committed tokens as tokens of the draft, updated as the text grows.

The draft's cache holds the ids that it was fed, so a follower changes as few earlier ids as it can.
"""

from __future__ import annotations

from outpace.cross_tokenizer.alignment import Pair
from outpace.cross_tokenizer.vocabulary import complete
from outpace.models.segment import common_prefix

WINDOW = 48  # characters to re-encode when text is added; more if necessary
SETTLED = 2  # tokens before a change on which the old and the new encoding must agree
ROOM = 64  # tokens that must stay free in the draft's context


class Follower:
    """Re-encodes text, maps special tokens by name or role, adds the draft's own start, and drops the oldest ids when
    the context is full."""

    def __init__(self, pair: Pair, context: int):
        self.pair, self.context = pair, context
        self.restart()

    def restart(self) -> None:
        self.tokens: list[int] = []  # the target's tokens so far
        self.ids: list[int] = []  # the draft's tokens for them
        self.begin = 0  # index in `ids` where the text after the last special token begins
        self.opened = False  # whether any text has followed that token
        self.text = ""  # the encoded part of that text
        self.rest = b""  # the bytes of a character that is still incomplete
        self.loose = 0  # number of ids at the end that spell `rest`

    def follow(self, tokens: list[int]) -> list[int]:
        """The draft's ids for these tokens, never empty. Ids of the last call are kept if its tokens are a prefix."""
        if tokens[: len(self.tokens)] != self.tokens:
            self.restart()
        new = tokens[len(self.tokens) :]
        if not self.tokens and new:
            new = self._lead(new)
        self._add(new)
        self.tokens = list(tokens)
        most = self.context - ROOM
        if len(self.ids) > most > 0:  # drop half of it, so that this happens rarely
            dropped = len(self.ids) - most // 2
            del self.ids[:dropped]
            self.begin = max(0, self.begin - dropped)
        return self.ids or [self.pair.theirs.filler]

    def _lead(self, tokens: list[int]) -> list[int]:
        """Begin the text as the draft's tokenizer does, and drop a start token that only the target has."""
        pair, first = self.pair, tokens[0]
        start, same = pair.theirs.start, pair.special.get(first)
        if start and same == start[0]:
            return tokens
        self.ids += start
        self.begin = len(self.ids)
        named = same is not None and pair.theirs.specials.get(same) == pair.ours.specials.get(first)
        return tokens[1:] if first == pair.ours.roles.get("bos") and not named else tokens

    def _add(self, tokens: list[int]) -> None:
        data = b""
        for token in tokens:
            piece = self.pair.ours.bytes_of(token)
            if piece is not None:
                data += piece
                continue
            self._write(data)
            self._mark(token)
            data = b""
        self._write(data)

    def _mark(self, token: int) -> None:
        """Add a token that is not text: it ends the text before it, and is left out if the draft does not have it."""
        self.rest, self.loose = b"", 0
        if token in self.pair.special:
            self.ids.append(self.pair.special[token])
        self.begin, self.opened, self.text = len(self.ids), False, ""

    def _write(self, data: bytes) -> None:
        """Add text: whole characters as the draft's tokenizer encodes them, the rest byte by byte if possible."""
        if not data:
            return
        if not self.opened and self.pair.ours.prefix_space and data[:1] == b" ":
            data = data[1:]
        self.opened = True
        text, self.rest = complete(self.rest + data)
        del self.ids[len(self.ids) - self.loose :]
        if text:
            self._reencode(text)
        loose = self.pair.theirs.segment(self.rest) or []
        self.ids += loose
        self.loose = len(loose)

    def _reencode(self, text: str) -> None:
        """Encode the end of the text together with the new part, and replace only the ids that differ."""
        encode, window = self.pair.theirs.encode, WINDOW
        while len(self.text) > window:
            tail = self.text[-window:]
            # Cut out of its text, the tail may begin with other ids, but equally so with and without the new part.
            before, after = encode(tail), encode(tail + text)
            same = common_prefix(before, after)
            settled = before[same - SETTLED :] if same >= SETTLED else None
            if settled is not None and self.ids[len(self.ids) - len(settled) :] == settled:
                del self.ids[len(self.ids) - (len(before) - same) :]
                self.ids += after[same:]
                self.text += text
                return
            window *= 4
        self.text += text
        self.ids[self.begin :] = encode(self.text)


class TokenFollower(Follower):
    """Encodes the first tokens as text and each later token alone, so that earlier ids never change."""

    def _add(self, tokens: list[int]) -> None:
        if not self.tokens:
            super()._add(tokens)
            return
        for token in tokens:
            shared, piece = self.pair.to_draft.get(token), self.pair.ours.bytes_of(token)
            if shared is not None:
                self.ids.append(shared)
            elif piece:
                self.ids += self._spelled(piece)

    def _spelled(self, piece: bytes) -> list[int]:
        theirs = self.pair.theirs
        text, rest = complete(piece)
        if rest or "\ufffd" in text or (theirs.prefix_space and not text.startswith(" ")):
            return theirs.segment(piece) or []
        return theirs.encode(text[1:] if theirs.prefix_space else text)
