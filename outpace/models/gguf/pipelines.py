"""Tokenizer pipelines of known models, for GGUF files that do not state theirs or where Transformers ignores it."""

from __future__ import annotations

from typing import Any

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# SmolLM's tokenizer.json without vocabulary, merges and special tokens. Transformers' GGUF reader ignores the file's
# `tokenizer.ggml.pre`, so it does not split off digits first, and "\n\n1" gets other ids than in the model's training.
SMOLLM_PIPELINE: dict[str, Any] = {
    "normalizer": None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "post_processor": None,
    "decoder": BYTE_LEVEL | {"add_prefix_space": True},
    "model": dict.fromkeys(["unk_token", "continuing_subword_prefix", "end_of_word_suffix"])
    | {"fuse_unk": False, "byte_fallback": False},
}
PIPELINES = {"smollm": SMOLLM_PIPELINE}  # by the file's `tokenizer.ggml.pre`
