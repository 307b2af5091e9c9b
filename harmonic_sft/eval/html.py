"""One HTML file of a suite's results, from its JSON alone, without any network request."""

from collections.abc import Sequence
from html import escape
from typing import Any

COLORS = ("#2b6cb0", "#c8702a", "#2f855a", "#805ad5", "#b83280", "#718096")
WIDTH, HEIGHT, MARGIN = 360, 260, 52  # of a figure, in its own units
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # nothing is fetched
STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --page: #fff; --text: #1f2328 }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #9198a1; --page: #0d1117; --text: #e6edf3 } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left }
td.number, th.number { text-align: right; white-space: nowrap }
.wide { overflow-x: auto } .soft { color: var(--soft); font-size: .9rem }
.figures { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; flex: 1 1 20rem; max-width: 30rem }
svg { width: 100%; height: auto; color: var(--text) }
svg text { fill: currentColor; font: 12px system-ui, sans-serif }
.best { font-weight: 600 }
"""


def report_page(payload: dict[str, Any]) -> str:
    """Return a whole HTML page: tables and figures in light and dark, for screens of any width.

    Args:
        payload: Of `results/suite.json`.
    """
    names, environment = payload["models"], payload["environment"]
    title = " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    commit = environment.get("git_commit") or "no checkout"
    dirty = " (dirty: the code differs from this commit)" if environment.get("dirty") else ""
    parts = [
        f"<h1>Evaluation of {escape(title)}</h1>",
        f'<p class="soft">Suite {escape(payload["suite"])}, {escape(environment["date"])}, commit '
        f"{escape(commit[:12])}{dirty}. Bold marks the better value of a row. "
        "Only differences in loss have an interval here; any other difference may be chance.</p>",
        _problems(payload["problems"]),
        _differences(payload["differences"]),
        _legend(names),
        '<div class="figures">',
        _figure("Reliability", _reliability(payload), "confidence", "accuracy"),
        _figure("Loss of rare and frequent labels", _frequency(payload), "count", "loss, nats"),
        "</div>",
        *(_group(payload, group) for group in dict.fromkeys(r["group"] for r in payload["rows"])),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _problems(problems: dict[str, list[str]]) -> str:
    items = [
        f"<li>{escape(n)}: {escape(text)}</li>" for n, texts in problems.items() for text in texts
    ]
    return f"<h2>Problems</h2><ul>{''.join(items)}</ul>" if items else ""


def _differences(differences: Sequence[dict[str, Any]]) -> str:
    """Return the table of differences in loss, with their intervals."""
    if not differences:
        return ""
    rows = []
    for found in differences:
        interval = found["interval"]
        between = "-" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}"
        cells = (
            f"{found['mean']:+.3f}",
            between,
            f"{found['tokens']:,}",
            f"{found['documents']:,}",
        )
        rows.append(
            f"<tr><td>{escape(found['model'])}</td>"
            + "".join(f'<td class="number">{cell}</td>' for cell in cells)
            + f"<td>{found['verdict']}</td></tr>"
        )
    heads = ("difference, nats", "95 % interval", "tokens", "documents")
    numbers = "".join(f'<th class="number">{head}</th>' for head in heads)
    return (
        f"<h2>Loss against {escape(differences[0]['against'])}</h2>"
        f'<div class="wide"><table><tr><th>model</th>{numbers}<th>loss is</th></tr>'
        f"{''.join(rows)}</table></div>"
    )


def _group(payload: dict[str, Any], group: str) -> str:
    """Return the table of one group of metrics."""
    rows = [row for row in payload["rows"] if row["group"] == group]
    heads = "".join(f'<th class="number">{escape(name)}</th>' for name in payload["models"])
    body = "".join(_table_row(row) for row in rows)
    notes = dict.fromkeys(f"{row['set']}: {row['note']}" for row in rows if row.get("note"))
    return (
        f"<h2>{escape(group.capitalize())}</h2>"
        f'<div class="wide"><table><tr><th>set</th><th>metric</th>{heads}'
        f'<th class="number">n</th></tr>{body}</table></div>'
        + "".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
    )


def _table_row(row: dict[str, Any]) -> str:
    if "missing" in row:
        span = len(row["values"]) + 2
        text = (
            f'<td class="soft" colspan="{span}">not measured: needs {escape(row["missing"])}</td>'
        )
        return f"<tr><td>{escape(row['set'])}</td>{text}</tr>"
    known = [value for value in row["values"] if isinstance(value, int | float)]
    best = None
    if len(known) > 1 and row["better"]:
        best = max(known) if row["better"] == "higher" else min(known)
    cells = "".join(
        f'<td class="number{" best" if value is not None and value == best else ""}">'
        f"{_number(value)}</td>"
        for value in row["values"]
    )
    return (
        f"<tr><td>{escape(row['set'])}</td><td>{escape(row['metric'])}</td>{cells}"
        f'<td class="number">{_number(row.get("n"))}</td></tr>'
    )


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(f"{end:.3f}" for end in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _legend(names: Sequence[str]) -> str:
    dots = [
        f'<span style="color:{COLORS[place % len(COLORS)]}">&#9679;</span> {escape(name)}'
        for place, name in enumerate(names)
    ]
    return f"<h2>Figures</h2><p>{' &nbsp; '.join(dots)}</p>"


def _reliability(payload: dict[str, Any]) -> str:
    """Return the accuracy of every bin over its confidence, and the diagonal of a perfect model."""
    lines = [
        [(point["confidence"], point["accuracy"]) for point in figures["reliability"]]
        for figures in payload["figures"].values()
    ]
    return (
        _axes((0, 1), (0, 1))
        + _line([(0, 0), (1, 1)], "currentColor", (0, 1), dashed=True)
        + (
            "".join(
                _line(line, COLORS[place % len(COLORS)], (0, 1)) for place, line in enumerate(lines)
            )
        )
    )


def _frequency(payload: dict[str, Any]) -> str:
    """Return the loss of labels over how often they occur."""
    figures = payload["figures"].values()
    labels = sorted({point["least"] for one in figures for point in one["frequency"]})
    top = max(point["loss"] for one in figures for point in one["frequency"]) * 1.1
    places = {least: (index + 0.5) / len(labels) for index, least in enumerate(labels)}
    ticks = {place: f"{least:,}+" for least, place in places.items()}
    return _axes((0, 1), (0, top), ticks) + "".join(
        _line(
            [(places[point["least"]], point["loss"]) for point in one["frequency"]],
            COLORS[place % len(COLORS)],
            (0, top),
        )
        for place, one in enumerate(figures)
    )


def _figure(title: str, content: str, x: str, y: str) -> str:
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{content}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x}</text>'
        f'<text x="12" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 12 {HEIGHT / 2})">{y}</text></svg></figure>'
    )


def _place(x: float, y: float, high: tuple[float, float]) -> tuple[float, float]:
    """Return where a point with x from 0 to 1 lies in a figure."""
    share = (y - high[0]) / ((high[1] - high[0]) or 1)
    return MARGIN + x * (WIDTH - MARGIN - 12), HEIGHT - MARGIN - share * (HEIGHT - MARGIN - 12)


def _axes(
    x: tuple[float, float], y: tuple[float, float], ticks: dict[float, str] | None = None
) -> str:
    """Return two axes with their numbers."""
    (left, bottom), (right, top) = _place(0, y[0], y), _place(1, y[1], y)
    named = {x[0]: f"{x[0]:g}", x[1]: f"{x[1]:g}"} if ticks is None else ticks
    texts = [
        f'<text x="{_place(at, y[0], y)[0]:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{text}'
        "</text>"
        for at, text in named.items()
    ]
    texts += [
        f'<text x="{left - 6}" y="{_place(0, value, y)[1] + 4:.1f}" text-anchor="end">{value:.2g}'
        "</text>"
        for value in (y[0], (y[0] + y[1]) / 2, y[1])
    ]
    path = f"M{left} {top}V{bottom}H{right}"
    return f'<path d="{path}" fill="none" stroke="currentColor" opacity=".5"/>{"".join(texts)}'


def _line(
    points: Sequence[tuple[float, float]],
    color: str,
    high: tuple[float, float],
    *,
    dashed: bool = False,
) -> str:
    """Return a line through points, with a dot on each unless it is dashed."""
    places = [_place(x, y, high) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="4 4" opacity=".6"' if dashed else ' stroke-width="2"'
    dots = [] if dashed else [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    return (
        f'<g fill="{color}"><polyline points="{path}" fill="none" stroke="{color}"{dash}/>'
        f"{''.join(dots)}</g>"
    )
