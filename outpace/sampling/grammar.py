"""Grammar: constrains the output to a JSON schema, a regular expression or a Lark grammar, with llguidance.

A grammar is a processor like any other. The state of its parser is only a cache: it moves back or forward to the prefix
of each call, so the nodes of a tree can be processed in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.errors import RequestFailed, UsageError
from outpace.sampling.edits import Array, Edit, EditKind
from outpace.sampling.sampler import LogitEdit

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Reuse it, because the first grammar indexes the whole vocabulary.

    `vocab` is the size of the model's logits, often larger than the tokenizer. `stops` are the tokens that may end a
    complete output, by default the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, stops: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.stops = tuple(stops)

    def compile(
        self,
        *,
        json_schema: dict[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        start: int,
    ) -> Grammar:
        """Compile the grammar of an output whose first token has index `start`, from exactly one source."""
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        names = [name for name, source in given.items() if source is not None]
        if len(names) != 1:
            raise UsageError(
                f"a grammar needs exactly one of json_schema, regex and grammar, got {' and '.join(names) or 'none'}"
            )
        index, source = self._index, _source(names[0], given[names[0]])
        from llguidance import LLMatcher

        matcher = LLMatcher(index, source, log_level=0)
        if matcher.is_error():
            raise UsageError(f"{names[0]} is not valid: {_message(matcher)}")
        return Grammar(matcher, index.eos_tokens, start)

    def term(self, text: str) -> str:
        """Return a text as a term of a Lark grammar; llguidance takes some tokens for no text, and knows them by id."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) == 1 and self._index.is_special_token(tokens[0]):
            return f"<[{tokens[0]}]>"
        return json.dumps(text)

    @cached_property
    def _index(self) -> LLTokenizer:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as missing:
            raise UsageError("grammars need llguidance: pip install 'outpace[grammar]'") from missing
        from transformers import PreTrainedTokenizerFast

        tokenizer = getattr(self.tokenizer, "whole", self.tokenizer)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UsageError(f"grammars need a fast tokenizer, but {type(tokenizer).__name__} is not one")
        size = max(self.vocab, len(self.tokenizer))  # some models have fewer logits than their tokenizer has tokens
        try:
            return from_tokenizer(tokenizer, n_vocab=size, eos_token=list(self.stops) or None)
        except ValueError as wrong:
            raise UsageError(f"llguidance cannot use this tokenizer: {wrong}") from wrong


class Grammar(LogitEdit):
    """Masks the tokens that would violate the grammar; once the output is complete, only stop tokens are left.

    Only stop tokens are also allowed after a prefix that already violates the grammar (in a rejected branch of a tree).
    Such a node is never reached, but it still needs a valid distribution.
    """

    def __init__(self, matcher: LLMatcher, stops: Sequence[int], start: int):
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._stops = frozenset(stops)
        self._start = start

    def edit(self, prefix: list[int]) -> Edit:
        if not self._sync(prefix[self._start :]):
            return Edit(EditKind.KEEP, self._only_stops)
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return Edit(EditKind.KEEP, allowed)

    @cached_property
    def _only_stops(self) -> Array:
        bits = np.zeros(max(self._stops, default=0) + 1, dtype=bool)
        bits[[*self._stops]] = True
        return np.packbits(bits, bitorder="little")

    def _sync(self, output: list[int]) -> bool:
        """Move the matcher to the end of `output`; return False if `output` violates the grammar."""
        shared = _shared(self._consumed, output)
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
        # Not `consume_tokens`: it breaks the matcher at a wrong token, and miscounts a stop token after the end.
        taken = self._matcher.try_consume_tokens(output[shared:]) if shared < len(output) else 0
        self._consumed = output[: shared + taken]
        self._check()
        return len(self._consumed) == len(output)

    def _check(self) -> None:
        """Fail the request if llguidance gave up, and reset the matcher so that it still works for other prefixes."""
        if self._matcher.is_error():
            message, self._matcher, self._consumed = _message(self._matcher), self._fresh.deep_copy(), []
            raise RequestFailed(f"the grammar cannot be followed: {message}")


def _source(kind: str, source: Any) -> str:
    """Return the grammar in the format of llguidance, which validates most of it only on compilation."""
    from llguidance import LLMatcher

    try:
        if kind == "json_schema":
            schema = json.loads(source) if isinstance(source, str) else source
            return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        return str(LLMatcher.grammar_from_regex(source) if kind == "regex" else LLMatcher.grammar_from_lark(source))
    except (TypeError, ValueError) as wrong:
        raise UsageError(f"{kind} is not valid: {wrong}") from wrong


def _message(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).partition("\n<state>")[0].strip()  # drop the parser state that follows


def _shared(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case, at the speed of C
        return length
    return next(i for i in range(length) if a[i] != b[i])
