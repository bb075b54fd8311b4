"""The tokenizer of a GGUF file: Transformers' if it splits text as llama.cpp does, otherwise llama.cpp's own."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outpace.models.gguf.pipelines import PIPELINES
from outpace.models.gguf.runtime import File, identity
from outpace.models.gguf.tokenizer_cache import CachedTokenizer
from outpace.storage.files import cache_dir

logger = logging.getLogger(__name__)
PROBES = (
    "Hello, world! It's 2024: 12345 tokens.\n\n1. first\n\tcode = x[0]  # why?\r\n",
    "Grüße, naïve café — 你好，世界 😀 и привет",
    "   def f(a,b):\n        return a+b   \n\n\n",
)


def tokenizer(file: File) -> Any:
    """Return the file's tokenizer, or None for a file without one, which llama.cpp would end the process over.

    Grammars and drafts with another vocabulary need Transformers' tokenizer; everything else works with either.
    """
    if file.metadata("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    theirs = LlamaTokenizer(file)
    cached = _cached(file)
    if cached is not None and _same_ids(cached, theirs):
        return cached
    try:
        ours = _transformers(file)
    except Exception as error:  # an architecture or a vocabulary that its reader does not know
        logger.info("using llama.cpp's own tokenizer: Transformers cannot read one from the file (%s)", error)
        return theirs
    if not _same_ids(ours, theirs):
        logger.info("using llama.cpp's own tokenizer: the one that Transformers reads splits text differently")
        return theirs
    ours.chat_template = ours.chat_template or theirs.chat_template
    _save(ours, file)
    return ours


def _same_ids(ours: Any, theirs: LlamaTokenizer) -> bool:
    return all(ours.encode(text, add_special_tokens=False) == theirs.encode(text, False) for text in PROBES)


def _place(file: File) -> Path:
    """Return the folder that caches a tokenizer: reading one of 150,000 tokens from a GGUF file takes 15 s."""
    about = f"{identity(file.path)}, transformers {version('transformers')}"
    return cache_dir() / "tokenizers" / hashlib.sha256(about.encode()).hexdigest()[:16]


def _cached(file: File) -> Any:
    folder = _place(file)
    try:
        if not folder.is_dir():
            return None
        if CachedTokenizer.fits(folder):
            return CachedTokenizer(folder)
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # whatever is wrong with it, it can be read from the GGUF file again
        logger.info("the cached tokenizer of %s cannot be read (%s)", file.path.name, error)
        return None


def _save(ours: Any, file: File) -> None:
    folder = _place(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            ours.save_pretrained(f"{place}/new")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(f"{place}/new", folder)
    except OSError as error:
        logger.warning("could not cache the tokenizer of %s: %s", file.path.name, error)


def _transformers(file: File) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        found = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    finally:
        theirs.set_verbosity(level)
    pipeline = PIPELINES.get(file.metadata("tokenizer.ggml.pre") or "")
    return corrected(found, pipeline, _special(file)) if pipeline else found


def _special(file: File) -> dict[str, int | None]:
    """Return the ids of the special tokens that the file names."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    values = {kind: file.metadata(f"tokenizer.ggml.{name}_token_id") for kind, name in names.items()}
    return {kind: None if token is None else int(token) for kind, token in values.items()}


class LlamaTokenizer:
    """llama.cpp's tokenizer with the methods of a Transformers tokenizer that Outpace uses."""

    def __init__(self, file: File):
        self._file, self._vocab = file, file.tokens
        self.chat_template = file.metadata("tokenizer.chat_template")
        self.eos_token_id: int = self._vocab.token_eos()
        self._guard = self.encode("a", False)  # decoded in front, because llama.cpp drops leading spaces

    def __len__(self) -> int:
        return self._vocab.n_vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._vocab.tokenize(text, add_special_tokens, True)) if text else []

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        if skip_special_tokens:
            tokens = [token for token in tokens if not self._vocab.is_control(token)]
        return self._detokenize(self._guard + list(tokens)).removeprefix(self._detokenize(self._guard))

    def _detokenize(self, tokens: list[int]) -> str:
        return self._vocab.detokenize(tokens, remove_special=False, unparse_special=True)

    def apply_chat_template(
        self, chat: Any, add_generation_prompt: bool = False, tokenize: bool = True, **given: Any
    ) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {"bos_token": self._vocab.token_bos(), "eos_token": self._vocab.token_eos()}
        special = {name: self._vocab.get_text(token) if token >= 0 else "" for name, token in names.items()}
        (text,), _ = render_jinja_template(
            conversations=[chat],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def corrected(read: Any, pipeline: dict[str, Any], ids: dict[str, int | None], **given: Any) -> Any:
    """Rebuild a tokenizer that Transformers read from a GGUF file, with this pipeline and these special tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(read.backend_tokenizer.to_str())
    state |= pipeline | {"model": state["model"] | pipeline["model"]}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        **{kind: read.convert_ids_to_tokens(token) for kind, token in ids.items() if token is not None},
        **given,
    )
