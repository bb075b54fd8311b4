"""The plot of a training run: loss, acceptance and the engine's measurements over the steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import OutpaceError
from outpace.train.log import LogPoint, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "plot.svg"
INK, GRID, SERIES = "#57606a", "#d0d7de", ("#0969da", "#1a7f37", "#9a6700", "#cf222e", "#8250df", "#bf3989")
STYLE: Any = {  # Any: matplotlib has no common type for these keys
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "train",
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
SMOOTH = 50  # points that a line keeps at least when steps are averaged


def draw(folder: Path) -> Path:
    """Plot the run in this folder, and write the file beside its log."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OutpaceError("plots need matplotlib: pip install 'outpace[train]'") from error
    points = read(folder)
    with rc_context(STYLE):
        figure = Figure(figsize=(8.6, 7.2), layout="constrained")
        upper, middle, lower = figure.subplots(3, sharex=True)
        _loss(upper, points)
        _acceptance(middle, points)
        _measured(lower, points)
        figure.savefig(folder / FILE, metadata={"Date": None})
    return folder / FILE


def _loss(axes: Axes, points: Seq[LogPoint]) -> None:
    steps, values = _smooth([(point.step, point.loss) for point in points if point.loss is not None])
    axes.plot(steps, values, color=SERIES[0])
    axes.set_ylabel("loss")


def _acceptance(axes: Axes, points: Seq[LogPoint]) -> None:
    ahead = max((len(point.acceptance) for point in points), default=0)
    for index in range(ahead):
        found = [(point.step, point.acceptance[index]) for point in points if index < len(point.acceptance)]
        axes.plot(*_smooth(found), color=SERIES[index % len(SERIES)], label=f"token {index + 1} ahead")
    axes.set_ylabel("overlap of the two distributions\nin training")
    if ahead:
        axes.legend(fontsize=8)


def _measured(axes: Axes, points: Seq[LogPoint]) -> None:
    found = [(point.step, point.measured) for point in points if point.measured is not None]
    steps = [step for step, _ in found]
    axes.plot(steps, [m.tokens_per_pass for _, m in found], color=SERIES[0], marker="o", label="tokens per pass")
    axes.set_ylabel("tokens per pass")
    axes.set_xlabel("step")
    other = axes.twinx()
    other.plot(steps, [m.acceptance for _, m in found], color=SERIES[1], marker="s", label="acceptance")
    other.set_ylim(0, 1.03)
    other.set_ylabel("draft tokens accepted, of those reached")
    other.grid(visible=False)
    axes.legend(handles=[*axes.get_lines(), *other.get_lines()], loc="lower right", fontsize=8)
    axes.set_title("measured by the engine on held-out prompts", fontsize=9, loc="left")


def _smooth(found: Seq[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Average neighbouring steps, as many as leave enough points."""
    size = max(1, len(found) // SMOOTH)
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    return [sum(s for s, _ in g) / len(g) for g in groups], [sum(v for _, v in g) / len(g) for g in groups]
