"""Vocabulary: the bytes that each token of a tokenizer spells.

Two tokenizers are compared by bytes, not by text: a token may be a part of a character, and a tokenizer may have its
own way to write a space or a byte. This way is not inferred from the tokenizer's class but tried on a few texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

ROLES = ("eos", "bos", "unk", "sep", "cls", "mask")  # an id with several roles counts under the first
PROBES = ("the cat", "the cat sat, on 12 mats.", "def f(x):\n    return x", "naïve 東京 🙂")
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BROKEN = "\ufffd"

Spelling = Callable[[list[Any]], list[bytes | None]]


class Vocabulary:
    """The tokens of a tokenizer and their bytes; `vocab` is the size of the model's logits, often more than these."""

    def __init__(self, tokenizer: Any, vocab: int):
        self.tokenizer, self.vocab = tokenizer, vocab
        self.roles = {role: i for role in ROLES if isinstance(i := getattr(tokenizer, f"{role}_token_id", None), int)}
        self.specials = {i: name for i, name in self._specials().items() if i < vocab}
        self.spelled = self._spell()  # None: the token is not text

    def bytes_of(self, token: int) -> bytes | None:
        return self.spelled[token] if token < len(self.spelled) else None

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens, and drop tokens that the model does not have."""
        return [i for i in self.tokenizer.encode(text, add_special_tokens=False) if i < self.vocab] if text else []

    def segment(self, data: bytes) -> list[int] | None:
        """Tokens that spell exactly these bytes, the longest match first; None if there are none."""
        tokens, at = [], 0
        while at < len(data):
            end = min(len(data), at + self._longest)
            while end > at and data[at:end] not in self.ids:
                end -= 1
            if end == at:
                return None
            tokens.append(self.ids[data[at:end]])
            at = end
        return tokens

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The token for each byte string; a byte token only where no other token spells it."""
        plain = [(i, piece) for i, piece in enumerate(self.spelled) if piece and i not in self._bytes]
        spare = [(i, piece) for i, piece in enumerate(self.spelled) if piece and i in self._bytes]
        found: dict[bytes, int] = {}
        for i, piece in plain + spare:
            found.setdefault(piece, i)
        return found

    @cached_property
    def prefix_space(self) -> bool:
        """Whether the tokenizer puts a space before every text (as SentencePiece does)."""
        return join(map(self.bytes_of, self.encode("cat"))) == b" cat"

    @cached_property
    def start(self) -> list[int]:
        """The special tokens that the tokenizer puts before every text."""
        alone, whole = self.encode("cat"), self.tokenizer.encode("cat")
        at = next((i for i in range(len(whole)) if alone and whole[i : i + len(alone)] == alone), 0)
        return [i for i in whole[:at] if i < self.vocab]

    @cached_property
    def filler(self) -> int:
        """A token to begin with when there is no other."""
        return next((i for role in ("bos", "eos") if (i := self.roles.get(role, self.vocab)) < self.vocab), 0)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids), default=0)

    def _specials(self) -> dict[int, str]:
        """The tokens that are not text, with their names: added tokens marked as special, and tokens with a role."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        named = {i: token.content for i, token in added.items() if token.special}
        ids = [*getattr(self.tokenizer, "all_special_ids", ()), *self.roles.values()]
        others = [i for i in dict.fromkeys(ids) if i not in named]
        return named | dict(zip(others, map(str, self._names(others)), strict=True))

    def _names(self, ids: list[int]) -> list[Any]:
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        return [None] * len(ids) if convert is None else list(convert(ids))

    def _spell(self) -> list[bytes | None]:
        vocabulary = self.tokenizer.get_vocab() if hasattr(self.tokenizer, "get_vocab") else {}
        size = min(self.vocab, 1 + max(vocabulary.values(), default=len(self.tokenizer) - 1))
        names = self._names(list(range(size)))
        spellings: list[Spelling] = [_byte_level, _marked, self._decoded]
        probes = [(probe.encode(), self.encode(probe)) for probe in PROBES]
        best: list[bytes | None] = []
        most = (-1, 0)  # probes that are spelled correctly, tokens that have a spelling
        for spell in spellings:
            found = spell(names)
            right = sum(join(found[i] for i in ids) in (data, b" " + data) for data, ids in probes)
            score = right, len(found) - found.count(None)
            if score > most:
                best, most = found, score
            if right == len(PROBES):
                break
        for i, token in getattr(self.tokenizer, "added_tokens_decoder", {}).items():
            if i < size and not token.special:
                best[i] = token.content.encode()
        for i in self.specials:
            if i < size:
                best[i] = None
        return best

    @cached_property
    def _bytes(self) -> set[int]:
        names = self._names(list(range(len(self.spelled))))
        return {i for i, name in enumerate(names) if isinstance(name, str) and BYTE_TOKEN.fullmatch(name)}

    def _decoded(self, names: list[Any]) -> list[bytes | None]:
        """The text that a token adds to another one: works for every tokenizer, except for parts of a character."""
        anchor = self.encode("cat")[-1:]
        before = self.tokenizer.decode(anchor)

        def spelled(token: int) -> bytes | None:
            text = self.tokenizer.decode([*anchor, token])
            whole = text.startswith(before) and BROKEN not in text
            return text[len(before) :].encode() if whole else None

        return [spelled(i) for i in range(len(names))]


def join(pieces: Iterable[bytes | None]) -> bytes | None:
    """The bytes of several tokens; None if one of them is not text."""
    found = list(pieces)
    return None if None in found else b"".join(piece for piece in found if piece is not None)


def complete(data: bytes) -> tuple[str, bytes]:
    """The text of these bytes, and the bytes of an incomplete last character; invalid bytes are replaced by a mark."""
    for cut in range(1, min(4, len(data) + 1)):
        lead = data[-cut]
        if lead & 0xC0 != 0x80:  # the first byte of a character
            length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            if length > cut:
                return data[:-cut].decode(errors="replace"), data[-cut:]
            break
    return data.decode(errors="replace"), b""


def _alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies: other bytes are moved above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


ALPHABET = _alphabet()


def _byte_level(names: list[Any]) -> list[bytes | None]:
    """Read names in GPT-2's alphabet, which most byte-level vocabularies use; some tokenizers use bytes as names."""

    def spelled(name: Any) -> bytes | None:
        if isinstance(name, bytes):
            return name
        known = isinstance(name, str) and all(character in ALPHABET for character in name)
        return bytes(ALPHABET[character] for character in name) if known else None

    return [spelled(name) for name in names]


def _marked(names: list[Any]) -> list[bytes | None]:
    """Read names of SentencePiece: a mark for a space, and tokens for single bytes."""

    def spelled(name: Any) -> bytes | None:
        if not isinstance(name, str):
            return None
        byte = BYTE_TOKEN.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()

    return [spelled(name) for name in names]
