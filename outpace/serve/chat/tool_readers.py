"""Tool readers: find the calls in content that comes in pieces, in each of the usual formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from outpace.serve.chat.json_reader import CallReader
from outpace.serve.chat.parts import CallArguments, CallStart, ContentText, OutputPart
from outpace.text import overlap


class ToolReader(ABC):
    """Reads content; a subclass says where calls begin and end. What begins like a call and is none stays content."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]):
        self.names, self.new_id = names, new_id
        self._text = ""  # not read yet
        self._call: CallReader | None = None
        self._before = ""  # what stood before the call that is being read
        self._count = 0  # calls with a name so far
        self._named = False  # the call that is being read is one of them
        self._last = False  # no more text will come

    def push(self, text: str) -> list[OutputPart]:
        self._text += text
        out: list[OutputPart] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> list[OutputPart]:
        """Return what was held back, because it might have become a call."""
        self._last = True
        out = self.push("")
        if self._call is not None and not self._named:
            self._give_up(out)
        if self._text.strip():
            out.append(ContentText(self._text))
        return out

    def _step(self, out: list[OutputPart]) -> bool:
        if self._call is None:
            return self._look(out)
        if not self._text:
            return False
        self._text = self._call.push(self._text)
        self._report(out, self._call)
        return True

    @abstractmethod
    def _look(self, out: list[OutputPart]) -> bool:
        """Read up to the next call; return False if more text is needed."""

    def _end_call(self) -> None:  # noqa: B027 (the calls of some formats just follow each other)
        """Note that a call has been read."""

    def _begin(self, before: str, call: CallReader | None = None) -> None:
        self._call, self._before, self._named = call or CallReader(), before, False

    def _report(self, out: list[OutputPart], call: CallReader) -> None:
        if call.broken and not self._named:
            return self._give_up(out)
        if not self._named and call.name is not None and self._accepts(call.name):
            out.append(CallStart(self._count, self.new_id(), call.name))
            self._count, self._named = self._count + 1, True
        if self._named and (more := call.take_arguments()):
            out.append(CallArguments(self._count - 1, more))
        if call.done or call.broken:
            if not self._named:
                return self._give_up(out)
            self._call = None
            self._end_call()

    def _accepts(self, name: str) -> bool:
        return True

    def _give_up(self, out: list[OutputPart]) -> None:
        """What has been read as a call was content."""
        assert self._call is not None
        out.append(ContentText(self._before + self._call.raw))
        self._call = None


class MarkedReader(ToolReader):
    """Hermes and Qwen: `<tool_call>{...}</tool_call>`, after content or after another call."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str], new_id: Callable[[], str]):
        super().__init__(names, new_id)
        self._closing = False

    def _look(self, out: list[OutputPart]) -> bool:
        if self._closing and not self._close():
            return False
        content, begin, rest = self._text.partition(self.begin)
        if not begin and not self._last:
            content = content[: len(content) - overlap(content, self.begin)].rstrip()
            rest = self._text[len(content) :]
        elif begin:
            whole, content = content, content.rstrip()
            self._begin(whole[len(content) :] + begin)
        if content and (content.strip() or not self._count):
            out.append(ContentText(content))
        self._text = rest
        return bool(begin)

    def _end_call(self) -> None:
        self._closing = True

    def _close(self) -> bool:
        rest = self._text.lstrip()
        cut = self.end.startswith(rest) and rest != self.end  # there is only a part of the mark
        if cut and not self._last:
            return False
        self._text, self._closing = "" if cut else rest.removeprefix(self.end), False
        return True


class LeadingReader(ToolReader):
    """Llama 3: the whole content is `{"name": ..., "parameters": {...}}`, or several with semicolons between them."""

    tag = "<|python_tag|>"

    def __init__(self, names: Collection[str], new_id: Callable[[], str]):
        super().__init__(names, new_id)
        self._content = False  # all that follows is content

    def _look(self, out: list[OutputPart]) -> bool:
        if self._content:
            if self._text:
                out.append(ContentText(self._text))
            self._text = ""
            return False
        rest = self._text.lstrip(" \n\t;," if self._count else " \n\t")
        if not self._count and self.tag.startswith(rest[: len(self.tag)]) and rest != self.tag and not self._last:
            return False
        rest = rest.removeprefix(self.tag).lstrip()
        if rest.startswith("{"):
            self._begin("")
            self._text = rest
            return True
        self._content = bool(rest)
        return self._content

    def _accepts(self, name: str) -> bool:
        return name in self.names

    def _give_up(self, out: list[OutputPart]) -> None:
        super()._give_up(out)
        self._content = True


class ListReader(ToolReader):
    """Mistral: `[TOOL_CALLS][{...}, {...}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    begin, arguments = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, names: Collection[str], new_id: Callable[[], str]):
        super().__init__(names, new_id)
        self._inside = False  # after the mark
        self._list = False

    def _look(self, out: list[OutputPart]) -> bool:
        if self._inside:
            return self._item()
        content, begin, rest = self._text.partition(self.begin)
        if not begin and not self._last:
            content = content[: len(content) - overlap(content, self.begin)]
            rest = self._text[len(content) :]
        if content and (content.strip() or not self._count):
            out.append(ContentText(content))
        self._text, self._inside, self._list = rest, bool(begin), False
        return bool(begin)

    def _item(self) -> bool:
        """Begin the next call after a mark, of either kind."""
        rest = self._text.lstrip(" \n\t,") if self._list else self._text.lstrip()
        if not rest:
            return False
        if rest[0] == "[" and not self._list:
            self._list, self._text = True, rest[1:]
        elif self._list and rest[0] == "]":
            self._inside, self._text = False, rest[1:]
        elif self._list or rest[0] == "{":
            self._begin(self.begin)
            self._text = rest
        elif "{" in rest:
            head, _, _ = rest.partition("{")
            self._begin(self.begin + head, CallReader(head.partition("[")[0].strip()))
            self._text = rest[len(head) :]
        else:
            return False
        return True

    def _end_call(self) -> None:
        self._inside = self._list

    def _give_up(self, out: list[OutputPart]) -> None:
        super()._give_up(out)
        self._inside = self._list = False
