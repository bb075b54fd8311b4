"""Adapters: every architecture, on tiny random weights, against Transformers itself and against plain decoding."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel

import outpace
from outpace import Tree, UnsupportedModel, UsageError, registry
from outpace.models.adapt import adapt
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.snapshot import SnapshotLM
from tests.tiny_models import GROUPED, MODELS, NATIVE, PACKED, SHAPE, VOCAB, blurred, build

TREE = Tree([7, 8, 9, 10, 11, 12, 13], [-1, 0, 0, 1, 1, 2, 3])  # two branches, one of which branches again


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are too small to share, and the machine may be busy with other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def tiny(name: str) -> PreTrainedModel:
    return MODELS[name]()


@cache
def wrapped(name: str) -> outpace.Model:
    return outpace.wrap(tiny(name))


@cache
def drafting(name: str) -> outpace.Model:
    """A draft that is right about half of the time."""
    return outpace.wrap(blurred(tiny(name), 0.5))


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [text(21, 1), text(5, 2), text(90, 3)]  # around, below and far beyond the sliding windows


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def transformers_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:  # [tokens, vocab]
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def tokens(completions: list[outpace.Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to rounding; norms, rotations and recurrences run in float32 in a float64 model too."""
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


# Decoding


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_equals_transformers(name: str):
    model, ours = tiny(name), wrapped(name)
    assert isinstance(ours.lm, TransformersLM if name in PACKED else SnapshotLM)
    expected = [transformers_greedy(model, prompt, 40) for prompt in PROMPTS]
    assert len({token for found in expected for token in found}) >= 15  # text that repeats itself would prove little
    assert ours.generate(PROMPTS[0], method="plain", max_tokens=40).tokens == expected[0]
    assert tokens(ours.generate(PROMPTS, method="plain", max_tokens=40)) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_every_lossless_method_equals_plain_decoding(name: str, temperature: float):
    ours = wrapped(name)
    settings = dict(temperature=temperature, seed=5, max_tokens=16 if ours.lm.trees else 9)
    plain = tokens(ours.generate(PROMPTS, method="plain", **settings))
    for method in registry.methods():
        cls, kept = registry.find(method), registry.lossless_options(method)
        if kept is None:
            continue
        widths = [1, 3] if ours.lm.trees else [1]
        drafts = [dict(draft=drafting(name), depth=3, width=width) for width in widths]
        needed = "draft" in registry.required(cls)
        if not needed:
            drafts = [{}, *([dict(draft=drafting(name))] if "draft" in registry.options(cls) else [])]
            drafts = [{"head": "random"}] if "head" in registry.options(cls) else drafts
        for options in drafts:
            try:
                found = ours.generate(PROMPTS, method=method, **options, **kept, **settings)
            except UnsupportedModel:  # the only reasons for which a method may refuse a model
                assert ours.lm.layers is None or ("head" in options and ours.lm.embeddings is None)
                continue
            assert tokens(found) == plain, (method, options)
            if needed:
                drafted, accepted = (sum(getattr(c.stats, key) for c in found) for key in ("drafted", "accepted"))
                assert 0 < accepted < drafted  # else nothing was rolled back, or nothing kept


def test_models_draft_for_each_other():
    for target, draft in [("llama", "mamba2"), ("qwen3_5", "llama"), ("gpt2", "gemma2")]:
        plain = wrapped(target).generate(PROMPTS, method="plain", max_tokens=16)
        found = wrapped(target).generate(PROMPTS, method="draft", draft=wrapped(draft), depth=3, max_tokens=16)
        assert tokens(found) == tokens(plain)


@pytest.mark.parametrize("name", MODELS)
def test_known_prefixes_are_reused_and_change_nothing(name: str):
    def fresh(prompt: list[int], **settings) -> outpace.Completion:
        return outpace.wrap(tiny(name)).generate(prompt, max_tokens=8, **settings)

    ours = outpace.wrap(tiny(name))
    first = ours.generate(PROMPTS[0], method="recycling", max_tokens=8)
    turn = PROMPTS[0] + first.tokens + text(7, 4)
    again = turn[:30] + text(6, 5)  # a later turn was edited
    for prompt in (turn, again, again[:12]):
        expected = fresh(prompt, method="plain").tokens
        for method in ("plain", "recycling"):
            assert ours.generate(prompt, method=method, max_tokens=8).tokens == expected
    sampling = dict(n=3, temperature=0.8, seed=1, method="recycling")
    samples = tokens(ours.generate(turn, max_tokens=8, **sampling))
    assert samples == tokens(fresh(turn, **sampling))
    assert samples[0] == fresh(turn, temperature=0.8, seed=1, method="plain").tokens
    assert len(set(map(tuple, samples))) == 3


# Scores


@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_chunks(name: str):
    prompt = PROMPTS[2]
    expected = transformers_logits(tiny(name), prompt)
    for chunk in (7, 64, 512):
        lm = adapt(tiny(name))
        getattr(lm, "runner", lm).chunk = chunk
        row = lm.acquire(prompt[:-2])
        lm.feed([prompt[:-2]], [row])
        assert_same(lm.score([Tree.chain(prompt[-2:])], [row])[0].logits.all(), expected[-2:])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "qwen3_5", "mamba2", "mamba"])
def test_long_prompts(name: str):
    prompt = text(3000)
    found = outpace.wrap(tiny(name)).generate(prompt, method="plain", max_tokens=4, logprobs=3)
    assert found.tokens == transformers_greedy(tiny(name), prompt, 4)


@pytest.mark.parametrize("name", PACKED)
def test_every_node_of_a_tree_sees_its_ancestors_and_no_more(name: str):
    model, lm = tiny(name), adapt(tiny(name))
    prompts = PROMPTS[:2]
    rows = [lm.acquire(prompt) for prompt in prompts]
    lm.feed(prompts, rows)
    grown = Tree(TREE.tokens[:5], TREE.parents[:5])
    first = lm.score([grown, TREE], rows)
    grown.add(2, 12)
    grown.add(3, 13)
    later = lm.score([grown, TREE], rows, since=[5, len(TREE)])
    for row, prompt in enumerate(prompts):
        logits = torch.cat([first[row].logits.all(), later[row].logits.all()])
        for node in range(len(TREE)):
            path = [TREE.tokens[n] for n in TREE.path(node)]
            assert_same(logits[node], transformers_logits(model, prompt + path)[-1])
    lm.keep([[0, 2, 5], [0, 1, 3, 6]], rows)
    after = lm.score([Tree.chain([20, 21]), Tree.chain([22])], rows)
    assert_same(after[0].logits.all(), transformers_logits(model, [*prompts[0], 7, 9, 12, 20, 21])[-2:])
    assert_same(after[1].logits.all(), transformers_logits(model, [*prompts[1], 7, 8, 10, 13, 22])[-1:])


@pytest.mark.parametrize("name", NATIVE)
def test_chains_are_cut_back_to_what_was_kept(name: str):
    model, lm = tiny(name), adapt(tiny(name))
    with pytest.raises(UsageError, match="chains"):
        lm.score([TREE], [lm.acquire([])])
    held = list(PROMPTS[0])
    row = lm.acquire(held)
    lm.feed([held], [row])
    for kept in (1, 4, 2, 3):
        chain = text(4, kept)
        assert_same(lm.score([Tree.chain(chain)], [row])[0].logits.all(), transformers_logits(model, held + chain)[-4:])
        lm.keep([list(range(kept))], [row])
        held += chain[:kept]


@pytest.mark.parametrize("name", MODELS)
def test_nodes_that_were_not_kept_leave_no_trace(name: str):
    lm = adapt(tiny(name))
    row = lm.acquire(PROMPTS[0])
    lm.feed([PROMPTS[0]], [row])
    expected = lm.score([Tree.chain([3, 4])], [row])[0].logits.all()
    assert_same(lm.score([Tree([5])], [row])[0].logits.all(), transformers_logits(tiny(name), [*PROMPTS[0], 5])[-1:])
    assert_same(lm.score([Tree.chain([3, 4])], [row])[0].logits.all(), expected)
    lm.release(row)
    row = lm.acquire(PROMPTS[0])
    lm.feed([PROMPTS[0]], [row])
    assert_same(lm.score([Tree.chain([3, 4])], [row])[0].logits.all(), expected)


# The user's model


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_not_touched(name: str):
    model = MODELS[name]().train()
    for module in list(model.modules())[::2]:
        module.training = False  # flags of a user who froze some parts
    before = copy.deepcopy(model)
    tensors = {key: id(t) for key, t in (*model.named_parameters(), *model.named_buffers())}
    ours = outpace.wrap(model)
    for method in ("plain", "recycling"):
        ours.generate(PROMPTS[0], method=method, max_tokens=8)
    row = ours.lm.acquire(PROMPTS[1], taps=(0, -1))
    ours.lm.feed([PROMPTS[1]], [row])
    ours.lm.score([Tree([1])], [row])
    assert model.config.to_dict() == before.config.to_dict()
    assert model.config._attn_implementation == before.config._attn_implementation
    assert model.generation_config.to_dict() == before.generation_config.to_dict()
    assert {key: id(t) for key, t in (*model.named_parameters(), *model.named_buffers())} == tensors
    assert all(torch.equal(t, before.state_dict()[key]) for key, t in model.state_dict().items())
    for ours_, theirs in zip(model.modules(), before.modules(), strict=True):
        assert ours_.training == theirs.training
        assert not ours_._forward_hooks and not ours_._forward_pre_hooks
        assert vars(ours_).keys() == vars(theirs).keys()
    assert transformers_greedy(model.eval(), PROMPTS[0], 8) == transformers_greedy(before.eval(), PROMPTS[0], 8)


@pytest.mark.parametrize("name", MODELS)
def test_taps_are_the_hidden_states_of_transformers(name: str):
    model, lm = tiny(name), adapt(tiny(name))
    with torch.no_grad():
        states = model(input_ids=torch.tensor([PROMPTS[2]]), output_hidden_states=True, use_cache=False).hidden_states
        if name in ("mamba", "mamba2"):  # where Transformers leaves out the embeddings
            states = (model.get_input_embeddings()(torch.tensor([PROMPTS[2]])), *states)
    expected = torch.cat([states[tap][0] for tap in (0, 1, -1)], dim=-1)
    getattr(lm, "runner", lm).chunk = 30
    row = lm.acquire(PROMPTS[2][:-4], taps=(0, 1, -1))
    other = lm.acquire(PROMPTS[1][:-1])
    lm.feed([PROMPTS[2][:-4], PROMPTS[1][:-1]], [row, other])
    scores = lm.score([Tree.chain(PROMPTS[2][-4:]), Tree(PROMPTS[1][-1:])], [row, other])
    assert scores[0].hidden is not None and scores[1].hidden is None
    assert_same(scores[0].hidden, expected[-4:])
    lm.keep([[0, 1], [0]], [row, other])
    lm.score([Tree(PROMPTS[2][-2:-1])], [row])  # what was not kept whole may have to ride on the next pass
    assert_same(lm.states.read(row), expected[:-2])
    assert lm.states.read(other) is None
    row = lm.acquire([], taps=(9,))
    with pytest.raises(UsageError, match="tap 9"):
        lm.score([Tree([1])], [row])


def only_layers(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A Transformers model of its own that has copies of some of the layers."""
    config = copy.deepcopy(model.config)
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, [getattr(config, name)[i] for i in layers])
    config.num_hidden_layers = len(layers)
    small = type(model)(config).to(model.dtype).eval()
    rest = {key: t for key, t in model.state_dict().items() if key in small.state_dict()}
    stacks = [next(m for m in each.get_decoder().children() if isinstance(m, nn.ModuleList)) for each in (model, small)]
    small.load_state_dict({key: t for key, t in rest.items() if t.shape == small.state_dict()[key].shape}, strict=False)
    for place, index in enumerate(layers):
        stacks[1][place] = copy.deepcopy(stacks[0][index])
        for module in stacks[1][place].modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    return small


@pytest.mark.parametrize("name", PACKED)
def test_a_slice_is_a_model_of_these_layers(name: str):
    lm = adapt(tiny(name))
    assert isinstance(lm, TransformersLM)
    for layers in ([0, 2], [1, 2], [1], [0, 1, 2]):
        small = only_layers(tiny(name), layers) if len(layers) < 3 else tiny(name)
        ours = outpace.Model(lm.layers.slice(layers))
        row = ours.lm.acquire([])
        assert_same(
            ours.lm.score([Tree.chain(PROMPTS[0])], [row])[0].logits.all(), transformers_logits(small, PROMPTS[0])
        )
        ours.lm.release(row)
        expected = [transformers_greedy(small, prompt, 12) for prompt in PROMPTS]
        assert tokens(ours.generate(PROMPTS, method="recycling", max_tokens=12)) == expected
    for wrong in ([], [3], [-1]):
        with pytest.raises(UsageError, match="layers 0 to 2"):
            lm.layers.slice(wrong)
    assert tiny(name).config.num_hidden_layers == 3


def test_a_slice_drafts_for_its_model():
    for name in ("llama", "gemma2"):
        ours = wrapped(name)
        plain = ours.generate(PROMPTS, method="plain", max_tokens=16)
        found = ours.generate(
            PROMPTS, method="draft", draft=ours.lm.layers.slice([0, 1]), depth=3, width=2, max_tokens=16
        )
        assert tokens(found) == tokens(plain)


def test_a_model_that_also_sees_runs_its_text_part():
    seeing = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=5, num_attention_heads=4, image_size=28)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llava", text_config=SHAPE | GROUPED | dict(model_type="llama"), vision_config=seeing | dict(patch_size=14)
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
    ours = outpace.wrap(model)
    expected = [transformers_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert tokens(ours.generate(PROMPTS, method="recycling", max_tokens=12)) == expected
    assert isinstance(ours.lm, TransformersLM)
    assert ours.lm.layers.slice([0, 2]).indices == [0, 2]


# What goes wrong


def test_models_that_cannot_be_run_are_refused_by_name():
    t5 = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    refused = {
        "is not a causal language model": [AutoModelForSeq2SeqLM.from_config(t5)],
        "is not causal": [build("bert", pad_token_id=0)],
        "keeps its state outside": [
            build("rwkv", attention_hidden_size=32, context_length=64),
            build("recurrent_gemma", **GROUPED, lru_width=32, attention_window_size=8),
            build("openai-gpt", n_embd=32, n_layer=2, n_head=4, n_positions=64),
        ],
    }
    for why, models in refused.items():
        for model in models:
            with pytest.raises(UnsupportedModel, match=f"{type(model).__name__} {why}"):
                outpace.wrap(model)


def test_rope_that_changes_with_the_length_ends_where_it_changes():
    rope = dict(
        rope_type="longrope", short_factor=[1.0] * 4, long_factor=[3.0] * 4, original_max_position_embeddings=48
    )
    model = build("phi3", num_key_value_heads=2, rope_parameters=rope, original_max_position_embeddings=48)
    ours = outpace.wrap(model)
    for prompt in PROMPTS[:2]:
        found = ours.generate(prompt, method="recycling", max_tokens=99)
        assert len(prompt) + len(found.tokens) == ours.lm.max_length == 48
        assert found.tokens == transformers_greedy(model, prompt, 48 - len(prompt))
    with pytest.raises(UsageError, match="48"):
        ours.generate(PROMPTS[2])


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "mamba"])
def test_a_pass_that_runs_out_of_memory_is_repeated_without_drafts(name: str, monkeypatch: pytest.MonkeyPatch):
    expected = wrapped(name).generate(PROMPTS, method="plain", max_tokens=16)
    ours = outpace.wrap(tiny(name))
    kind = type(tiny(name))
    forward, calls = kind.forward, 0

    def failing(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        out = forward(self, *args, **kwargs)
        if calls % 10 == 0:
            raise torch.OutOfMemoryError("out of memory")
        return out

    monkeypatch.setattr(kind, "forward", failing)
    found = ours.generate(PROMPTS, method="recycling", max_tokens=16)
    assert calls >= 10
    done = [(ours_, plain) for ours_, plain in zip(found, expected, strict=True) if ours_.error is None]
    assert done
    assert all(ours_.tokens == plain.tokens for ours_, plain in done)


def test_a_draft_with_a_recurrent_state_is_not_fed_its_prompt_again(monkeypatch: pytest.MonkeyPatch):
    ours, draft = wrapped("qwen3_5"), outpace.wrap(blurred(tiny("qwen3_5"), 0.5))
    feed, fed = SnapshotLM._advance, 0

    def counting(self, cache, tokens, keep=None):
        nonlocal fed
        fed += len(tokens) if self is draft.lm else 0
        return feed(self, cache, tokens, keep)

    monkeypatch.setattr(SnapshotLM, "_advance", counting)
    prompt = text(200)
    found = ours.generate(prompt, method="draft", draft=draft, depth=3, max_tokens=24)
    assert 0 < found.stats.accepted < found.stats.drafted
    assert fed <= len(prompt) + 24 + 4 * found.stats.passes
