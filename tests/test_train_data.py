"""Data to train on: prompts of all kinds, answers that are the target's own, files that are continued, batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from outpace.api.model import Model
from outpace.cli.training import train_data
from outpace.errors import OutpaceError, UsageError
from outpace.prompts import tasks, training
from outpace.prompts.tasks import Prompt
from outpace.prompts.training import Shard
from outpace.testing import ByteTokenizer, ToyLM
from outpace.train.data import generate, self_written
from outpace.train.data.batches import batches, collate, plan
from outpace.train.data.generate import GenerationSettings, Progress, Writing, answer, write
from outpace.train.data.records import RecordFile, TextRecord, read
from tests.test_docs import blocks
from tests.tiny_tokenizers import sentencepiece, tiktoken


class Chatty(ToyLM):
    """A toy whose turns end after a few tokens."""

    def __init__(self, ends: list[int], push: float = 6.0, seed: int = 0):
        super().__init__(layers=1, vocab=len(tiktoken()), seed=seed)
        self.push = torch.zeros(self.vocab, dtype=torch.float64).index_fill(0, torch.tensor(ends), push)

    def run(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        logits, states = super().run(tokens)
        return logits + self.push, states


def chatty(push: float = 6.0, seed: int = 0, name: str = "chatty") -> Model:
    tokenizer = tiktoken()
    return Model(Chatty([tokenizer.eos_token_id], push, seed), tokenizer, [tokenizer.eos_token_id], name)


def ask(*texts: str) -> list[Prompt]:
    return [Prompt("own", str(i), (text,)) for i, text in enumerate(texts)]


ASKED = ask("the dog", "a fox", "def add", "over the lazy", "2024", "café")
BRIEF = GenerationSettings(max_tokens=5, method="plain", rows=2)
WRITING = GenerationSettings(max_tokens=4, method="plain", rows=3, writing=Writing(max_tokens=8))


class Stop:
    """Interrupts a run when so many answers are there."""

    def __init__(self, after: int):
        self.after = after

    def __call__(self, progress: Progress) -> None:
        if progress.done >= self.after:
            raise KeyboardInterrupt


def texts(path: Path) -> dict[str, tuple[int, list[int]]]:
    return {record.id: (record.prompt, record.tokens.tolist()) for record in read(path)}


# Prompts.


def prompt_file(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    return path


def test_prompts_come_under_many_names(tmp_path: Path) -> None:
    path = prompt_file(
        tmp_path / "p.jsonl",
        {"prompt": "a\u2028b"},
        {"turns": ["one", "two"]},
        {"question": "1+1?", "answer": "2"},
        {"instruction": "Sort.", "input": "b, a", "output": "a, b"},
        {"instruction": "Greet.", "input": ""},
        {"text": "Write.", "code": "pass"},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]},
        {"conversations": [{"from": "human", "value": "Hm"}, {"from": "gpt", "value": "Yes"}]},
    )  # fmt: skip
    found = training.load([path])
    assert [p.turns for p in found] == [
        ("a\u2028b",), ("one", "two"), ("1+1?",), ("Sort.\n\nb, a",), ("Greet.",), ("Write.",), ("Hi", "Bye"), ("Hm",),
    ]  # fmt: skip
    assert found[6].messages == ({"role": "system", "content": "Be kind."},)
    assert [p.turns for p in training.load([path], limit=1)] == [("a\u2028b",)]
    assert len(training.load([path, path])) == len(found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"title": "x"}, 'none of the fields that hold a prompt ("prompt"'),
        ({"question": " "}, "has no text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "has no text"),
        ({"conversations": "x"}, "a chat must be a list"),
    ],
)
def test_a_bad_prompt_is_named(line: Any, message: str, tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", {"prompt": "good"}, line)
    with pytest.raises(UsageError, match=r"p\.jsonl, line 2: ") as caught:
        training.load([path])
    assert message in str(caught.value)


def test_shards() -> None:
    assert Shard.parse("2/8") == Shard(2, 8) and str(Shard(2, 8)) == "2/8"
    assert [Shard(i, 3).share(7) for i in (1, 2, 3)] == [3, 2, 2]
    for wrong in ("0/2", "3/2", "2", "a/b", "-1/2"):
        with pytest.raises(UsageError, match="2/8 is the second of eight"):
            Shard.parse(wrong)


# Answers.


@pytest.mark.parametrize(
    "settings", [BRIEF, GenerationSettings(max_tokens=6, temperature=0.9, top_p=0.9, seed=3, rows=4)]
)
def test_answers_are_those_that_the_model_gives_each_prompt_alone(settings: GenerationSettings, tmp_path: Path) -> None:
    model, path = chatty(), tmp_path / "d.jsonl"
    made = answer(model, ASKED, path, settings)
    found = texts(path)
    assert made.answers == len(found) == len(ASKED) and not made.skipped
    assert made.tokens == sum(len(tokens) - prompt for prompt, tokens in found.values())
    sampled = {"temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens}
    for prompt in ASKED:
        name, tokens = f"{training.digest(prompt)}/1", tasks.encode(prompt, model)
        run = generate._Run(model, None, settings, None)  # type: ignore[arg-type]
        alone = model.generate(tokens, method="plain", seed=run._seed(name), **sampled)
        assert found[name] == (len(tokens), tokens + alone.tokens)
    assert model.max_batch == 16


def test_sampled_answers_to_one_text_differ_by_seed(tmp_path: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        path = tmp_path / f"{len(found)}.jsonl"
        answer(chatty(), ASKED, path, GenerationSettings(max_tokens=6, temperature=1.0, seed=seed, method="plain"))
        found.append(texts(path))
    assert found[0] == found[1] != found[2]


def test_each_turn_follows_the_answers_before_it(tmp_path: Path) -> None:
    model, path = chatty(push=0), tmp_path / "d.jsonl"
    prompt = Prompt("own", "1", ("first", "second", "third"), ({"role": "system", "content": "be brief"},))
    stopping = Stop(3)
    with pytest.raises(KeyboardInterrupt):
        answer(model, [*ASKED[:1], prompt], path, BRIEF, stopping)
    assert len(read(path)) == 3
    answer(model, [*ASKED[:1], prompt], path, BRIEF)
    found, said = texts(path), list[str]()
    assert len(found) == 4
    for turn in (1, 2, 3):
        start, tokens = found[f"{training.digest(prompt)}/{turn}"]
        assert tokens[:start] == tasks.encode(prompt, model, said)
        said.append(tiktoken().decode(tokens[start:], skip_special_tokens=True))
    whole = tmp_path / "whole.jsonl"
    answer(model, [*ASKED[:1], prompt], whole, BRIEF)
    assert texts(whole) == found


@pytest.mark.parametrize("torn", ["", '{"id": "x", "prom', '{"id": "x", "prompt": 1, "tokens": [1, 2]}'])
def test_a_file_that_broke_off_is_continued(torn: str, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "d.jsonl"
    answer(chatty(), ASKED, whole, BRIEF)
    with pytest.raises(KeyboardInterrupt):
        answer(chatty(), ASKED, path, BRIEF, Stop(2))
    before = path.read_text()
    assert len(read(path)) == 2
    path.write_text(before + torn)
    seen: list[Progress] = []
    made = answer(chatty(), ASKED, path, BRIEF, seen.append)
    assert path.read_text().startswith(before) and texts(path) == texts(whole)
    assert made.answers == len(ASKED) - 2 and seen[0].done >= 2 and seen[-1][:2] == (len(ASKED), len(ASKED))
    assert answer(chatty(), ASKED, path, BRIEF).answers == 0


def test_prompts_may_be_added_and_change_places(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    answer(chatty(), ASKED[:3], path, BRIEF)
    assert answer(chatty(), ASKED[::-1], path, BRIEF).answers == 3
    whole = tmp_path / "whole.jsonl"
    answer(chatty(), ASKED + ASKED, whole, BRIEF)
    assert texts(path) == texts(whole)


def test_workers_share_the_prompts(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    answer(chatty(), ASKED, whole, BRIEF)
    parts = [tmp_path / f"{i}.jsonl" for i in (1, 2, 3, 4)]
    for i, path in enumerate(parts, start=1):
        answer(chatty(), ASKED, path, GenerationSettings(max_tokens=5, method="plain", shard=Shard(i, 4)))
    assert [len(read(path)) for path in parts] == [2, 2, 1, 1]
    assert {r.id for r in read(parts)} == set(texts(whole))
    assert all(texts(whole)[name] == found for path in parts for name, found in texts(path).items())


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (chatty(), GenerationSettings(max_tokens=6), "max_tokens=5, not 6"),
        (chatty(), GenerationSettings(max_tokens=5, temperature=0.5), "temperature=0.0, not 0.5"),
        (chatty(), GenerationSettings(max_tokens=5, writing=Writing(system="x")), "writing="),
        (chatty(name="other"), BRIEF, "model name='chatty', not 'other'"),
        (chatty(seed=1), BRIEF, "model weights="),
    ],
)
def test_another_distribution_is_refused(
    model: Model, settings: GenerationSettings, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "d.jsonl"
    answer(chatty(), ASKED[:2], path, BRIEF)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="choose another --output") as caught:
        answer(model, ASKED, path, settings)
    assert message in str(caught.value) and path.read_bytes() == before


def test_what_changes_no_text_may_change(tmp_path: Path) -> None:
    path, whole = tmp_path / "d.jsonl", tmp_path / "whole.jsonl"
    answer(chatty(), ASKED[:2], path, BRIEF)
    answer(chatty(), ASKED, path, GenerationSettings(max_tokens=5, method="ngram", rows=7, longest_prompt=99))
    answer(chatty(), ASKED, whole, BRIEF)
    assert texts(path) == texts(whole)


@pytest.mark.parametrize("content", ['{"prompt": "x"}\n', "hello", '{"format": "other", "version": 1}\n'])
def test_other_files_are_not_touched(content: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not a file of `outpace train data`: choose another --output"):
        answer(chatty(), ASKED, path, BRIEF)
    assert path.read_text() == content


def test_a_header_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"format": "outpace-data", "vers')
    answer(chatty(), ASKED[:1], path, BRIEF)
    assert len(read(path)) == 1


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with (
        RecordFile(path, generate._header(chatty(), BRIEF)),
        pytest.raises(UsageError, match="another process is writing"),
    ):
        answer(chatty(), ASKED, path, BRIEF)
    assert answer(chatty(), ASKED, path, BRIEF).answers == len(ASKED)


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    path, settings = tmp_path / "d.jsonl", GenerationSettings(max_tokens=4, longest_prompt=40, method="plain")
    made = answer(chatty(), [*ASKED[:1], *ask("long " * 60)], path, settings)
    assert made.answers == 1 and made.skipped == {"the prompt is too long: raise longest_prompt": 1}
    with pytest.raises(OutpaceError, match="no prompt was answered: the prompt is too long"):
        answer(chatty(), ask("long " * 60), tmp_path / "none.jsonl", settings)


def test_only_lossless_methods_write_data(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose a lossless method"):
        answer(chatty(), ASKED, tmp_path / "d.jsonl", GenerationSettings(method="via_sd"))
    assert not (tmp_path / "d.jsonl").exists()


# Prompts of the model's own.


def test_a_model_writes_prompts_from_where_the_user_speaks(tmp_path: Path) -> None:
    model, path, tokenizer = chatty(), tmp_path / "d.jsonl", tiktoken()
    made = write(model, 12, path, WRITING)
    found = read(path)
    assert made.answers == len(found) == 12 and set(made.skipped) <= {
        f"a self-written prompt {why}"
        for why in ("does not end", "is empty", "is not plain text", "was written before")
    }
    asked = {tuple(record.tokens[: record.prompt].tolist()) for record in found}
    assert len(asked) == 12
    before, after = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    for record in found:
        text = tokenizer.decode(record.tokens[: record.prompt].tolist())
        message = text.removeprefix(before).removesuffix(after)
        assert text == before + message + after and message.strip() == message != "" and "<|" not in message
        alone = model.generate(record.tokens[: record.prompt].tolist(), method="plain", max_tokens=4)
        assert record.answer == alone.tokens
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum("dropped" in line for line in lines) == sum(made.skipped.values()) > 0
    assert write(model, 12, path, WRITING).answers == 0
    assert write(model, 14, path, WRITING).answers == 2


@pytest.mark.parametrize("after", [1, 4])
def test_writing_is_continued_as_if_it_had_not_stopped(after: int, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "d.jsonl"
    write(chatty(), 6, whole, WRITING)
    with pytest.raises(KeyboardInterrupt):
        write(chatty(), 6, path, WRITING, Stop(after))
    write(chatty(), 6, path, WRITING)
    assert texts(path) == texts(whole)


def test_workers_write_different_prompts(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jsonl" for i in (1, 2)]
    for i, path in enumerate(paths, start=1):
        write(
            chatty(),
            5,
            path,
            GenerationSettings(max_tokens=3, method="plain", shard=Shard(i, 2), writing=WRITING.writing),
        )
    assert [len(read(path)) for path in paths] == [3, 2]
    assert {int(r.id.removeprefix("self/")) % 2 for r in read(paths[0])} == {0}
    assert {int(r.id.removeprefix("self/")) % 2 for r in read(paths[1])} == {1}


def test_one_file_holds_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    answer(chatty(), ASKED[:2], path, WRITING)
    write(chatty(), 3, path, WRITING)
    assert len(read(path)) == 5


def test_the_system_message_is_before_what_the_model_writes(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    settings = GenerationSettings(max_tokens=3, method="plain", writing=Writing(max_tokens=8, system="be kind"))
    write(chatty(), 2, path, settings)
    start = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n"
    assert all(tiktoken().decode(record.tokens.tolist()).startswith(start) for record in read(path))


def test_a_model_that_writes_nothing_of_use_is_given_up(tmp_path: Path) -> None:
    path, settings = (
        tmp_path / "d.jsonl",
        GenerationSettings(method="plain", max_tokens=3, writing=Writing(max_tokens=2)),
    )
    with pytest.raises(OutpaceError, match=r"128 prompts that chatty wrote are unusable.*does not end"):
        write(chatty(push=-40), 200, path, settings)
    with pytest.raises(OutpaceError, match=r"128 prompts that chatty wrote are unusable.*is empty"):
        write(chatty(push=40), 200, tmp_path / "other.jsonl", settings)


def test_writing_needs_a_chat_template_and_a_temperature(tmp_path: Path) -> None:
    bare = Model(ToyLM(layers=1, vocab=257), ByteTokenizer(), [256], "bare")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"bare has no chat template.*--prompts"):
        write(bare, 1, tmp_path / "d.jsonl", BRIEF)
    with pytest.raises(UsageError, match="temperature above 0"):
        Writing(temperature=0)


def test_the_end_of_a_turn_is_found_in_the_template() -> None:
    model = chatty()
    ending = model.tokenizer.convert_tokens_to_ids("<|im_end|>")  # type: ignore[union-attr]
    assert self_written.opening(model).stop_token_ids == (ending,) and not self_written.opening(model).stop
    tokenizer: Any = sentencepiece()
    spelled = Model(ToyLM(layers=1, vocab=len(tokenizer)), tokenizer, [], "spelled")
    try:
        tokenizer.chat_template = "{% for m in messages %}USER: {{ m['content'] }}\nASSISTANT:{% endfor %}"
        assert (
            self_written.opening(spelled).stop == ("ASSISTANT:",) and not self_written.opening(spelled).stop_token_ids
        )
    finally:
        tokenizer.chat_template = None


# Batches.


def record(length: int, prompt: int = 1) -> TextRecord:
    return TextRecord(torch.arange(1, length + 1, dtype=torch.int32), prompt)


def test_a_batch_is_padded_cut_off_and_masked() -> None:
    found = collate([record(3), record(6, prompt=4)], length=5)
    assert found.tokens.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]] and found.tokens.dtype == torch.long
    assert found.mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert found.lengths.tolist() == [3, 5]
    assert found.to("cpu").mask.dtype == torch.bool


def test_an_epoch_has_every_record_once_within_the_budget() -> None:
    records = [record(2 + (i * 37) % 90) for i in range(2500)]
    for epoch in (0, 1):
        chosen = plan(records, 256, 64, seed=5, epoch=epoch)
        assert sorted(i for batch in chosen for i in batch) == list(range(2500))
        sizes = [(len(batch), max(min(64, len(records[i].tokens)) for i in batch)) for batch in chosen]
        assert all(count * longest <= 256 for count, longest in sizes)
        tokens = sum(min(64, len(r.tokens)) for r in records)
        assert tokens / sum(count * longest for count, longest in sizes) > 0.9  # little padding
        assert len({longest for _, longest in sizes[:20]}) > 3  # and not in order of length
    first = list(batches(records[:50], 256, 64, seed=5, epoch=1))
    again = list(batches(records[:50], 256, 64, seed=5, epoch=1))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert plan(records, 256, 64, seed=5, epoch=0) != plan(records, 256, 64, seed=5, epoch=1)
    assert plan(records, 256, 64, seed=5, epoch=0) != plan(records, 256, 64, seed=6, epoch=0)


def test_records_whose_answer_is_cut_off_are_left_out() -> None:
    records = [record(10, prompt=3), record(10, prompt=8), record(10, prompt=7)]
    assert sorted(i for batch in plan(records, 64, 8) for i in batch) == [0, 2]
    with pytest.raises(UsageError, match="raise the length"):
        plan(records[1:2], 64, 8)
    with pytest.raises(UsageError, match="cannot hold a text of 100"):
        plan(records, 64, 100)


def test_records_are_checked_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"tokens": [1, 2, 30], "prompt": 1}\n\n{"id": "a", "dropped": "x"}\n{"tokens": [1, 2')
    assert [r.tokens.tolist() for r in read(str(path), vocab=31)] == [[1, 2, 30]]
    with pytest.raises(UsageError, match=r"token 30.*ends at 29: the texts were written by another model"):
        read([path], vocab=30)
    wrong = ['{"tokens": [1], "prompt": 1}', '{"tokens": "x", "prompt": 0}', '{"tokens": [-1, 2], "prompt": 0}']
    for line in [*wrong, '{"prompt": 1}', '{"tokens": [', "[]"]:
        path.write_text(line + "\n")
        with pytest.raises(OutpaceError, match=r"d\.jsonl', line 1 is"):
            read(path)
    path.write_text('{"format": "outpace-data", "version": 99}\n')
    with pytest.raises(UsageError, match="update Outpace"):
        read(path)
    path.write_text('{"format": "outpace-data", "version": 1}\n')
    with pytest.raises(UsageError, match="write some with `outpace train data`"):
        read(path)
    with pytest.raises(OutpaceError, match="cannot read"):
        read(tmp_path / "none.jsonl")


# The command, and the documentation.


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path / "prompts.jsonl", {"prompt": "the dog"}, {"turns": ["a fox", "and then?"]})
    (block,) = blocks("docs/training/data.md")
    scope: dict[str, Any] = {"lm": chatty()}
    exec(block, scope)
    assert len(scope["records"]) == 3 + 8 and scope["batch"].tokens.shape == scope["batch"].mask.shape


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(train_data.data)
    monkeypatch.setattr(train_data, "load_model", lambda name, how: chatty(name=name))
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_answers_of_both_kinds(command: Callable[..., Any], tmp_path: Path) -> None:
    asked = prompt_file(tmp_path / "p.jsonl", {"question": "the dog"}, {"prompt": "a fox"}, {"text": "long " * 50})
    base = ["toy", "--output", tmp_path / "d.jsonl", "--prompts", asked, "--max-tokens", 4, "--method", "plain",
            "--self-written", 2, "--prompt-tokens", 8, "--longest-prompt", 30]  # fmt: skip
    done = command(*base, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["answers"] == len(read(tmp_path / "d.jsonl")) == 4
    assert found["skipped"]["the prompt is too long: raise longest_prompt"] == 1
    again = command(*base)
    assert "0 new answers" in again.stdout and "skipped 1" in again.stderr
    other = command(*base, "--temperature", 0.5)
    assert other.exit_code == 2 and "choose another --output" in other.stderr


def test_each_worker_has_a_file_of_its_own(command: Callable[..., Any], tmp_path: Path) -> None:
    asked = prompt_file(tmp_path / "p.jsonl", *({"prompt": f"say {i}"} for i in range(5)))
    for shard in ("1/2", "2/2"):
        done = command("toy", "--output", tmp_path / "d.jsonl", "--prompts", asked, "--max-tokens", 3, "--shard", shard)
        assert done.exit_code == 0, done.output
    assert [len(read(tmp_path / f"d-{i}-of-2.jsonl")) for i in (1, 2)] == [3, 2]


def test_the_command_names_the_fix(command: Callable[..., Any], tmp_path: Path) -> None:
    nothing = command("toy", "--output", tmp_path / "d.jsonl")
    assert nothing.exit_code == 2 and "--self-written" in nothing.stderr
    shard = command("toy", "--output", tmp_path / "d.jsonl", "--self-written", 2, "--shard", "9/8")
    assert shard.exit_code == 2 and "the second of eight" in shard.stderr


def test_an_interrupted_command_says_how_to_go_on(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_data._Watch, "__call__", lambda self, done: Stop(1)(done))
    done = command("toy", "--output", tmp_path / "d.jsonl", "--self-written", 3, "--prompt-tokens", 8)
    assert done.exit_code == 130 and "the same command continues" in done.stderr
    assert len(read(tmp_path / "d.jsonl")) >= 1
