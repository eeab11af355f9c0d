"""Pictures of a report: every case under the device's roof, and times by size, contender by contender."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

from kdk.errors import UsageError

Result = Mapping[str, Any]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("KDK-PLOT", "plots need matplotlib", way_out="pip install 'torch-kdk[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def pictures(results: Sequence[Result]) -> Iterator[tuple[str, bytes]]:
    """(name, PNG): a roofline per target, and per operator, direction and dtype its times by size."""
    timed = [r for r in results if r["samples"]]
    for target in dict.fromkeys(r["target"] for r in timed):
        yield f"roofline {target}", _draw(_roofline, [r for r in timed if r["target"] == target])
    for key in dict.fromkeys((r["op"], r["direction"], r["dtype"], r["target"]) for r in timed):
        mine = [r for r in timed if (r["op"], r["direction"], r["dtype"], r["target"]) == key]
        yield " ".join(key), _draw(_times, mine)


def _draw(draw: Callable[[Any, Sequence[Result]], None], results: Sequence[Result]) -> bytes:
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    draw(axes, results)
    figure.tight_layout()
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    return buffer.getvalue()


def _roofline(axes: Any, results: Sequence[Result]) -> None:
    """FLOP rate over FLOPs per byte. The roof is drawn where the device's peaks are known."""
    known = [r for r in results if r["flops"] and r["flop_rate"]]
    for contender in dict.fromkeys(r["contender"] for r in known):
        mine = [r for r in known if r["contender"] == contender]
        axes.scatter([r["flops"] / r["bytes"] for r in mine], [r["flop_rate"] for r in mine], label=contender, s=18)
    slopes = [r["bandwidth"] / r["share_of_bandwidth"] for r in known if r["share_of_bandwidth"]]
    if slopes:
        intensities = sorted(r["flops"] / r["bytes"] for r in known)
        ends = (intensities[0] / 4, intensities[-1] * 4)
        axes.plot(ends, [slopes[0] * x for x in ends], color="black", label="memory bandwidth, by the data sheet")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte (of the algorithm)", ylabel="FLOP/s, measured")
    if known:
        axes.legend(fontsize=7)
    peaks = "" if slopes else "; the device's peaks are unknown"
    axes.set_title(f"{results[0]['target']}: every case{peaks}", fontsize=10)


def _times(axes: Any, results: Sequence[Result]) -> None:
    for contender in dict.fromkeys(r["contender"] for r in results):
        mine = sorted((r for r in results if r["contender"] == contender), key=lambda r: r["bytes"])
        axes.plot([r["bytes"] for r in mine], [r["seconds"]["p50"] for r in mine], marker="o", markersize=4, label=contender)
    first = results[0]
    axes.set(xscale="log", yscale="log", xlabel="bytes read and written (of the algorithm)", ylabel="seconds per call, median, measured")
    axes.set_title(f"{first['op']} {first['direction']}, {first['dtype']}, {first['target']}", fontsize=10)
    axes.legend(fontsize=7)
