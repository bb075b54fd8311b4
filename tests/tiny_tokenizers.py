"""Small tokenizers of every kind that a draft may have, trained on a few lines, and models that recite a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seq
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outpace.api import demo_weights
from outpace.api.model import Model
from outpace.cross_tokenizer.vocabulary import Vocabulary, join
from outpace.models.cacheless import CachelessLM
from outpace.models.segment import Segment, SegmentOutput
from outpace.testing import ToyLM
from tests.conftest import SMOLLM2

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all.",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
    "She said: “Où est la bibliothèque?” and walked on; the naïve café was closed.",
    "东京是日本的首都。東京は日本の首都です。 Привет, мир! 🙂🙂",
    "In 2024 there were 12,345 of them, that is 3.14 times as many as in 1999.",
] * 4
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


@cache
def smollm2() -> Any:
    """Byte-level BPE, of the demo model."""
    return AutoTokenizer.from_pretrained(demo_weights.fetch(SMOLLM2))


@cache
def sentencepiece() -> Any:
    """Llama 2's kind: a space before every text, a mark for spaces, tokens for bytes, a BOS."""
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = [line.replace(" ", " ▁").split() for line in CORPUS[:2]]
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=known, show_progress=False)
    made.train_from_iterator((word for line in words for word in line), trainer)
    # Only three of them are special: the trainer keeps the others as tokens of the vocabulary.
    spelled = made.to_str()
    return _wrapped(_only_special(spelled, known[:3]), bos_token="<s>", eos_token="</s>", unk_token="<unk>", bos=True)


@cache
def normalising() -> Any:
    """T5's kind: unigrams over text in lower case with single spaces; what it does not know is unknown."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([line.lower() for line in CORPUS if line.isascii()], trainer)
    return _wrapped(made.to_str(), pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@cache
def tiktoken() -> Any:
    """Qwen's and Llama 3's kind: bytes, a pattern of its own, a chat template, tokens that were added later."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    out = _wrapped(made.to_str(), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    out.chat_template = CHAT
    return out


@cache
def wordpiece() -> Any:
    """BERT's kind: words and their parts."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    made.train_from_iterator([line.lower() for line in CORPUS if line.isascii()], trainer)
    return _wrapped(made.to_str(), unk_token="[UNK]", pad_token="[PAD]")


def characters(text: str) -> Any:
    """A token for each character of a text, and none for bytes."""
    vocabulary = {"<unk>": 0} | {character: i + 1 for i, character in enumerate(sorted(set(text)))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return _wrapped(made.to_str(), unk_token="<unk>")


KINDS: dict[str, Callable[[], Any]] = {
    "smollm2": smollm2,
    "sentencepiece": sentencepiece,
    "normalising": normalising,
    "tiktoken": tiktoken,
    "wordpiece": wordpiece,
}
EXACT = ("smollm2", "sentencepiece", "tiktoken")  # those that spell every text as it is


def _wrapped(spelled: str, bos: bool = False, **names: str) -> Any:
    made = Tokenizer.from_str(spelled)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **names)


def _only_special(spelled: str, special: list[str]) -> str:
    data = json.loads(spelled)
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return json.dumps(data)


def random_model(kind: str, seed: int = 0, padding: int = 5, name: str = "") -> Model:
    """A model that says anything, parts of characters and ids that its tokenizer does not have among it."""
    tokenizer = KINDS[kind]()
    return Model(ToyLM(layers=1, seed=seed, vocab=len(tokenizer) + padding), tokenizer, name=name or kind)


class Reciter(CachelessLM):
    """Says a text by heart, in its tokenizer's own tokens, from wherever the text that it was given ends."""

    def __init__(self, tokenizer: Any, text: str, sure: float = 8.0):
        super().__init__()
        self.pieces, self.text, self.sure = Vocabulary(tokenizer, len(tokenizer)), text.encode(), sure
        self.whole = self.pieces.encode(text)
        self.vocab, self.max_length = len(tokenizer), 4096
        self.fed = 0  # tokens that passed through it

    def following(self, tokens: list[int]) -> int:
        said = [token for token in tokens if self.pieces.bytes_of(token) is not None]
        if said == self.whole[: len(said)] and len(said) < len(self.whole):
            return self.whole[len(said)]
        data = join(map(self.pieces.bytes_of, said)) or b""
        rest = self.text[len(data) - self.pieces.prefix_space :]
        return (self.pieces.segment(rest) or [self.pieces.roles.get("eos", 0)])[0]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(self.vocab, dtype=torch.float64).index_fill_(
            0, torch.tensor(self.following(tokens)), self.sure
        )

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        found = []
        for job in jobs:
            held = self.slots[job.slot].tokens + job.pending
            self.fed += len(job.tokens)
            assert job.layout is not None or job.pending
            logits = None
            if job.layout is not None:
                nodes = range(job.since, len(job.tree))
                paths = [[job.tree.tokens[n] for n in job.tree.path(node)] for node in nodes]
                logits = torch.stack([self.logits(held + path) for path in paths])
            found.append(SegmentOutput(logits, {}))
        return found

    def reference(self) -> Any:
        raise NotImplementedError


def reciting(kind: str | Any, text: str, **settings: Any) -> Model:
    tokenizer = KINDS[kind]() if isinstance(kind, str) else kind
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Model(Reciter(tokenizer, text, **settings), tokenizer, stops, name=str(kind))
