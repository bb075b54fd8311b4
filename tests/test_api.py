"""The API as a user meets it: prompts of any kind, settings by name, errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import outpace
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.lm import LM
from outpace.errors import UsageError
from outpace.testing import ByteTokenizer, ToyLM
from tests.conftest import settings_of


def test_wrong_names_suggest_the_nearest(toy: Model) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "did you mean 'suffix'": {"method": "sufix"},
        "did you mean 'temperature'": {"temprature": 1.0},
        "did you mean 'max_n'": {"method": "ngram", "maxn": 3},
        "did you mean 'confidence'": {"policy": "confidance"},
        "did you mean 'residual'": {"verifier": "residul"},
        "did you mean 'threshold'": {"policy": "confidence:treshold=0.3"},
        "needs draft": {"method": "draft"},
        r"draft=outpace.load\(.small.\)": {"method": "draft", "draft": "small"},
        "max_tokens and n": {"max_tokens": 0},
        "temperature=-1": {"temperature": -1.0},
        "top_p=0": {"top_p": 0.0},
        "min_n <= max_n": {"method": "ngram", "max_n": 0},
        "not in the vocabulary": {"logit_bias": {9999: 1.0}},
        "stop strings need a tokenizer": {"stop": "x"},
    }
    for message, given in wrong.items():
        with pytest.raises(UsageError, match=message):
            toy.generate([1, 2], **given)


@pytest.mark.parametrize("prompt", [[], "", [[]], [999], 5, [{"role": "user", "content": "hi"}], [1.5]])
def test_wrong_prompts(prompt: Any, toy: Model) -> None:
    with pytest.raises(UsageError):
        toy.generate(prompt)


def test_ids_as_tensors_and_arrays(toy: Model) -> None:
    want = toy.generate([1, 2, 3], max_tokens=5).tokens
    ids = torch.tensor([1, 2, 3])
    for prompt in (ids, ids.numpy(), list(ids.numpy())):
        assert toy.generate(prompt, max_tokens=5).tokens == want
    assert [c.tokens for c in toy.generate(torch.stack([ids, ids]), max_tokens=5)] == [want, want]


def test_nothing_runs_when_one_request_is_wrong(toy: Model) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        toy.generate([[1, 2], [3, 999]])
    assert not any(row.busy for row in toy.lm.slots)  # type: ignore[attr-defined]


def test_a_request_carries_its_own_settings(toy: Model) -> None:
    requests = [
        Request.from_keywords([1, 2], {"max_tokens": 3}),
        Request.from_keywords([1, 2], {"max_tokens": 6, "method": "ngram"}),
    ]
    short, long = toy.generate(requests)
    assert long.tokens[:3] == short.tokens
    with pytest.raises(UsageError, match="set max_tokens in the Request"):
        toy.generate(requests[0], max_tokens=4)


def test_draft_of_another_vocabulary() -> None:
    class Other(ByteTokenizer):
        def __len__(self) -> int:
            return 300

    target = Model(ToyLM(vocab=257), ByteTokenizer(), name="big")
    draft = Model(ToyLM(vocab=300), Other(), name="small")
    plain = target.generate("abc", method="plain", max_tokens=20).tokens
    assert target.generate("abc", method="draft", draft=draft, max_tokens=20).tokens == plain


def test_draft_with_a_padded_vocabulary(toy: Model) -> None:
    """Models of one family pad the same vocabulary to different sizes."""
    for vocab in (60, 70):
        given = {"draft": ToyLM(layers=1, vocab=vocab), "max_tokens": 20, "temperature": 1.0, "repetition_penalty": 1.2}
        plain = toy.generate([1, 2, 3], method="plain", **{k: v for k, v in given.items() if k != "draft"})
        assert toy.generate([1, 2, 3], method="draft", **given).tokens == plain.tokens


def test_auto_asks_the_draft_if_there_is_one() -> None:
    class Asked(ToyLM):
        times = 0

        def forward(self, jobs: Any, taps: Any) -> Any:
            self.times += 1
            return super().forward(jobs, taps)

    model, draft = Model(ToyLM()), Asked(layers=1)  # a model of its own: nothing is known yet, so it is tried
    assert model.generate([1, 2], draft=draft, max_tokens=4).method == "auto" and draft.times > 0
    assert model.generate([1, 2], max_tokens=4).method == "auto"
    with pytest.raises(UsageError, match="did you mean 'candidates'"):
        model.generate([1, 2], candidate="suffix")


def test_a_method_object_and_what_it_learned(toy: Model) -> None:
    from outpace.methods.suffix import Suffix

    method = Suffix(depth=8)
    first = toy.generate([1, 2, 3], method=method, max_tokens=30)
    second = toy.generate([1, 2, 3], method=method, max_tokens=30)
    assert second.tokens == first.tokens
    assert second.stats.tokens_per_pass > 2 > first.stats.tokens_per_pass  # it remembers its own answer
    for _ in range(2):  # by name too: the model keeps its methods
        named = toy.generate([4, 5, 6], method="suffix", max_tokens=30)
    assert named.stats.tokens_per_pass > 2


def test_stream_pieces_are_the_text() -> None:
    model = Model(ToyLM(vocab=257), ByteTokenizer())
    done = model.generate("hello", method="recycling", max_tokens=40)
    pieces = list(model.stream("hello", method="recycling", max_tokens=40))
    assert "".join(p.text for p in pieces) == done.text
    assert [t for p in pieces for t in p.tokens] == done.tokens
    assert all("".join(text for text, _ in p.spans) == p.text for p in pieces)
    assert pieces[-1].completion == done or pieces[-1].completion.tokens == done.tokens
    assert any(drafted for p in pieces for _, drafted in p.spans)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4, pad_token_id=0, eos_token_id=7,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


class StopAfter(StoppingCriteria):
    """Stops each row right after the token 54."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        return input_ids[:, -1] == 54  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["plain", "ngram", "recycling", "suffix", "lookahead", "draft"])
def test_custom_generate_returns_what_generate_returns(name: str, llama: LlamaForCausalLM, toy_draft: LM) -> None:
    ids = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 30, "do_sample": False}
    draft = outpace.wrap(llama).lm.layers.slice([0])  # type: ignore[attr-defined]
    ours = outpace.custom_generate(**settings_of(name, draft))
    for extra in ({}, {"repetition_penalty": 1.3}, {"stopping_criteria": StoppingCriteriaList([StopAfter()])}):
        want = llama.generate(**inputs, **extra)
        assert torch.equal(llama.generate(**inputs, **extra, custom_generate=ours), want)
    want = llama.generate(**inputs, return_dict_in_generate=True)
    assert torch.equal(
        llama.generate(**inputs, return_dict_in_generate=True, custom_generate=ours).sequences, want.sequences
    )


def test_custom_generate_samples_by_torch_seed(llama: LlamaForCausalLM) -> None:
    def run(method: str, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        given = {"max_new_tokens": 20, "do_sample": True, "top_k": 20, "num_return_sequences": 2}
        return llama.generate(torch.tensor([[3, 4, 5]]), **given, custom_generate=outpace.custom_generate(method))

    assert torch.equal(run("plain", 1), run("recycling", 1))
    assert run("plain", 1).tolist() != run("plain", 2).tolist()
    assert not torch.equal(run("plain", 1)[0], run("plain", 1)[1])


def test_custom_generate_refuses_what_it_cannot_do(llama: LlamaForCausalLM) -> None:
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(UsageError, match="num_beams=1"):
        llama.generate(ids, max_new_tokens=4, num_beams=2, custom_generate=outpace.custom_generate("ngram"))
    with pytest.raises(UsageError, match="output_scores"):
        config = {"max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
        llama.generate(ids, **config, custom_generate=outpace.custom_generate("ngram"))
    with pytest.raises(UsageError, match="unknown method"):
        outpace.custom_generate("nothing")


def test_prompt_kinds_of_a_real_model(smollm2: Model) -> None:
    message = [{"role": "user", "content": "What is two plus two?"}]
    tokenizer: Any = smollm2.tokenizer
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    given = {"method": "ngram", "max_tokens": 12}
    chat, raw, ids = smollm2.generate([message, text, tokenizer.encode(text)], **given)
    assert chat.tokens == raw.tokens == ids.tokens
    assert chat.text == tokenizer.decode(chat.tokens, skip_special_tokens=True)


def test_stop_string_of_a_real_model(smollm2: Model) -> None:
    message = [{"role": "user", "content": "Count from one to ten in words."}]
    whole = smollm2.generate(message, method="plain", max_tokens=40)
    stop = whole.text[len(whole.text) // 2 :][:7]
    plain = smollm2.generate(message, method="plain", max_tokens=40, stop=stop)
    assert plain.text == whole.text[: whole.text.index(stop)]
    assert plain.finish_reason == "stop"
    for name in ("ngram", "recycling", "lookahead"):
        drafted = smollm2.generate(message, method=name, max_tokens=40, stop=[stop, "never"])
        assert (drafted.text, drafted.tokens) == (plain.text, plain.tokens)
