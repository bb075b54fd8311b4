"""The bench: its prompts, the order of its runs, its statistics, what it writes. Nothing here depends on time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from outpace import registry
from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.bench import markers, plan as planning, record as recording, report, tables
from outpace.bench.contestants import (
    OutpaceContestant,
    RunRules,
    TransformersContestant,
    sweep,
    transformers_contestants,
)
from outpace.bench.plan import BenchPlan
from outpace.bench.record import BenchRecord, Writer
from outpace.bench.run import AnswerSettings, Condition, Contestant, Group, Run, measure, warm_up
from outpace.bench.specs import MethodSpec, specs
from outpace.bench.summary import Interval, speedup, summarize
from outpace.cli import bench as command, checks
from outpace.cli.common import app
from outpace.core.stats import Stats
from outpace.errors import OutpaceError, UsageError
from outpace.prompts import tasks
from outpace.sampling.settings import Sampling
from outpace.testing import ByteTokenizer, ToyLM
from outpace.text import first_difference
from outpace.tracing import trace
from tests.tiny_models import build

runner = CliRunner()


def toy_model(layers: int = 2) -> Model:
    return Model(ToyLM(layers, vocab=257), ByteTokenizer(), name="toy")


def plain_and(model: Model, *methods: str, draft: Model | None = None) -> list[Contestant]:
    return [OutpaceContestant(model, spec, draft) for spec in specs(methods, draft is not None)]


def groups_of(*conditions: Condition) -> list[Group]:
    return [
        Group(
            number=i,
            condition=condition,
            names=[f"p{i}.{k}" for k in range(condition.batch)],
            prompts=[[65 + i + k, 66, 67] for k in range(condition.batch)],
            settings=AnswerSettings(6, Sampling(condition.temperature)),
        )
        for i, condition in enumerate(conditions)
    ]


class Scripted:
    """A contestant that notes when it ran and when it forgot."""

    def __init__(self, name: str, log: list[str], answer: Callable[[list[int]], list[int]] = lambda prompt: [1, 2, 3]):
        self.name, self.log, self.answer = name, log, answer

    def fresh(self) -> None:
        self.log.append(f"fresh {self.name}")

    def run(self, prompts: list[list[int]], settings: AnswerSettings) -> Run:
        self.log.append(self.name)
        return Run(self.name, [self.answer(prompt) for prompt in prompts], 1.0)


# The prompts.


def test_our_own_prompts_are_of_every_task() -> None:
    found = tasks.load()
    counts = {task: sum(prompt.task == task for prompt in found) for task in tasks.TASKS}
    assert counts == {task: 0 if task == tasks.COPY else 4 for task in tasks.TASKS}
    assert len({prompt.id for prompt in found}) == len(found)
    for prompt in found:
        assert all(turn.isascii() for turn in prompt.turns)
        assert len(prompt.turns) == (2 if prompt.task == "mt_bench" else 1)
        assert (prompt.answer is not None) == (prompt.task in ("qa", "math"))
        if prompt.task in ("rag", "summarization"):
            assert 120 <= len(prompt.turns[0].split()) <= 250, prompt.id


def test_a_file_may_have_prompts_turns_or_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    lines: list[dict[str, Any]] = [
        {"question_id": 81, "category": "coding", "turns": ["a", "b"], "reference": []},
        {"question_id": 401, "category": "math_reasoning", "turns": ["c"]},
        {"task": "math", "id": 7, "prompt": "1+1?", "answer": 2},
        {"messages": chat},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = tasks.load(path)
    assert [(p.task, p.id, p.turns, p.answer) for p in found] == [
        ("mt_bench", "81", ("a", "b"), None), ("math", "401", ("c",), None), ("math", "7", ("1+1?",), "2"),
        ("own", "4", ("Hi.",), None),
    ]  # fmt: skip
    assert found[3].messages == (chat[0],)
    assert [p.id for p in tasks.load(path, ["math_reasoning"], limit=1)] == ["401"]
    with pytest.raises(UsageError, match="did you mean 'math'"):
        tasks.load(path, ["maths"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"text": "x"}', 'needs one of "prompt"'),
        ('{"prompt": "x", "turns": ["y"]}', 'needs one of "prompt"'),
        ('{"prompt": " "}', '"prompt" has no text'),
        ('{"turns": []}', '"turns" has no text'),
        ('{"turns": ["x", 3]}', '"turns" has no text'),
        ('{"messages": "hi"}', '"messages" must be a list'),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', 'must have the role "user"'),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl, line 2: ") as caught:
        tasks.load(path)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_or_is_empty(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="cannot read the prompts"):
        tasks.load(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no prompts"):
        tasks.load(tmp_path / "empty.jsonl")


def test_turns_follow_the_answers_before_them() -> None:
    model = toy_model()
    prompt = tasks.Prompt("chat", "1", ("first", "second"), ({"role": "system", "content": "be brief"},))
    assert bytes(tasks.encode(prompt, model)).decode() == "be brief\n\nfirst"
    assert bytes(tasks.encode(prompt, model, ["said"])).decode() == "be brief\n\nfirst\n\nsaid\n\nsecond"
    asked = planning.encode_turns(BenchPlan(("chat",), max_tokens=4), model, [prompt, prompt], lambda: None)
    assert [a.name for a in asked] == ["1.1", "1.1", "1.2", "1.2"]
    answer = model.generate(asked[0].tokens, method="plain", max_tokens=4).text
    assert asked[2].tokens == tasks.encode(prompt, model, [answer])


def test_copy_prompts_fit_and_are_the_same_every_time() -> None:
    model = toy_model()
    short, again, longer = (tasks.copying(model, n, 2) for n in (400, 400, 900))
    assert short == again
    for prompts, length in ((short, 400), (longer, 900)):
        assert all(length - 45 < len(tasks.encode(p, model)) <= length for p in prompts)
    starts = [p.answer.split("\n")[0] for p in short + longer if p.answer]
    assert len(set(starts)) == 4
    assert all(p.answer and p.answer in p.turns[0] for p in short)
    with pytest.raises(UsageError, match="100 tokens are too few for the copy task"):
        tasks.copying(model, 100, 1)


# The groups.


def asked(task: str, count: int, context: int | None = None) -> list[planning.Turn]:
    return [planning.Turn(task, context, f"{task}{i}", [i]) for i in range(count)]


def test_groups_are_of_one_task_and_what_is_left_over_is_mixed() -> None:
    found = planning.groups(BenchPlan(batches=(1, 2)), asked("qa", 3) + asked("math", 3) + asked("own", 1))
    shown = [(g.condition.task, g.condition.batch, g.names) for g in found]
    assert shown == [
        ("qa", 1, ["qa0"]), ("qa", 1, ["qa1"]), ("qa", 1, ["qa2"]),
        ("math", 1, ["math0"]), ("math", 1, ["math1"]), ("math", 1, ["math2"]), ("own", 1, ["own0"]),
        ("qa", 2, ["qa0", "qa1"]), ("math", 2, ["math0", "math1"]), ("mixed", 2, ["qa2", "math2"]),
    ]  # fmt: skip
    assert [g.number for g in found] == list(range(len(found)))
    with pytest.raises(UsageError, match="too few for a batch of 8"):
        planning.groups(BenchPlan(batches=(8,)), asked("qa", 3))


def test_a_plan_refuses_what_cannot_be() -> None:
    for wrong in ({"batches": (0,)}, {"contexts": (0,)}, {"limit": 0}, {"max_tokens": 0}, {"temperatures": (-1.0,)}):
        with pytest.raises(UsageError):
            BenchPlan(**wrong)  # type: ignore[arg-type]
    small = Model(ToyLM(vocab=257, max_length=16), ByteTokenizer())
    with pytest.raises(UsageError, match="lower --max-tokens or --context"):
        planning.encode_turns(BenchPlan(("qa",)), small, tasks.load(None, ["qa"]), lambda: None)


# The runs.


def test_the_order_rotates_and_learning_ends_with_the_round_and_the_sweep() -> None:
    log: list[str] = []
    everyone = [Scripted(name, log) for name in "abc"]
    conditions = [Condition("qa"), Condition("qa"), Condition("qa", batch=2), Condition("qa", temperature=1.0)]
    seen: list[Run] = []
    runs = measure(everyone, groups_of(*conditions), 2, seen.append)
    fresh = [f"fresh {name}" for name in "abc"]
    first = [*fresh, *"abc", *"bca", *fresh, *"cab", *fresh, *"abc"]
    second = [*fresh, *"bca", *"cab", *fresh, *"abc", *fresh, *"bca"]
    assert log == first + second
    assert runs == seen and len(runs) == 24
    assert {(run.round, run.group, run.condition) for run in runs} == {
        (turn, i, condition) for turn in range(2) for i, condition in enumerate(conditions)
    }


def test_a_method_keeps_what_it_learned_within_a_round_only() -> None:
    contestant = OutpaceContestant(toy_model(), MethodSpec.parse("suffix"))
    drafters = []
    run = contestant.run

    def spy(prompts: list[list[int]], settings: AnswerSettings) -> Run:
        drafters.append(contestant.drafter)
        return run(prompts, settings)

    contestant.run = spy  # type: ignore[method-assign]
    measure([contestant], groups_of(Condition("qa"), Condition("qa")), 2)
    a, b, c, d = drafters
    assert a is b and c is d and a is not c


def test_the_caches_are_empty_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = toy_model(), toy_model(layers=1)
    held: list[int] = []
    clear = ToyLM.clear

    def spy(lm: ToyLM) -> None:
        clear(lm)
        held.append(sum(len(row.tokens) for row in lm.slots))

    monkeypatch.setattr(ToyLM, "clear", spy)
    contestant = OutpaceContestant(model, MethodSpec.parse("draft:depth=3"), draft)
    prompts = [[65, 66, 67] * 10]
    first, second = (contestant.run(prompts, AnswerSettings(6)) for _ in range(2))
    assert held == [0, 0, 0, 0]  # both models, twice
    assert first.tokens == second.tokens


def test_every_method_answers_as_plain_decoding_in_batches() -> None:
    model, draft = toy_model(), toy_model(layers=1)
    everyone = plain_and(model, draft=draft)
    assert [c.name for c in everyone][:2] == ["plain", "draft"] and len(everyone) > 4
    groups = groups_of(Condition("qa"), Condition("qa", batch=3, temperature=0.8))
    record = BenchRecord({"contestants": [c.name for c in everyone]}, groups, measure(everyone, groups, 1))
    for figures in summarize(record).total:
        assert figures.divergences == [] and figures.compared == figures.answers == 4
        assert figures.tokens == 24


def test_specs() -> None:
    assert "draft" not in [spec.name for spec in specs([], draft=False)]
    found = specs(["recycling:nodes=8,k=4", "plain", "recycling:nodes=8,k=4"], draft=False)
    assert [(spec.name, spec.options) for spec in found] == [("plain", {}), ("recycling", {"nodes": 8, "k": 4})]
    for wrong, message in {
        "ngrm": "did you mean 'ngram'", "ngram:maxn=3": "did you mean 'max_n'", "draft": "add --draft MODEL",
        "ngram:3": "not of the form option=value",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=message):
            specs([wrong], draft=False)
    lossy = OutpaceContestant(
        toy_model(), MethodSpec.parse("suffix"), rules=replace(RunRules(), verifier=MethodSpec.parse("typical"))
    )
    assert lossy.name == "suffix (lossy)"


def test_policies_and_methods_are_swept() -> None:
    """Every method under every policy, by name; plain decoding, which drafts nothing, once."""
    model, methods = toy_model(), specs(["suffix", "via_sd"], draft=False)
    policies = [MethodSpec.parse(text) for text in ("confidence:threshold=0.3", "auto")]
    swept = sweep(model, methods, None, policies, None)
    assert [one.name for one in swept] == [
        "plain", "suffix, confidence:threshold=0.3", "suffix, auto", "via_sd, confidence:threshold=0.3 (lossy)",
        "via_sd, auto (lossy)",
    ]  # fmt: skip
    assert [registry.policy("auto").__class__ is type(one.policy) for one in swept] == [False, False, True, False, True]
    own = sweep(model, methods, None, [], MethodSpec.parse("residual"))
    assert [one.name for one in own] == ["plain", "suffix", "via_sd (lossy)"]
    assert {type(one.verifier).__name__ for one in own} == {"Residual"}
    assert type(OutpaceContestant(model, MethodSpec.parse("via_sd")).verifier).__name__ == "Tiered"
    assert OutpaceContestant(model, MethodSpec.parse("via_sd:exact=true")).name == "via_sd:exact=true"


def test_transformers_answers_as_plain_decoding() -> None:
    model = wrap(build("llama", num_key_value_heads=2), name="tiny")
    draft = wrap(build("llama", num_key_value_heads=2, num_hidden_layers=2))
    everyone = [*plain_and(model, "suffix"), *transformers_contestants(model, draft, batched=True)]
    assert [c.name for c in everyone[2:]] == [
        "Transformers generate", "Transformers prompt lookup, one by one", "Transformers assisted, one by one",
    ]  # fmt: skip
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 11], [12] * 8]
    group = Group(0, Condition("qa", 3), ["a", "b", "c"], prompts, AnswerSettings(8))
    assert warm_up(everyone, group, lambda: None) == {}
    record = BenchRecord({"contestants": [c.name for c in everyone]}, [group], measure(everyone, [group], 1))
    summary = summarize(record)
    assert summary.baselines == ["plain", *(c.name for c in everyone[2:])]
    assert all(figures.compared == 3 and not figures.divergences for figures in summary.total)
    sampled = everyone[2].run(prompts, AnswerSettings(8, Sampling(0.9, top_p=0.9)))
    assert not sampled.compared and sampled.count == 24


def test_answers_of_transformers_end_with_the_stop_token() -> None:
    model = wrap(build("llama", num_key_value_heads=2))
    long = TransformersContestant("x", model).run([[5, 6, 7]], AnswerSettings(8)).tokens[0]
    model.stop_token_ids = frozenset([long[2]])
    end = long.index(long[2]) + 1
    prompts = [[5, 6, 7], [9, 10]]
    found = TransformersContestant("x", model).run(prompts, AnswerSettings(8)).tokens
    assert found[0] == long[:end]
    assert found == OutpaceContestant(model, MethodSpec.parse("plain")).run(prompts, AnswerSettings(8)).tokens


def test_who_cannot_take_part_is_left_out() -> None:
    def refuse(prompt: list[int]) -> list[int]:
        raise ValueError("assisted generation is not supported with stateful models\nsee the docs")

    log: list[str] = []
    failed = warm_up([Scripted("a", log), Scripted("b", log, refuse)], groups_of(Condition("qa"))[0], lambda: None)
    assert failed == {"b": "assisted generation is not supported with stateful models"}


# What the runs say.


def timed(contestant: str, seconds: dict[int, list[float]], tokens: int = 10) -> list[Run]:
    return [
        Run(contestant, [[1] * tokens], spent, group=group, round=turn, condition=Condition("qa"))
        for group, rounds in seconds.items()
        for turn, spent in enumerate(rounds)
    ]


def test_the_interval_holds_the_ratio_and_is_paired() -> None:
    noise = np.random.default_rng(1)
    base = {group: [float(noise.uniform(1, 9))] * 3 for group in range(30)}  # prompts differ, by far more than 2
    runs = timed("plain", base)
    runs += timed("fast", {g: [t / 2 * float(noise.normal(1, 0.05)) for t in rounds] for g, rounds in base.items()})
    found = speedup(runs, "fast", "plain")
    assert found.low is not None and found.high is not None
    assert found.low < 2 < found.high and found.low < found.value < found.high
    assert found.high - found.low < 0.15
    assert speedup(runs, "fast", "plain") == found
    assert speedup(runs, "plain", "plain") == Interval(1.0, 1.0, 1.0)


def test_a_slow_round_does_not_count_and_lengths_may_differ() -> None:
    runs = timed("plain", {0: [2.0, 2.0, 50.0]}) + timed("half", {0: [1.0, 1.0, 1.0]}, tokens=5)
    assert speedup(runs, "half", "plain") == Interval(1.0)  # half the tokens in half the time
    with pytest.raises(UsageError, match="no group in common"):
        speedup(runs, "half", "other")


def test_divergences_are_counted_once_with_their_position() -> None:
    log: list[str] = []
    wrong = Scripted("wrong", log, lambda prompt: [1, 2, 9] if prompt[0] == 66 else [1, 2, 3])
    short = Scripted("short", log, lambda prompt: [1, 2])
    groups = groups_of(Condition("qa"), Condition("qa"), Condition("math", batch=2))
    everyone = [Scripted("plain", log), wrong, short]
    record = BenchRecord({"contestants": ["plain", "wrong", "short"]}, groups, measure(everyone, groups, 3))
    plain, wrongs, shorts = summarize(record).total
    assert plain.divergences == []
    assert [(d.prompt, d.position) for d in wrongs.divergences] == [("qa p1.0", 2)]
    assert len(shorts.divergences) == shorts.compared == 4
    assert tables.notes(record, summarize(record))[0].startswith("wrong: qa p1.0 (batch 1")
    record.runs = [replace(run, compared=run.contestant != "wrong") for run in record.runs]
    uncompared = summarize(record).total[1]
    assert uncompared.divergences == [] and uncompared.compared == 0
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1], [1, 2]) == 1


def sample_record() -> BenchRecord:
    """Three contestants, two batch sizes, two context lengths, figures made up."""
    conditions = [Condition("qa"), Condition("copy", 1, 256), Condition("copy", 1, 512)]
    conditions += [replace(condition, batch=2) for condition in conditions]
    groups = groups_of(*conditions, *conditions)
    stats = Stats(3, 4, 4, 1, [2, 1], [1, 1], {"draft": 0.1, "score": 0.9})
    runs = [
        Run(name, [[1, 2, 3]] * len(group.prompts), (1 + group.number / 10) / speed, stats if speed >= 1 else None,
            10**9, True, group.number, turn, group.condition)
        for name, speed in (("plain", 1), ("Transformers generate", 0.9), ("suffix <b>", 1.5))
        for turn in range(2)
        for group in groups
    ]  # fmt: skip
    header = recording.provenance(toy_model(), "outpace bench <toy>", {"rounds": 2})
    return BenchRecord(header | {"contestants": ["plain", "Transformers generate", "suffix <b>"]}, groups, runs)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record, path = sample_record(), tmp_path / "new" / "runs.jsonl"
    record.left_out["b"] = "why"
    with Writer(path, record.header, record.groups) as out:
        out.left_out("b", "why")
        for run in record.runs:
            out.run(run)
    assert recording.read(path) == record
    first = json.loads(path.read_text().splitlines()[0])
    assert first["format"] == "outpace-bench" and first["arguments"] == {"rounds": 2}
    assert set(first["versions"]) == {"outpace", "torch", "transformers", "python"}
    assert all(first[key] for key in ("date", "platform", "cpu", "threads", "device", "command"))
    with path.open("a") as file:
        file.write('{"type":"run","cont')  # broken off
    assert recording.read(path) == record
    path.write_text("{}\n")
    with pytest.raises(OutpaceError, match=r"not a runs\.jsonl"):
        recording.read(path)
    path.write_text(json.dumps(first) + '\n{"type":"run"}\n')
    with pytest.raises(OutpaceError, match="line 2 is not of this format"):
        recording.read(path)


def test_figures_by_slice() -> None:
    summary = summarize(sample_record())
    labels = [part[0].part.label for part in summary.parts]
    assert labels[:3] == ["all, batch 1", "all, batch 2", "qa, batch 1"] and "copy 512, batch 2" in labels
    suffix = summary.total[2]
    assert suffix.speedups["plain"].value == pytest.approx(1.5)
    assert suffix.speedups["Transformers generate"].value == pytest.approx(1.5 / 0.9)
    assert suffix.acceptance_by_depth == [0.5, 1.0]
    assert suffix.draft_share == pytest.approx(0.1)
    assert suffix.memory == 10**9 and summary.total[1].tokens_per_pass is None


def test_the_page_needs_nothing_and_escapes_names() -> None:
    record = sample_record()
    page = report.render(record, summarize(record))
    assert "http" not in page and "url(" not in page.replace("url(#", "")
    assert "suffix &lt;b&gt;" in page and "suffix <b>" not in page and "&lt;toy&gt;" in page
    assert page.count("<svg") == 5  # speed-up, tokens per second, acceptance, batch, context
    assert "#0102" not in page, "every stand-in colour is a variable of the page"
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_markdown_goes_between_the_markers(tmp_path: Path) -> None:
    record, path = sample_record(), tmp_path / "b.md"
    path.write_text("before\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\nafter\n")
    text = tables.markdown(record, summarize(record))
    markers.update(path, "cpu", text)
    markers.update(path, "cpu", text)
    assert path.read_text() == f"before\n<!-- bench:cpu -->\n\n{text}\n\n<!-- /bench:cpu -->\nafter\n"
    assert "outpace bench <toy>" in text and "| suffix <b> | 4" in text and "| copy 512, batch 2 |" in text
    with pytest.raises(UsageError, match="has no <!-- bench:gpu -->"):
        markers.around(path, "gpu")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_terminal_table_never_cuts_a_number(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    summary = summarize(sample_record())
    console.print(tables.to_rich(tables.totals(summary.total, summary.baselines), width))
    shown = console.export_text()
    assert "1.50" in shown and "…" not in shown and "suffix <b>" in shown
    assert ("1.50-1.50" in shown) == (width == 200)


# The command.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The command on a toy model and two prompts, with what else is given."""
    monkeypatch.setattr(command, "load_model", lambda name, how: toy_model())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcabc"}\n{"turns": ["xyz", "zyx"], "task": "two"}\n')

    def invoke(*given: str) -> Any:
        base = ["bench", "--prompts", str(prompts), "--no-transformers", "--max-tokens", "4", "--rounds", "2"]
        return runner.invoke(app, [*base, "-m", "suffix", "--output", str(tmp_path / "out"), *given])

    return invoke


def test_the_command_measures_reports_and_reports_again(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--json", "--trace", str(tmp_path / "t.jsonl"))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [figures["contestant"] for figures in found["total"]] == ["plain", "suffix"]
    assert [part[0]["part"]["label"] for part in found["parts"]] == ["own", "two"]
    assert found["header"]["arguments"]["max_tokens"] == 4
    page = tmp_path / "out" / "report.html"
    assert page.exists() and str(page) in done.stderr.replace("\n", "")
    requests = trace.read(tmp_path / "t.jsonl").requests
    assert [request.method for request in requests] == ["plain"] * 3 + ["suffix"] * 3
    page.unlink()
    again = runner.invoke(app, ["bench", "--from", str(tmp_path / "out" / "runs.jsonl"), "--json"])
    assert page.exists() and json.loads(again.stdout) == found
    shown = runner.invoke(app, ["bench", "--from", str(tmp_path / "out" / "runs.jsonl")])
    assert "suffix" in shown.stdout and "x plain, by task" in shown.stdout


def test_the_command_sweeps_policies(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run(
        "--json", "--no-page", "-m", "ngram", "--policy", "fixed:depth=2", "--policy", "confidence", "--rounds", "1"
    )
    assert done.exit_code == 0, done.output
    assert [figures["contestant"] for figures in json.loads(done.stdout)["total"]] == [
        "plain", "suffix, fixed:depth=2", "suffix, confidence", "ngram, fixed:depth=2", "ngram, confidence",
    ]  # fmt: skip


def test_the_command_updates_a_document(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "d.md").write_text("<!-- bench:toy --><!-- /bench:toy -->")
    done = run("--markdown", "--update", f"{tmp_path / 'd.md'}#toy")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() in (tmp_path / "d.md").read_text()


def test_an_interrupted_run_is_reported(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[int] = []
    answer = OutpaceContestant.run

    def breaking(self: OutpaceContestant, prompts: list[list[int]], settings: AnswerSettings) -> Run:
        calls.append(1)
        if len(calls) > 5:  # two of the warm-up, three on the clock
            raise KeyboardInterrupt
        return answer(self, prompts, settings)

    monkeypatch.setattr(OutpaceContestant, "run", breaking)
    done = run()
    assert done.exit_code == 130, done.output
    assert "suffix" in done.stdout and (tmp_path / "out" / "report.html").exists()
    assert len(recording.read(tmp_path / "out" / "runs.jsonl").runs) == 3
    calls[:] = [1] * 5
    assert run().exit_code == 130, "interrupted before anything was measured"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-m", "ngrm"], "did you mean 'ngram'"),
        (["-m", "draft"], "add --draft MODEL"),
        (["--policy", "fxed"], "did you mean 'fixed'"),
        (["--task", "tow"], "did you mean 'two'"),
        (["--batch", "9"], "too few for a batch of 9"),
        (["--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["--json", "--markdown"], "use one of them"),
        (["--update", "x.md"], "--update needs FILE.md#NAME"),
        (["--update", "none.md#x"], "cannot update"),
        (["--from", "none.jsonl"], "cannot read"),
        (["--transformers"], "add --no-transformers"),
    ],
)
def test_wrong_arguments_are_one_line(run: Callable[..., Any], given: list[str], message: str) -> None:
    done = run(*given)
    assert done.exit_code in (1, 2)
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output + done.stderr


def test_what_is_missing_is_said_before_anything_runs(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    done = run()
    assert done.exit_code == 1
    assert done.stderr == "error: report.html needs matplotlib: pip install 'outpace[bench]', or use --no-page\n"


def test_help() -> None:
    shown = runner.invoke(app, ["bench", "--help"])
    assert shown.exit_code == 0
    assert all(flag in shown.output for flag in ("--method", "--task", "--batch", "--context", "--from", "--update"))
