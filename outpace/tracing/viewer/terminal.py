"""A trace in the terminal: the content of the HTML page, without the trees."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from outpace.tracing.viewer.page import TARGET, PageData, PassData, RequestData

STYLES = ("green", "cyan", "yellow", "magenta", "blue", "red", "bright_green", "bright_cyan")
MOST_PASSES = 40  # shown in the table
BAR = 30  # width in characters


def render(data: PageData, request: int | None = None) -> RenderableType:
    """The whole trace, or one request of it."""
    shown = data["requests"] if request is None else [data["requests"][request]]
    parts = [part for one in shown for part in _request(data, one)]
    return Group(_header(data), *(parts or [Text("There are no requests in this trace.")]))


def _header(data: PageData) -> Text:
    totals = data["totals"]
    kind = ("lossless", "green") if data["lossless"] else ("LOSSY", "bold red")
    about = f"method {data['methods']} · verifier {data['verifiers']} · {data['versions']}"
    counts = (
        f"{totals['tokens']} tokens in {totals['passes']} passes, {totals['tokens_per_pass']:.2f} tokens per pass · "
        f"{totals['accepted']} of {totals['drafted']} draft tokens accepted · {totals['seconds']:.2f} s in passes"
    )
    return Text.assemble((plain(data["model"]), "bold"), " · ", kind, f"\n{plain(about)}\n{counts}")


def _request(data: PageData, request: RequestData) -> Iterator[RenderableType]:
    yield Rule(Text(f"request {request['id']}: {plain(request['method'])}"), align="left")
    about = f"policy {request['policy']} · {request['settings']} · {request['prompt_tokens']} prompt tokens"
    yield Text(plain(f"{about} · ended: {request['end']}"), style="dim")
    if request["error"]:
        yield Text(plain(request["error"]), style="red")
    yield Text()
    yield answer(request)
    yield Text()
    yield _legend(data, request)
    if request["stats"]["offered"]:
        yield _depths(request)
    if request["passes"]:
        yield _passes(data, request)


def answer(request: RequestData) -> Text:
    """The answer: the colour of a token shows its source, and an underline shows where a pass begins."""
    text = Text()
    for record in request["passes"]:
        for i, (piece, source) in enumerate(zip(record["text"], record["sources"], strict=True)):
            text.append(plain(piece), f"{_style(source)} {'underline' if i == 0 else ''}".strip())
    return text


def _legend(data: PageData, request: RequestData) -> Text:
    lines = [
        Text(f"{plain(data['sources'][p['source']])} · {p['accepted']} of {p['drafted']} accepted", _style(p["source"]))
        for p in request["proposers"]
    ]
    own = Text(f"the target's own choice · {request['own']}")
    return Text("\n").join([*lines, own, Text("underlined: where a pass begins", "dim")])


def _depths(request: RequestData) -> Table:
    stats = request["stats"]
    table = Table(title="acceptance by depth", title_justify="left", box=None, show_header=False)
    for depth, (offered, matched) in enumerate(zip(stats["offered"], stats["matched"], strict=True), start=1):
        share = matched / offered
        table.add_row(str(depth), Text("█" * round(share * BAR), "blue"), f"{share:.0%}", f"{matched} of {offered}")
    return table


def _passes(data: PageData, request: RequestData) -> Table:
    passes = request["passes"]
    shown = f"the first {MOST_PASSES} of {len(passes)} passes" if len(passes) > MOST_PASSES else f"{len(passes)} passes"
    table = Table(title=shown, title_justify="left", box=None)
    for name in ("pass", "at", "ms", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("committed", "first rejected draft token"):
        table.add_column(name)  # these narrow with the terminal; their cells are cut, not wrapped
    for number, record in enumerate(passes[:MOST_PASSES], start=1):
        spent = f"{1000 * sum(record['seconds']):.1f}"
        accepted = f"{record['accepted']} of {len(record['tokens']) - 1}"
        table.add_row(
            str(number), f"{record['at']:.2f} s", spent, accepted, _committed(data, record), _rejected(data, record)
        )
    return table


def _committed(data: PageData, record: PassData) -> Text:
    pairs = zip(record["committed"], record["sources"], strict=True)
    parts = [(_inline(data, token), _style(source)) for token, source in pairs]
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _rejected(data: PageData, record: PassData) -> Text:
    """The first rejected draft token and the reason; empty if no token was rejected."""
    for node, why in enumerate(record["why"]):
        if data["reasons"][why].startswith("rejected"):
            token = (_inline(data, record["tokens"][node]), _style(record["by"][node]))
            return Text.assemble(token, (plain(f" {data['reasons'][why]}"), "dim"), no_wrap=True, overflow="ellipsis")
    return Text()


def _inline(data: PageData, token: int) -> str:
    return plain(data["pieces"][token]).replace("\n", "↵")


def _style(source: int) -> str:
    return "" if source == TARGET else STYLES[source % len(STYLES)]


def plain(text: str) -> str:
    """Spell out unprintable characters: text of the trace is untrusted and could send commands to the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
