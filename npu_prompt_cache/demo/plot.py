"""The figures as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from npu_prompt_cache.demo.figures import Request, Result
from npu_prompt_cache.demo.report import median_speedup, totals

# Told apart in grey print and by colour-blind eyes.
_CACHED, _COMPUTED, _WITHOUT = "#9ecae1", "#d95f02", "#636363"


def plot(result: Result, file: Path) -> None:
    """Writes a PNG: above, what of each prompt was cached; below, its prefill time without and with the cache."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        # A Figure of its own, not pyplot's: no display and no global state.
        figure = Figure(figsize=(max(8.5, 0.5 * len(result.requests) + 2), 7.5), dpi=150, layout="constrained")
        tokens, times = figure.subplots(2, 1, sharex=True)
        _plot_tokens(tokens, result.requests)
        _plot_times(times, result.requests)
        _title(tokens, f"Prompt tokens: {totals(result.requests).hit_rate:.0%} cached")
        _title(times, f"Time to first token: median speed-up {median_speedup(result.requests):.1f}x")
        figure.savefig(file)


def _plot_tokens(axes: Axes, requests: list[Request]) -> None:
    places = range(len(requests))
    cached = [request.cached_tokens for request in requests]
    computed = [request.computed_tokens for request in requests]
    axes.bar(places, cached, color=_CACHED, label="cached")
    bars = axes.bar(places, computed, bottom=cached, color=_COMPUTED, label="computed")
    axes.bar_label(bars, [f"{count:,}" for count in computed], padding=2, fontsize=8, color=_COMPUTED)
    axes.margins(y=0.1)  # room for the numbers above the bars
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("prompt tokens")
    _legend(axes)


def _plot_times(axes: Axes, requests: list[Request]) -> None:
    places = range(len(requests))
    axes.plot(
        places,
        [r.prefill_ms_without for r in requests],
        "s--",
        color=_WITHOUT,
        label="without the cache",
        markersize=5,
    )
    axes.plot(
        places,
        [r.prefill_ms_with for r in requests],
        "o-",
        color=_COMPUTED,
        label="with the cache",
        markersize=5,
    )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("time to first token, ms")
    axes.set_xticks(places, [f"{r.customer} {r.turn}" for r in requests], rotation=45, ha="right")
    axes.set_xlabel("request: customer and turn, in the order served")
    axes.grid(axis="y", alpha=0.3)
    _legend(axes)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0.2)
