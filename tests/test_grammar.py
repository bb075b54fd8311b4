"""Grammars: what they let through, in any order of asking, and what they say when they are wrong."""

from __future__ import annotations

import builtins
import json
import random
import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outpace.core.lm import Logits, Scores
from outpace.core.sequence import Limits, Sequence
from outpace.core.tree import Tree
from outpace.core.verifier import Match, Verifier
from outpace.errors import RequestFailed, UsageError
from outpace.sampling.grammar import Grammar, GrammarCompiler
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.verifiers.residual import Residual

pytest.importorskip("llguidance")

PROMPT = [40, 41, 42]  # any tokens: a grammar does not read what comes before its start
EXTRA = 37  # ids that the logits have and the tokenizer does not
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPACT = PERSON | {"x-guidance": {"whitespace_flexible": False}}  # random logits would pad with blanks for ever


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    text = [json.dumps({"name": "Ann", "age": 31, "tags": ["red", "blue"]}), "the red green sea of 2024 and 1999"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(text * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


@pytest.fixture(scope="module")
def vocab(tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer) + EXTRA


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast, vocab: int) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab, stops=(0, 1))


def allowed(grammar: Grammar, output: list[int], vocab: int) -> list[int]:
    """Tokens that may follow `output`; what they keep must be their logit."""
    logits = torch.arange(vocab, dtype=torch.float32)
    masked = grammar(PROMPT + output, logits)
    tokens = torch.nonzero(masked > -torch.inf).flatten()
    assert torch.equal(masked[tokens], logits[tokens])
    return tokens.tolist()


def generate(grammar: Grammar, vocab: int, seed: int, most: int = 200) -> tuple[list[int], bool]:
    """Random output under the grammar, and whether it came to its end."""
    sampler = Sampler(Sampling(temperature=1, seed=seed), [grammar])
    noise = torch.Generator().manual_seed(seed)
    tokens = list(PROMPT)
    while len(tokens) < most:
        token = sampler.choose(3 * torch.randn(vocab, generator=noise), tokens)
        if token in (0, 1):
            return tokens[len(PROMPT) :], True
        tokens.append(token)
    return tokens[len(PROMPT) :], False


def test_json_schema(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    done = 0
    for seed in range(40):
        source = COMPACT if seed % 2 else json.dumps(PERSON)
        output, finished = generate(compiler.compile(json_schema=source, start=len(PROMPT)), vocab, seed)
        if finished:
            value = json.loads(tokenizer.decode(output))
            assert set(value) - {"tags"} == {"name", "age"}
            assert isinstance(value["name"], str) and len(value["name"]) <= 8
            assert isinstance(value["age"], int) and 0 <= value["age"] <= 130
            assert set(value.get("tags", [])) <= {"red", "green", "blue"}
            done += 1
    assert done >= 20


@pytest.mark.parametrize("pattern", [r"(red|green)+", r"[0-9]{4}-[0-9]{2}", r"a{0,5}(the | sea)\.", r"é+ü?"])
def test_regex_full_match(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int, pattern: str
) -> None:
    done = 0
    for seed in range(20):
        output, finished = generate(compiler.compile(regex=pattern, start=len(PROMPT)), vocab, seed)
        if finished:
            assert re.fullmatch(pattern, tokenizer.decode(output))
            done += 1
    assert done >= 10


def test_lark(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    lark = 'start: "(" start ")" | "x"'
    for seed in range(10):
        output, finished = generate(compiler.compile(grammar=lark, start=len(PROMPT)), vocab, seed)
        if finished:
            text = tokenizer.decode(output)
            assert re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")


def test_any_order_gives_what_a_fresh_grammar_gives(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int
) -> None:
    """Nodes of a tree: prefixes of valid outputs, with stops after them, and branches that leave the grammar."""
    pick = random.Random(0)
    sources: list[dict[str, Any]] = [{"json_schema": COMPACT}, {"regex": "(red|green){1,3}"}]
    for source in sources:
        make = partial(compiler.compile, **source, start=len(PROMPT))
        nodes: list[list[int]] = []
        for seed in range(4):
            output, _ = generate(make(), vocab, seed, most=40)
            nodes += [output[:n] for n in range(len(output) + 1)]
            nodes += [[*output, 1], [*output, 0, 0], output[:2] + [pick.randrange(2, len(tokenizer))] * 3]
        nodes = [pick.choice(nodes) for _ in range(150)]
        one = make()
        for node in nodes:
            assert allowed(one, node, vocab) == allowed(make(), node, vocab), node


def test_complete_output_may_only_stop(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int
) -> None:
    grammar = compiler.compile(regex="red", start=len(PROMPT))
    red = tokenizer.encode("red")
    assert 0 not in allowed(grammar, [], vocab)
    assert allowed(grammar, red, vocab) == [0, 1]
    assert allowed(grammar, [*red, 1], vocab) == [0, 1]
    assert allowed(grammar, red[:0], vocab) == allowed(compiler.compile(regex="red", start=len(PROMPT)), [], vocab)
    longer = compiler.compile(regex="(red)+", start=len(PROMPT))
    assert {0, 1, red[0]} <= set(allowed(longer, red, vocab))


def test_default_stop_is_the_tokenizers(tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    grammar = GrammarCompiler(tokenizer, vocab).compile(regex="red", start=0)
    assert allowed(grammar, [], vocab) == [tokenizer.eos_token_id]  # the prompt counts here, and left the grammar
    masked = grammar(tokenizer.encode("red"), torch.zeros(vocab))
    assert torch.nonzero(masked == 0).flatten().tolist() == [tokenizer.eos_token_id]


def test_extra_ids_are_masked(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    everything = compiler.compile(regex=r"(.|\n)*", start=len(PROMPT))
    tokens = allowed(everything, [], vocab)
    assert len(tokens) > 200 and max(tokens) < len(tokenizer)
    assert max(allowed(everything, [], vocab + 500)) < len(tokenizer)  # logits larger than was said
    assert allowed(everything, [], 128) == [t for t in tokens if t < 128]  # and smaller


def test_input_is_not_changed(compiler: GrammarCompiler, vocab: int) -> None:
    logits, prefix = torch.randn(vocab, dtype=torch.float64), list(PROMPT)
    before = logits.clone()
    masked = compiler.compile(regex="a", start=len(PROMPT))(prefix, logits)
    assert torch.equal(logits, before) and prefix == PROMPT and masked.dtype == logits.dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_gpu(compiler: GrammarCompiler, vocab: int) -> None:
    grammar, logits = compiler.compile(regex="[0-9]+", start=len(PROMPT)), torch.randn(vocab)
    for output in ([], [1], [2, 3, 4]):
        there: Tensor = grammar(PROMPT + output, logits.cuda())
        assert there.is_cuda and torch.equal(there.cpu(), grammar(PROMPT + output, logits))


@pytest.mark.parametrize("verifier", [Match(), Residual()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_leave_the_grammar(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int, verifier: Verifier, temperature: float
) -> None:
    """A drafter that knows nothing of the grammar can neither break the output nor fail the request."""
    pick, nobody = random.Random(0), cast(Any, None)
    pattern = "(red|green|blue){2}"
    for seed in range(10):
        grammar, noise = compiler.compile(regex=pattern, start=len(PROMPT)), torch.Generator().manual_seed(seed)
        sampler = Sampler(Sampling(temperature, seed=seed), [grammar])
        limits = Limits(max_tokens=40, stop_token_ids=frozenset([0, 1]))
        seq = Sequence(list(PROMPT), limits, sampler, nobody, verifier, nobody)
        while not seq.finished:
            tree = Tree([seq.tokens[-1]])
            for token in tokenizer.encode(pick.choice(["red", "green", "blue"])):
                tree.add(len(tree) - 1, token)
            for _ in range(6):
                tree.add(pick.randrange(len(tree)), pick.randrange(len(tokenizer)))
            seq.stats.add(verifier.verify(seq, tree, Scores(Logits(torch.randn(len(tree), vocab, generator=noise)))))
        assert seq.finish_reason == "stop" and re.fullmatch(pattern, tokenizer.decode(seq.generated[:-1]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"json_schema": {"type": "wrong"}}, "json_schema is not valid.*wrong"),
        ({"json_schema": "{not json"}, "json_schema is not valid"),
        ({"json_schema": {"type": {1, 2}}}, "json_schema is not valid"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "greater than maximum"),
        ({"regex": 5}, "regex is not valid"),
        ({"regex": "[ab"}, "regex is not valid.*unclosed"),
        ({"grammar": "start: foo"}, "grammar is not valid.*foo"),
        ({}, "one of json_schema, regex and grammar, got none"),
        ({"regex": "a", "grammar": 'start: "a"'}, "got regex and grammar"),
    ],
)
def test_wrong_grammars(compiler: GrammarCompiler, source: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.compile(message, re.DOTALL)):
        compiler.compile(**source, start=0)


def test_wrong_tokenizer(tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    with pytest.raises(UsageError, match="fast tokenizer, but object"):
        GrammarCompiler(object(), vocab).compile(regex="a", start=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="5000"):
        GrammarCompiler(tokenizer, vocab, stops=[5000]).compile(regex="a", start=0)


def test_without_llguidance(tokenizer: PreTrainedTokenizerFast, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UsageError, match=r"pip install 'outpace\[grammar\]'"):
        GrammarCompiler(tokenizer, vocab).compile(regex="a", start=0)


def test_limits_fail_the_request_and_leave_the_grammar_usable(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, vocab: int
) -> None:
    from llguidance import LLMatcher, LLParserLimits

    # Ambiguous on purpose: the number of parses, and of items in a row, grows with the output.
    lark = 'start: "" | a b c\na: "x" | a a\nb: "x" | b b\nc: "x" | c c'
    matcher = LLMatcher(compiler._index, lark, log_level=0, limits=LLParserLimits(max_items_in_row=14))
    assert not matcher.is_error()
    grammar, x = Grammar(matcher, (0, 1), len(PROMPT)), tokenizer.encode("x")
    first = allowed(grammar, [], vocab)
    with pytest.raises(RequestFailed, match="the grammar cannot be followed"):
        allowed(grammar, x * 30, vocab)
    assert allowed(grammar, [], vocab) == first
