"""Constraint: the grammar of a reply that must follow a schema or call a tool, with reasoning before it."""

from __future__ import annotations

from typing import Any

from outpace.sampling.grammar import GrammarCompiler
from outpace.serve.chat.conversation import Conversation, OutputRule
from outpace.serve.chat.output import TextReading
from outpace.serve.chat.reasoning import ReasoningMarks
from outpace.serve.chat.tool_formats import Term
from outpace.serve.web.failures import bad_field

SPACE = "/[ \\n\\t]{0,8}/"


def request_fields(conversation: Conversation, reading: TextReading, compiler: GrammarCompiler) -> dict[str, Any]:
    """Return the fields of a request that constrain its output."""
    rule, calls = conversation.rule, _calls(conversation, reading, compiler.term)
    must_call = conversation.tool_use.mode == "required"
    if rule is None and not must_call:
        return {}
    if calls is None and reading.marks is None:
        return {} if rule is None else rule.fields
    rules, bodies = [], []
    if calls is not None:
        rules.append(calls)
        bodies.append("calls")
    if rule is not None and not must_call:
        rules.append(f"answer: {_answer(rule)}\n")
        bodies.append("answer")
    thought = ""
    if reading.marks is not None:
        rules.append(_thought(reading.marks, reading.inside, compiler.term))
        thought = "thought "
    return {"grammar": f"start: {thought}body\nbody: {' | '.join(bodies)}\n{''.join(rules)}"}


def _calls(conversation: Conversation, reading: TextReading, term: Term) -> str | None:
    if reading.tools is None or not conversation.offered:
        return None
    return reading.tools.rules(conversation.offered, conversation.tool_use.several, term)


def _answer(rule: OutputRule) -> str:
    import json

    if rule.json_schema is not None:
        return f"%json {json.dumps(rule.json_schema)}"
    if rule.regex is not None:
        return f"/{_escaped(rule.regex)}/"
    raise bad_field("structured_outputs", "a grammar cannot be combined with tools, or with a model that reasons first")


def _escaped(regex: str) -> str:
    """Write an expression between slashes."""
    out, escaped = "", False
    for character in regex:
        out += "\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character
        escaped = character == "\\" and not escaped
    return out


def _thought(marks: ReasoningMarks, inside: bool, term: Term) -> str:
    """Any text up to the end of the reasoning; a reply that does not begin inside may have none."""
    close = term(marks.close)
    # A mark that is text ends the text before it; one that is a token of its own follows it.
    text = f"thinking[suffix={close}]: /(.|\\n)*/\n" if close.startswith('"') else f"thinking: /(.|\\n)*/ {close}\n"
    body = f"thinking {SPACE}" if inside else f"({term(marks.open)} thinking {SPACE})?"
    return f"thought: {body}\n{text}"
