"""One HTML file of a suite's results, from its JSON alone, without any network request."""

from pathlib import Path
from typing import Any

from jinja2 import Environment

from harmonic_sft.eval.language import frequency_name

TEMPLATE = Path(__file__).with_name("report.html.jinja")
COLORS = ("#2b6cb0", "#c8702a", "#2f855a", "#805ad5", "#b83280", "#718096")


def report_page(payload: dict[str, Any]) -> str:
    """Return a whole HTML page: tables and figures in light and dark, for screens of any width.

    The payload is that of `results/suite.json`.
    """
    names, figures = payload["models"], payload["figures"].values()
    points = [point for one in figures for point in one["frequency"]]
    bins = sorted({point["least"] for point in points})
    places = {least: (index + 0.5) / len(bins) for index, least in enumerate(bins)}
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        **payload,
        title=" and ".join(names[:2]) + (f" and {len(names) - 2} more" if names[2:] else ""),
        colors=COLORS,
        reliability=[
            [(p["confidence"], p["accuracy"]) for p in one["reliability"]] for one in figures
        ],
        losses=[[(places[p["least"]], p["loss"]) for p in one["frequency"]] for one in figures],
        counts=[(place, frequency_name(least)) for least, place in places.items()],
        highest_loss=1.1 * max(point["loss"] for point in points) or 1.0,
    )
