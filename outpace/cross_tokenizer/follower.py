"""Followers: what the target has committed, as tokens of the draft, kept up to date as it grows.

A draft's cache holds what it was fed, so a follower changes as little of what it said before as it can.
"""

from __future__ import annotations

from outpace.cross_tokenizer.alignment import Pair
from outpace.cross_tokenizer.vocabulary import complete
from outpace.models.segment import common_prefix

WINDOW = 48  # characters that are encoded again when text is added; more if they do not settle it
SETTLED = 2  # tokens before the change on which the old and the new encoding must agree
ROOM = 64  # tokens that a draft's context must have left


class Follower:
    """Base: special tokens by name or role, the draft's own start, and a context that slides when it is full."""

    def __init__(self, pair: Pair, context: int):
        self.pair, self.context = pair, context
        self.restart()

    def restart(self) -> None:
        self.tokens: list[int] = []  # of the target, that were followed
        self.ids: list[int] = []  # of the draft
        self.begin = 0  # of the ids: where the text after the last special token begins
        self.opened = False  # whether anything was said since then
        self.text = ""  # of it, that was encoded
        self.rest = b""  # the start of a character that is not whole yet
        self.loose = 0  # ids at the end that spell it

    def follow(self, tokens: list[int]) -> list[int]:
        """The draft's ids of these tokens, never empty; a shared beginning with the last ones asked for is kept."""
        if tokens[: len(self.tokens)] != self.tokens:
            self.restart()
        new = tokens[len(self.tokens) :]
        if not self.tokens and new:
            new = self._lead(new)
        self._add(new)
        self.tokens = list(tokens)
        most = self.context - ROOM
        if len(self.ids) > most > 0:  # half of it goes, so that this happens rarely
            dropped = len(self.ids) - most // 2
            del self.ids[:dropped]
            self.begin = max(0, self.begin - dropped)
        return self.ids or [self.pair.theirs.filler]

    def _lead(self, tokens: list[int]) -> list[int]:
        """Every text begins as the draft's tokenizer begins one; a mark of the target's own is left out."""
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
        """A token that is no text ends the text before it; one that the draft does not know is left out."""
        self.rest, self.loose = b"", 0
        if token in self.pair.special:
            self.ids.append(self.pair.special[token])
        self.begin, self.opened, self.text = len(self.ids), False, ""

    def _write(self, data: bytes) -> None:
        """Add text: whole characters as the draft's tokenizer writes them, the rest byte by byte if it can."""
        if not data:
            return
        if not self.opened and self.pair.ours.prefix_space and data[:1] == b" ":
            data = data[1:]
        self.opened = True
        text, self.rest = complete(self.rest + data)
        del self.ids[len(self.ids) - self.loose :]
        if text:
            self._retell(text)
        loose = self.pair.theirs.segment(self.rest) or []
        self.ids += loose
        self.loose = len(loose)

    def _retell(self, text: str) -> None:
        """Encode the end of the text again with what is new, and change the ids that this changes."""
        encode, window = self.pair.theirs.encode, WINDOW
        while len(self.text) > window:
            tail = self.text[-window:]
            # Cut out of its text the tail may begin otherwise, but then it does so with and without what is new.
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
    """The first tokens as text, later ones each by itself, so that what was said is never changed."""

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
