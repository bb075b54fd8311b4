"""CachedTokenizer: a saved Transformers tokenizer, used without importing Transformers, which takes half a second.

For anything that it does not implement, it loads and calls the complete tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class CachedTokenizer:
    """A fast tokenizer in a folder that `save_pretrained` wrote."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self._config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = folder / "chat_template.jinja"
        self.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
        self.special_tokens_map = {name: text for name in SPECIAL if isinstance(text := self._config.get(name), str)}

    @classmethod
    def fits(cls, folder: Path) -> bool:
        """Return whether the backend's decoding is all that is needed, with no clean-up of spaces after it."""
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return not config.get("clean_up_tokenization_spaces")

    @cached_property
    def whole(self) -> Any:
        """The tokenizer as Transformers loads it."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self._folder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self._backend.token_to_id(text)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, chat: list[Mapping[str, Any]], tokenize: bool = True, **given: Any) -> Any:
        text = None
        if given.keys() <= {"add_generation_prompt"}:
            text = render(self.chat_template or "", chat, self.special_tokens_map | given)
        if text is None:
            text = self.whole.apply_chat_template(chat, tokenize=False, **given)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def render(template: str, chat: list[Mapping[str, Any]], given: dict[str, Any]) -> str | None:
    """Render a chat as text, in a sandbox with fewer features than Transformers' own.

    Return None if the template needs more features or refuses the chat. Transformers then renders it, or reports what
    is wrong.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.globals = {"range": range, "raise_exception": refuse, "strftime_now": datetime.now().strftime}
    sandbox.filters["tojson"] = to_json
    try:
        return sandbox.from_string(template).render(messages=chat, tools=None, documents=None, **given)
    except (TemplateError, TypeError, ValueError):
        return None
