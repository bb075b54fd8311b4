"""The tokenizer that is used without Transformers says what Transformers says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import outpace
from outpace.api.model import Model
from outpace.models.gguf.tokenizer_cache import CachedTokenizer, render
from tests.conftest import SMOLLM2
from tests.test_gguf import PROBES

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße <|im_end|> 你好"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": " c "}],
]
TEMPLATES = {
    "plain": "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "prompt": "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks": "{% if messages %}\n  {{ messages | length }}\n{% endif %}\n",
    "date": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{{ messages[0].content }}",
    "tools": "{% if tools %}tools{% else %}none{% endif %}{% if tools is defined %}!{% endif %}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.fixture(scope="module")
def whole(smollm2: Model) -> Any:
    return smollm2.tokenizer


@pytest.fixture
def folder(whole: Any, tmp_path: Path) -> Path:
    whole.save_pretrained(tmp_path)
    return tmp_path


def test_it_splits_and_spells_alike(whole: Any, folder: Path) -> None:
    kept = CachedTokenizer(folder)
    assert CachedTokenizer.fits(folder) and len(kept) == len(whole) and kept.eos_token_id == whole.eos_token_id
    assert kept.get_vocab() == whole.get_vocab() and kept.special_tokens_map.items() <= whole.special_tokens_map.items()
    for text in (*PROBES, "", "<|im_start|>user\n12<|im_end|>"):
        ids = kept.encode(text)
        assert ids == whole.encode(text) and kept.encode(text, False) == whole.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert kept.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [False, True])
def test_it_spells_chats_alike(name: str, prompted: bool, whole: Any, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    kept, theirs = CachedTokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for chat in CHATS:
        given = {"add_generation_prompt": prompted}
        assert kept.apply_chat_template(chat, tokenize=False, **given) == theirs.apply_chat_template(
            chat, tokenize=False, **given
        )
        ids = theirs.apply_chat_template(chat, tokenize=True, **given)
        assert kept.apply_chat_template(chat, **given) == list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def test_what_a_template_refuses_is_said_as_transformers_says_it(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Exception, match="roles must alternate"):
        CachedTokenizer(folder).apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ range.__class__.__base__.__subclasses__() }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_templates_stay_in_their_sandbox(attack: str) -> None:
    assert render(attack, CHATS[0], {}) in (None, "")


def test_the_rest_is_asked_of_the_whole_tokenizer(whole: Any, folder: Path) -> None:
    kept = CachedTokenizer(folder)
    assert kept.all_special_ids == whole.all_special_ids
    assert kept.convert_ids_to_tokens([5]) == whole.convert_ids_to_tokens([5])
    with pytest.raises(AttributeError):
        _ = kept.no_such_thing


def test_a_grammar_takes_it(smollm2_gguf: Model) -> None:
    again = outpace.load(f"{SMOLLM2}.gguf")
    assert isinstance(again.tokenizer, CachedTokenizer)
    assert again.generate("A number:", regex="[0-9]{3}", max_tokens=8).text.strip().isdigit()


def test_a_gguf_answer_needs_no_transformers(smollm2_gguf: Model) -> None:
    program = f"""
import sys, outpace
model = outpace.load("{SMOLLM2}.gguf")
assert model.generate([{{"role": "user", "content": "Hi"}}], max_tokens=4).tokens
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
