"""Heads in the layouts of others: what they say after loading is what a plain computation on their tensors says."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.cli.common import app
from outpace.errors import OutpaceError, UsageError
from outpace.heads import store
from outpace.heads.base import Head
from outpace.heads.formats.export import export
from outpace.models.hf.module import decoder_layers
from tests.tiny_models import GROUPED, PACKED, VOCAB, build

LAYERS, HIDDEN, DIM, HEADS, GROUPS, WIDE, GUESSED = 8, 32, 8, 4, 2, 40, 24
EPS, THETA = 1e-5, 5000.0
TOKENS = [5, 80, 3, 3, 41, 17, 99, 2, 60]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> Model:
    return wrap(build("llama", **GROUPED, num_hidden_layers=LAYERS))


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    made = {n: torch.randn(*shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
    return {n: 1 + 0.3 * t if t.dim() == 1 else t / t.shape[1] ** 0.5 for n, t in made.items()}


def eagle_tensors(taps: int = 3, **more: tuple[int, ...]) -> Tensors:
    """An EAGLE-3 head in speculators' names, with a vocabulary of its own."""
    wide = 2 * HIDDEN
    shapes = {
        "fc.weight": (HIDDEN, taps * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (GUESSED, HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (HEADS * DIM, wide),
        "layers.0.self_attn.k_proj.weight": (GROUPS * DIM, wide),
        "layers.0.self_attn.v_proj.weight": (GROUPS * DIM, wide),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": (WIDE, HIDDEN),
        "layers.0.mlp.up_proj.weight": (WIDE, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, WIDE),
    }
    ids = torch.arange(GUESSED) * 4 + 1
    mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return {**random_tensors({**shapes, **more}), "d2t": ids - torch.arange(GUESSED), "t2d": mask}


def eagle_config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "intermediate_size": WIDE, "hidden_act": "silu",
        "num_hidden_layers": 1, "vocab_size": VOCAB, "draft_vocab_size": GUESSED, "rms_norm_eps": EPS,
        "rope_theta": THETA, "max_position_embeddings": 2048, **more,
    }  # fmt: skip


def speculators_config(**more: Any) -> dict[str, Any]:
    layer = {n: v for n, v in eagle_config().items() if n not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": GUESSED,
        "norm_before_residual": False, "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        }, **more,
    }  # fmt: skip


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def write(folder: Path, config: dict[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


# The reference: one chain at a time, one key at a time, nothing of ours.


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:  # [heads, dim]
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


class Chain:
    """One layer with its keys and values; `after(i)` goes on from the first i of them."""

    def __init__(self, w: Tensors, prefix: str, theta: float):
        self.w, self.prefix, self.theta = w, prefix, theta
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def after(self, count: int) -> Chain:
        new = Chain(self.w, self.prefix, self.theta)
        new.keys, new.values = self.keys[:count], self.values[:count]
        return new

    def weight(self, name: str) -> Tensor:
        return self.w[f"{self.prefix}{name}.weight"]

    def attend(self, x: Tensor, position: int) -> Tensor:
        q, k, v = ((self.weight(f"self_attn.{n}_proj") @ x).view(-1, DIM) for n in "qkv")
        if f"{self.prefix}self_attn.q_norm.weight" in self.w:
            q, k = rms(q, self.weight("self_attn.q_norm")), rms(k, self.weight("self_attn.k_norm"))
        self.keys.append(turn(k, position, self.theta).repeat_interleave(HEADS // GROUPS, dim=0))
        self.values.append(v.repeat_interleave(HEADS // GROUPS, dim=0))
        keys, values = torch.stack(self.keys), torch.stack(self.values)  # [seen, heads, dim]
        scores = (keys * turn(q, position, self.theta)).sum(-1) / math.sqrt(DIM)
        return self.weight("self_attn.o_proj") @ (scores.softmax(0)[..., None] * values).sum(0).flatten()

    def feed(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.weight("mlp.gate_proj") @ x) * (self.weight("mlp.up_proj") @ x)
        return self.weight("mlp.down_proj") @ hidden


class Eagle:
    """EAGLE-3 by its paper, and what later versions changed."""

    def __init__(self, w: Tensors, target: Model, config: dict[str, Any]):
        self.w, self.config = w, config
        self.embed: Tensor = target.lm.embeddings.embed  # type: ignore[union-attr]

    def fuse(self, states: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            states = rms(states, self.w["input_norm.weight"])
        if self.config.get("fc_norm"):
            chunks = states.chunk(3, dim=-1)
            states = torch.cat([rms(s, self.w[f"fc_norm.{i}.weight"]) for i, s in enumerate(chunks)], dim=-1)
        return states @ self.w["fc.weight"].T

    def step(self, chain: Chain, token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """What is fed back, and the logits over its own vocabulary."""
        normed = rms(state, chain.weight("hidden_norm"))
        both = torch.cat([rms(self.embed[token], chain.weight("input_layernorm")), normed])
        past = normed if self.config.get("norm_before_residual") else state
        x = past + chain.attend(both, position)
        x = x + chain.feed(rms(x, chain.weight("post_attention_layernorm")))
        out = rms(x, self.w["norm.weight"])
        return out if self.config.get("norm_output") else x, self.w["lm_head.weight"] @ out

    def two_steps(self, hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Logits of both steps, from every place that has two tokens behind it."""  # [tokens, taps * hidden]
        text, states = Chain(self.w, "layers.0.", THETA), self.fuse(hidden)
        first, second = [], []
        for t in range(len(TOKENS) - 2):
            state, logits = self.step(text, TOKENS[t + 1], states[t], t)
            first.append(logits)
            second.append(self.step(text.after(t + 1), TOKENS[t + 2], state, t + 1)[1])
        return first, second


def states_of(model: PreTrainedModel, taps: tuple[int, ...]) -> Tensor:  # [tokens, taps * hidden]
    with torch.no_grad():
        out = model(input_ids=torch.tensor([TOKENS]), output_hidden_states=True)
    return torch.cat([out.hidden_states[tap][0] for tap in taps], dim=-1)


@torch.no_grad()
def assert_says(head: Head, hidden: Tensor, expected: tuple[list[Tensor], list[Tensor]]) -> None:
    guessed = head.unroll(torch.tensor([TOKENS]), hidden[None], 2)
    for step, rows in enumerate(expected):
        assert torch.allclose(guessed[step].logits[0, : len(rows)], torch.stack(rows), atol=1e-4, rtol=1e-4)


LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {  # config, whether it is the layout of speculators
    "eagle": (eagle_config(), False),
    "specforge": (eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}), False),
    "boundaries": (eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}), False),
    "speculators": (speculators_config(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), True),
    "residual": (speculators_config(norm_before_residual=True), True),
    "joined": (speculators_config(norm_before_fc=True, norm_output=True, norm_before_residual=True), True),
    "each": (speculators_config(fc_norm=True, norm_output=True), True),
    "qwen3": (speculators_config(), True),
}
TAPS = {"specforge": (2, 4, 5), "boundaries": (2, 4, 7), "speculators": (1, 3, 6)}
EXTRA: dict[str, dict[str, tuple[int, ...]]] = {
    "joined": {"input_norm.weight": (3 * HIDDEN,)},
    "each": {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)},
    "qwen3": {f"layers.0.self_attn.{n}_norm.weight": (DIM,) for n in "qk"},
}


def checkpoint(name: str, folder: Path, target: Model) -> tuple[Path, Tensors]:
    config, speculators = LAYOUTS[name]
    tensors = eagle_tensors(**EXTRA.get(name, {}))
    written = tensors if speculators else {midlayer(n): t for n, t in tensors.items()}
    if name == "specforge":
        written = {n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}": t for n, t in written.items()}
    if speculators:
        written = {**written, "embed_tokens.weight": target.lm.embeddings.embed.to(torch.bfloat16)}  # type: ignore[union-attr]
    return write(folder / name, config, written, pickled=name == "boundaries"), tensors


@pytest.mark.parametrize("name", LAYOUTS)
def test_eagle3(name: str, tmp_path: Path, target: Model) -> None:
    folder, tensors = checkpoint(name, tmp_path, target)
    head = store.load(folder, target.lm)
    taps = TAPS.get(name, (2, LAYERS // 2, LAYERS - 3))
    assert head.spec.taps == taps
    assert head.ids is not None and head.ids.tolist() == [4 * i + 1 for i in range(GUESSED)]
    hidden = states_of(target.lm.model, taps)  # type: ignore[attr-defined]
    expected = Eagle(tensors, target, LAYOUTS[name][0]).two_steps(hidden)
    assert_says(head, hidden, expected)
    for layout in ("speculators", "eagle") if taps[0] != 1 else ("speculators",):
        export(head, tmp_path / "out" / layout, target.lm, "tiny", layout)
        again = store.load(tmp_path / "out" / layout, target.lm)
        assert replace(again.spec, steps=head.spec.steps) == head.spec  # one layout has no word for the steps
        assert_says(again, hidden, expected)


@torch.no_grad()
def guesses(eagle: Eagle, model: PreTrainedModel, text: list[int]) -> list[int]:
    """The two tokens that a head guesses to follow a text, greedily."""
    out = model(input_ids=torch.tensor([text]), output_hidden_states=True)
    states = eagle.fuse(torch.cat([out.hidden_states[tap][0] for tap in (2, 4, 5)], dim=-1))
    chain, guessed = Chain(eagle.w, "layers.0.", THETA), list[int]()
    for t, token in enumerate(text[1:]):
        state, logits = eagle.step(chain, token, states[t], t)
    for position in (len(text) - 1, len(text)):
        guessed.append(4 * int(logits.argmax()) + 1)
        state, logits = eagle.step(chain, guessed[-1], state, position)
    return guessed


@pytest.mark.parametrize("name", ["eagle", "joined"])
def test_a_published_head_drafts(name: str, tmp_path: Path, target: Model) -> None:
    """Every guess of the engine is that of the reference, and the answer is that of plain decoding."""
    folder, tensors = checkpoint(name, tmp_path, target)
    plain = target.generate(TOKENS, method="plain", max_tokens=12).tokens
    eagle, text, checked = Eagle(tensors, target, LAYOUTS[name][0]), list(TOKENS), 0
    for piece in target.stream(TOKENS, method="eagle3", head=str(folder), width=1, depth=2, nodes=2, max_tokens=12):
        assert piece.step is not None
        if piece.step.drafted == 2:
            assert piece.step.tree.tokens[1:] == guesses(eagle, target.lm.model, text)  # type: ignore[attr-defined]
            checked += 1
        text += piece.tokens
    assert text[len(TOKENS) :] == plain
    assert checked > 5


def test_rotations_are_those_of_the_head(tmp_path: Path, target: Model) -> None:
    """In every precision, and stretched from the length that the head was made for."""
    tensors = {midlayer(n): t for n, t in eagle_tensors().items()}
    for name, scaling in ("plain", None), ("yarn", {"rope_type": "yarn", "factor": 4.0}):
        config = eagle_config(rope_scaling=scaling)
        head = store.load(write(tmp_path / name, config, tensors), target.lm)
        expected = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=DIM, max_position_embeddings=2048,
                rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": THETA},
            )
        )  # fmt: skip
        half = head.to(torch.bfloat16).model.rotary_emb  # type: ignore[union-attr]
        assert torch.equal(half.inv_freq, expected.inv_freq) and half.attention_scaling == expected.attention_scaling


# Models' own MTP layers.


class Mtp:
    """A layer on the last state and the next token, with a layer of Transformers' own, uncached."""

    def __init__(self, model: PreTrainedModel, w: Tensors, fed_normed: bool):
        self.w, self.fed_normed = w, fed_normed
        decoder, name = decoder_layers(model)
        self.decoder: Any = decoder
        self.layer = getattr(decoder, name)[-1]
        self.embed, self.unembed = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.eps = model.config.rms_norm_eps
        self.centred = "Qwen3Next" in type(decoder.norm).__name__  # whose weights are counted from one

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, 1 + weight if self.centred else weight, self.eps)

    def run(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:  # [tokens, hidden] each
        normed = [self.norm(self.embed[tokens], self.w["enorm"]), self.norm(states, self.w["hnorm"])]
        x = (torch.cat(normed, dim=-1) @ self.w["fc"].T)[None]
        turns = self.decoder.rotary_emb(x, torch.arange(len(tokens))[None])
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = self.layer(x, attention_mask=mask, position_embeddings=turns, past_key_values=None)[0]
        out = self.norm(x, self.w["norm"])
        return out if self.fed_normed else x, out @ self.unembed.T

    @torch.no_grad()
    def two_steps(self, hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        fed, logits = self.run(TOKENS[1:], hidden[:-1])
        second = []
        for t in range(len(TOKENS) - 2):
            states = torch.cat([hidden[: t + 1], fed[t : t + 1]])
            second.append(self.run(TOKENS[1 : t + 3], states)[1][-1])
        return list(logits[:-1]), second


def split(tensors: Tensors) -> Tensors:
    """Experts one by one, as checkpoints hold them."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                at = name.removesuffix("gate_up_proj")
                out |= {f"{at}{i}.gate_proj.weight": gate, f"{at}{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{i}.down_proj.weight": down for i, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


MTP = {"llama": "layers", "qwen3": "mtp", "deepseek_v3": "layers", "glm4_moe": "layers", "qwen3_next": "mtp"}
GLM: dict[str, Any] = dict(
    **GROUPED, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    n_group=2, topk_group=1,
)  # fmt: skip


def mtp_target(kind: str) -> PreTrainedModel:
    """Its last layer has full attention, and experts where the model has any."""
    if kind == "glm4_moe":
        return build(kind, torch.float32, **GLM)
    if kind == "qwen3_next":
        types = ["linear_attention", "linear_attention", "full_attention"]
        delta = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        return build(
            kind, torch.float32, **GROUPED, **delta, **experts, shared_expert_intermediate_size=16, layer_types=types
        )
    return PACKED[kind]()


def write_mtp(folder: Path, kind: str, model: PreTrainedModel) -> Tensors:
    """A checkpoint whose MTP layer has the weights of the model's last layer."""
    dtype, count = model.dtype, model.config.num_hidden_layers
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("enorm", "hnorm", "norm"), (HIDDEN,))
    w = {n: t.to(dtype) for n, t in random_tensors({**shapes, "fc": (HIDDEN, 2 * HIDDEN)}).items()}
    decoder, name = decoder_layers(model)
    layer = split(dict(getattr(decoder, name)[-1].state_dict()))
    if MTP[kind] == "mtp":
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm", "fc": "fc"}
        tensors = {f"mtp.{ours}.weight": w[n] for n, ours in names.items()}
        tensors |= {f"mtp.layers.0.{n}": t for n, t in layer.items()}
    else:
        names = {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm", "fc": "eh_proj"}
        tensors = {f"model.layers.{count}.{ours}.weight": w[n] for n, ours in names.items()}
        tensors |= {f"model.layers.{count}.{n}": t for n, t in layer.items()}
        tensors[f"model.layers.{count}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"model.layers.{count}.shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    write(folder, model.config.to_dict(), tensors)
    return w


@pytest.mark.parametrize("kind", MTP)
def test_mtp_layers_of_a_model(kind: str, tmp_path: Path) -> None:
    model = mtp_target(kind)
    w = write_mtp(tmp_path / "model", kind, model)
    lm = wrap(model)
    head = store.load(tmp_path / "model", lm.lm)
    assert head.spec.kind == "mtp" and not head.spec.own_output
    hidden = states_of(model, (lm.lm.layers.count,))
    assert_says(head, hidden, Mtp(model, w, MTP[kind] == "mtp").two_steps(hidden))
    given = {"max_tokens": 12, "temperature": 0.7, "seed": 4}
    drafted = lm.generate([TOKENS, TOKENS[:4]], method="mtp", head=str(tmp_path / "model"), **given)
    assert [c.tokens for c in drafted] == [c.tokens for c in lm.generate([TOKENS, TOKENS[:4]], method="plain", **given)]
    assert sum(c.stats.drafted for c in drafted) > 0
    store.save(head, tmp_path / "saved", lm.lm)
    again = store.load(tmp_path / "saved", lm.lm)
    assert again.spec == head.spec
    model.config._name_or_path = str(tmp_path / "model")
    found = store.resolve("mtp", None, lm.lm)
    assert all(torch.equal(t, found.own_tensors()[n]) for n, t in head.own_tensors().items())


# What goes wrong.


def broken(what: str) -> tuple[dict[str, Any], Tensors]:
    config, tensors = eagle_config(), {midlayer(n): t for n, t in eagle_tensors().items()}
    match what:
        case "missing":
            del tensors["midlayer.mlp.up_proj.weight"]
        case "no fc":
            del tensors["fc.weight"]
        case "unknown":
            tensors["midlayer.self_attn.sinks"] = torch.zeros(HEADS, dtype=torch.float64)
        case "shape":
            config["intermediate_size"] = WIDE + 1
        case "ids":  # a table of ids where offsets belong
            tensors["d2t"] = torch.arange(GUESSED) * 4 + 1
        case "mask":
            tensors["t2d"] = tensors["t2d"].roll(1)
        case "width":
            config["hidden_size"] = 2 * HIDDEN
        case "layers":
            config["num_hidden_layers"] = 2
        case "taps":
            config["eagle_aux_hidden_state_layer_ids"] = [2, 4]
        case "last tap":
            config["eagle_aux_hidden_state_layer_ids"] = [2, 4, LAYERS]
        case "rope":
            config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
        case "window":
            config["layer_types"] = ["sliding_attention"]
        case "norms":
            config["norm_before_fc"] = True
        case "embeddings":
            tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
        case "type":
            config["speculators_model_type"] = "peagle"
    return config, tensors


ERRORS = {
    "missing": r"missing tensors: model\.layers\.0\.mlp\.up_proj\.weight", "no fc": r"lacks the tensor fc\.weight",
    "unknown": r"self_attn\.sinks", "shape": r"\[32, 40\], but \[32, 41\] is expected", "ids": "offsets",
    "mask": "t2d", "width": "64 wide", "layers": "2 layers", "taps": "reads 3 states", "last tap": "final norm",
    "rope": "dynamic", "window": "sliding", "norms": "norms before fc", "embeddings": "embeddings", "type": "peagle",
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_held_is_refused_by_name(what: str, tmp_path: Path, target: Model) -> None:
    folder = write(tmp_path / "head", *broken(what))
    with pytest.raises(OutpaceError, match=ERRORS[what]):
        store.load(folder, target.lm)


def test_folders_without_a_head(tmp_path: Path, target: Model) -> None:
    with pytest.raises(UsageError, match="holds no"):
        store.load(tmp_path / "nothing", target.lm)
    folder = write(tmp_path / "model", {"model_type": "llama"}, {"model.embed_tokens.weight": torch.zeros(4, 4)})
    with pytest.raises(UsageError, match="no known head format"):
        store.load(folder, target.lm)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        store.load(folder, target.lm)
    with pytest.raises(UsageError, match="'eagle3', not 'mtp'"):
        store.resolve("mtp", str(write(tmp_path / "eagle", *broken(""))), target.lm)


def test_export(tmp_path: Path, target: Model) -> None:
    """A head with the target's own output, and one with rows in another order than that of the target's ids."""
    hidden = states_of(target.lm.model, store.fresh("eagle3", target.lm).spec.taps)  # type: ignore[attr-defined]
    ids = torch.tensor([50, 2, 77, 31])
    for i, given in enumerate([{}, {"ids": ids, "own_output": True, "normed": True}]):
        head = store.fresh("eagle3", target.lm, **given)
        folder = tmp_path / str(i)
        export(head, folder, target.lm, "some/model")
        written, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
        assert len(written["lm_head.weight"]) == config["draft_vocab_size"] == (4 if given else VOCAB)
        again = store.load(folder, target.lm)
        ours, theirs = (h.unroll(torch.tensor([TOKENS]), hidden[None], 2) for h in (head, again))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(head.spread(a.logits, VOCAB), again.spread(b.logits, VOCAB))
    with pytest.raises(UsageError, match="already exists"):
        export(head, folder, target.lm, "some/model")
    with pytest.raises(UsageError, match="a first state of 1"):
        export(store.fresh("eagle3", target.lm, taps=(1, 3, 5)), tmp_path / "one", target.lm, "some/model", "eagle")
    with pytest.raises(UsageError, match="'mtp' cannot be exported"):
        export(store.fresh("mtp", target.lm), tmp_path / "mtp", target.lm, "some/model")


def test_commands(tmp_path: Path, target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.cli.training.head.load_model", lambda name, how: target)

    def run(*words: object) -> str:
        result = CliRunner().invoke(app, ["head", *map(str, words)])
        assert result.exit_code == 0, result.output
        return result.output

    folder, _ = checkpoint("each", tmp_path, target)
    shown = json.loads(run("show", folder, "--json"))
    assert (shown["kind"], shown["layout"], shown["fc_norm"], shown["made_for"]) == (
        "eagle3",
        "speculators",
        True,
        "tiny",
    )
    store.save(store.fresh("eagle3", target.lm), tmp_path / "ours", target.lm, {"loss": "tv"})
    shown = json.loads(run("show", tmp_path / "ours", "--json"))
    assert (shown["layout"], shown["taps"], shown["loss"]) == ("outpace", [2, 4, 5], "tv")
    assert "made for" in run("show", tmp_path / "ours")
    served = run("export", tmp_path / "ours", "--model", "some/model", "--output", tmp_path / "out")
    *command, speculation = shlex.split(served.splitlines()[-1])
    assert command == ["vllm", "serve", "some/model", "--speculative-config"]
    expected = {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": shown["steps"]}
    assert json.loads(speculation) == expected
    assert json.loads(run("show", tmp_path / "out", "--json"))["made_for"] == "some/model"
    run("compress", tmp_path / "ours", "--output", tmp_path / "small")
    assert json.loads(run("show", tmp_path / "small", "--json")) == shown
    assert CliRunner().invoke(app, ["head", "compress", str(folder), "--output", str(tmp_path / "no")]).exit_code == 2
    mtp = tmp_path / "mtp"
    write_mtp(mtp, "llama", mtp_target("llama"))
    assert json.loads(run("show", mtp, "--json"))["kind"] == "mtp"
    again = ["head", "export", str(mtp), "--model", "m", "--output", str(tmp_path / "x"), "--to", "gguf"]
    assert CliRunner().invoke(app, again).exit_code == 2
