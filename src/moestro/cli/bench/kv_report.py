"""How `moestro bench kv` shows hit rates: a table, and a chart of bars by tier."""

from pathlib import Path
from typing import Any

from moestro.cli.bench import report

_TIERS = ("device", "host", "store")
_HINTS_COLOUR = "#e07a00"
_COLOURS = {"device": "#2a6f97", "host": "#61a5c2", "store": "#bcd9e6"}


def print_hits(result: dict[str, Any]) -> None:
    """A line a point."""
    title = (
        f"{result['trace']}: {result['num_requests']:,} requests of {result['num_sessions']:,} "
        "sessions; share of prompt tokens found"
    )
    columns = (
        "lanes, tokens",
        *_TIERS,
        "all",
        "LRU, held",
        "LRU",
        "ideal",
        "TTFT s",
        "refused",
        "CPU s",
        "us/request",
        "ns/page",
    )
    made = report.table(title, columns)
    for point in result["points"]:
        made.add_row(
            f"{point['lanes']}{' hints' if point['pin_ttl_s'] is not None else ''}: {size(point)}",
            *(_percent(point[f"{tier}_hit_rate"]) for tier in _TIERS),
            _percent(point["hit_rate"]),
            _percent(point["held_lru_device_hit_rate"]) if _is_device_only(point) else "",
            _percent(point["lru_hit_rate"]),
            _percent(point["ideal_hit_rate"]),
            f"{point['mean_ttft_s']:.2f}",
            f"{point['num_refused']:,}",
            f"{point['cpu_s']:.1f}",
            f"{point['cpu_us_per_request']:,.0f}",
            f"{point['cpu_ns_per_page']:,.0f}",
        )
    report.print_table(made)


def size(point: dict[str, Any]) -> str:
    """2M, or 500k + 2M + 8M where there are tiers below the device."""
    sizes = [point[f"{tier}_tokens"] for tier in _TIERS]
    while sizes[-1] == 0:
        sizes.pop()
    return " + ".join(_short(tokens) for tokens in sizes)


def _is_device_only(point: dict[str, Any]) -> bool:
    return not (point["host_tokens"] or point["store_tokens"])


def _short(tokens: int) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= 0.9995 * unit:
            return f"{tokens / unit:.3g}{letter}"
    return str(tokens)


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def draw_hits(result: dict[str, Any], path: Path) -> None:
    """A group of bars for each number of lanes: found by tier, the LRU, the ideal; SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    groups: dict[int, list[dict[str, Any]]] = {}
    for point in result["points"]:
        groups.setdefault(point["lanes"], []).append(point)
    widest = max(len({size(point) for point in points}) for points in groups.values())
    figure = Figure(figsize=(1.2 + (0.9 + 0.62 * widest) * len(groups), 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    all_axes = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (num_lanes, points) in zip(all_axes, groups.items(), strict=True):
        _draw_group(axes, points)
        axes.set_title(f"{num_lanes} lanes", fontsize=9)
        axes.set_xlabel("device + host + store, tokens", fontsize=8)
    all_axes[0].set_ylabel("prompt tokens found, %")
    all_axes[0].set_ylim(0, 100)
    handles, labels = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    figure.savefig(path, format="svg")


def _draw_group(axes: Any, points: list[dict[str, Any]]) -> None:
    """Bars for the runs without hints, marks for those with them; bars for these if all have."""
    hinted = {size(point): point for point in points if point["pin_ttl_s"] is not None}
    plain = [point for point in points if point["pin_ttl_s"] is None]
    bars = plain or points
    at = range(len(bars))
    below = [0.0] * len(bars)
    for tier in _TIERS:
        rates = [100 * point[f"{tier}_hit_rate"] for point in bars]
        if any(point[f"{tier}_tokens"] for point in bars):
            axes.bar(at, rates, 0.7, bottom=below, color=_COLOURS[tier], label=tier)
        below = [a + b for a, b in zip(below, rates, strict=True)]
    if plain and hinted:
        marks = [(x, hinted[size(point)]) for x, point in enumerate(bars) if size(point) in hinted]
        rates = [100 * point["hit_rate"] for _, point in marks]
        style = {"color": _HINTS_COLOUR, "markersize": 7, "label": "with hints"}
        axes.plot([x for x, _ in marks], rates, "^", **style)
    rates = [100 * point["lru_hit_rate"] for point in bars]
    axes.plot(at, rates, "o", color="black", fillstyle="none", markersize=5, label="plain LRU")
    if all(_is_device_only(point) for point in bars):
        rates = [100 * point["held_lru_device_hit_rate"] for point in bars]
        axes.plot(at, rates, "_", color="black", markersize=14, label="LRU of what is not in use")
    ideal = 100 * max(point["ideal_hit_rate"] for point in points)
    axes.axhline(ideal, color="#c1121f", linewidth=1, label="ideal")
    axes.set_xticks(at, [size(point).replace(" + ", "\n") for point in bars], fontsize=7)
