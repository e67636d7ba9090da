"""The story in four pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from stories import BOTH, JUNE, MAY, RESTORED, SUMS, WEIGHTS, Told

COLOURS = {
    MAY: "#7f7f7f",
    JUNE: "#d62728",
    SUMS: "#ff7f0e",
    WEIGHTS: "#1f77b4",
    BOTH: "#2ca02c",
    RESTORED: "#9467bd",
}
LIMIT = 0.5
"""Of UpdatesLost."""


def draw(told: Mapping[str, Told], path: Path) -> None:
    """Write the four pictures as one PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.4), dpi=100)
    _collapse(axes[0][0], told)
    _loss(axes[0][1], told)
    _lost(axes[1][0], told)
    _learned(axes[1][1], told)
    figure.tight_layout(h_pad=2.5)
    figure.savefig(path)
    plt.close(figure)


def smooth(values: Sequence[float], width: int = 9) -> list[float]:
    """Medians of the last ``width`` values."""
    return [median(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def _collapse(axes: Axes, told: Mapping[str, Told]) -> None:
    for name, style in ((MAY, "-"), (JUNE, "-"), (BOTH, "--"), (RESTORED, "--")):
        norms = smooth(told[name].mean("grad_norm", "lora_A"))[2:]
        axes.plot(range(3, len(norms) + 3), norms, style, color=COLOURS[name], label=name)
    axes.set_yscale("log")
    axes.set(title="Gradient norm of lora_A: the rate decides it, not the dtype", xlabel="step")
    axes.legend(fontsize=8)


def _loss(axes: Axes, told: Mapping[str, Told]) -> None:
    for name, one in told.items():
        axes.plot(smooth(one.loss, 25), color=COLOURS[name], label=name, linewidth=1.2)
    axes.set(title="Loss (median of 25 steps): June's four lie on each other", xlabel="step")
    axes.set_ylim(1.1, 1.25)
    axes.legend(fontsize=8, loc="lower left", ncols=2)


def _lost(axes: Axes, told: Mapping[str, Told]) -> None:
    for name in (MAY, JUNE, SUMS, WEIGHTS, BOTH):
        style = "--" if name in (SUMS, BOTH) else "-"
        lost = told[name].mean("update_lost_ratio", "lora_A")
        axes.plot(range(1, len(lost) + 1), lost, style, color=COLOURS[name], label=name)
    axes.axhline(LIMIT, color="black", linewidth=0.8, linestyle=":")
    for found, step in told[JUNE].findings:
        if found == "UpdatesLost":
            axes.annotate(
                f"UpdatesLost, step {step}",
                (step, LIMIT),
                (step + 3, 0.3),
                arrowprops={"arrowstyle": "->"},
            )
    axes.set(title="Share of lora_A's updates that change nothing", xlabel="step", ylim=(-0.03, 1))
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.04))


def _learned(axes: Axes, told: Mapping[str, Told]) -> None:
    names = [JUNE, SUMS, WEIGHTS, BOTH]
    errors = [distance(told[name], told[BOTH]) for name in names]
    bars = axes.barh(names, errors, color=[COLOURS[name] for name in names])
    axes.bar_label(bars, [f"{error:.1%}" for error in errors], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(title="How far B·A ends from the fp32 run's (relative)")


def distance(one: Told, other: Told) -> float:
    """Frobenius distance of B·A over all modules, relative to ``other``'s size."""
    off = sum(float((one.update[m] - u).square().sum()) for m, u in other.update.items())
    return float((off / sum(float(u.square().sum()) for u in other.update.values())) ** 0.5)
