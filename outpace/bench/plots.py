"""Plots of the report: inline SVG with the page's colour variables, so that they follow light and dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING, Any

from outpace.bench.specs import PLAIN
from outpace.bench.summary import SliceFigures, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Placeholder colours, replaced by variables of the page when the SVG is written.
INK, GRID, SERIES = "#010203", "#010204", [f"#0102{i:02x}" for i in range(16, 26)]
VARIABLES = {INK: "var(--muted)", GRID: "var(--line)"} | {code: f"var(--c{i})" for i, code in enumerate(SERIES)}
MARKERS = "osD^vPX<>h"
WIDTH = 8.6  # inches
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip


def speedups(summary: Summary) -> str:
    """Plot the speed-ups over plain decoding by slice, with intervals."""
    others = [name for name in summary.contestants if name != PLAIN]
    parts = [*summary.parts, summary.total]
    apart = 0.8 / max(len(others), 1)

    def draw(axes: Axes) -> None:
        for index, name in enumerate(others):
            found = [(y, f.speedups[PLAIN]) for y, f in enumerate(_of(name, parts)) if f and PLAIN in f.speedups]
            values = [interval.value for _, interval in found]
            below = [i.value - i.low if i.low is not None else 0.0 for _, i in found]
            above = [i.high - i.value if i.high is not None else 0.0 for _, i in found]
            places = [y + (index - (len(others) - 1) / 2) * apart for y, _ in found]
            axes.errorbar(
                values, places, xerr=[below, above], linestyle="none", markersize=5, elinewidth=1.4, label=name,
                **_look(summary, name),
            )  # fmt: skip
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(range(len(parts)), [part[0].part.label for part in parts])
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        for line in range(len(parts) - 1):
            axes.axhline(line + 0.5, color=GRID, linewidth=0.6)
        axes.set_xlabel("speed-up over plain decoding, with 95 % intervals")

    return _svg("speedups", draw, 1.1 + len(parts) * max(0.4, 0.11 * len(others)))


def rates(summary: Summary) -> str:
    """Plot the tokens per second in total."""

    def draw(axes: Axes) -> None:
        names = [figures.contestant for figures in summary.total]
        values = [figures.tokens_per_second for figures in summary.total]
        bars = axes.barh(names, values, color=[_color(summary, name) for name in names], height=0.66)
        axes.bar_label(bars, fmt="%.1f", padding=4, color=INK)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("tokens per second")
        axes.margins(x=0.1)

    return _svg("rates", draw, 0.9 + 0.32 * len(summary.total), legend=False)


def acceptance(summary: Summary) -> str:
    """Plot, by depth, how often a draft token is accepted, given that all before it are."""
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        for figures in summary.total:
            shares = figures.acceptance_by_depth
            if shares:
                depths = range(1, len(shares) + 1)
                axes.plot(depths, shares, label=figures.contestant, markersize=5, **_look(summary, figures.contestant))
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("depth of the draft token")
        axes.set_ylabel("accepted, of those offered")

    return _svg("acceptance", draw, 3.6)


def sweep(summary: Summary, along: str) -> str | None:
    """Plot the speed-up over plain against batch size, context or temperature; None if there is only one value."""
    parts = [part for part in summary.parts if (part[0].part.task is None) == (along != "context")]
    parts = [part for part in parts if getattr(part[0].part, along) is not None]
    fixed = [name for name in ("batch", "temperature") if name != along]
    parts = [p for p in parts if all(getattr(p[0].part, n) == getattr(parts[0][0].part, n) for n in fixed)]
    if len(parts) < 2:
        return None

    def draw(axes: Axes) -> None:
        for name in summary.contestants:
            found = [f for f in _of(name, parts) if f is not None and PLAIN in f.speedups and name != PLAIN]
            if found:
                xs, ys = [getattr(f.part, along) for f in found], [f.speedups[PLAIN].value for f in found]
                axes.plot(xs, ys, label=name, markersize=5, **_look(summary, name))
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_xticks([getattr(part[0].part, along) for part in parts])
        axes.set_xlabel({"context": "tokens of the prompt (copy)"}.get(along, along))
        axes.set_ylabel("speed-up over plain")

    return _svg(along, draw, 3.6)


def _of(name: str, parts: Iterable[Seq[SliceFigures]]) -> list[SliceFigures | None]:
    return [next((figures for figures in part if figures.contestant == name), None) for part in parts]


def _color(summary: Summary, name: str) -> str:
    return SERIES[summary.contestants.index(name) % len(SERIES)]


def _look(summary: Summary, name: str) -> dict[str, Any]:
    marker = MARKERS[summary.contestants.index(name) % len(MARKERS)]
    return {"color": _color(summary, name), "marker": marker}


def _svg(name: str, draw: Any, height: float, legend: bool = True) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": name}  # Any: matplotlib has no common type for these keys
    with rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if legend and axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _inline(out.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """Remove what only a standalone file needs, and make ids unique on the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
    for code, variable in VARIABLES.items():
        svg = svg.replace(code, variable)
    return svg
