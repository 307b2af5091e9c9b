"""Results of the geometry note, made by hand: two seeds, few rows."""

from typing import Any

from harmonic_sft.experiments.evidence import paired_difference, spread
from harmonic_sft.experiments.geometry_bench import METRICS, add_differences

SEEDS = [42, 43]


def metric_row(name: str, metric: float, **fields: Any) -> dict[str, Any]:
    values = {key: spread([metric, metric + 0.02]) for key in METRICS}
    return {"name": name, **fields, **values}


def _overhead() -> dict[str, Any]:
    rows = [
        {"vocab_size": size, "name": name, "seconds": 0.5, "overhead": overhead}
        for size in (30522, 50257)
        for name, overhead in (("dist, harmonic", 0.0), ("rotation of dist, harmonic", 0.085))
    ]
    return {"rounds": 3, "rows": rows}


def _calibration() -> dict[str, Any]:
    def row(name: str, value: float, against: tuple[str, ...]) -> dict[str, Any]:
        values = [value, value + 0.01]
        found = paired_difference(values, [0.02, 0.03])
        differences = {other: {"ece": found, "post_hoc_ece": found} for other in against}
        return {
            "name": name,
            "ece": spread(values),
            "post_hoc_ece": spread([0.01, 0.01]),
            "against": differences,
        }

    plain = ("linear_ce", "dist_harmonic")
    rows = [row("linear_ce", 0.02, plain[1:]), row("dist_harmonic", 0.02, plain[:1])]
    return {"rows": [*rows, row("rotation_wasserstein", 0.05, plain)]}


def _tokens() -> dict[str, Any]:
    curve = {"tokens": [0, 1000, 2000], "losses": [5.0, 4.0, 3.0]}
    rows = [
        {
            "name": name,
            "curves": [curve, curve],
            "reached": [{**spread([1500.0, 1700.0]), "against": {}}],
        }
        for name in ("linear_ce", "dist_harmonic")
    ]
    return {"levels": [3.5], "rows": rows}


def _refresh() -> dict[str, Any]:
    kept = {
        "all": [spread([1.0, 1.0]), spread([0.9, 0.9])],
        "weighted": [spread([1.0, 1.0]), spread([0.5, 0.6])],
    }
    fields = {"steps": [0, 100], "kept": kept}
    rows = [
        metric_row("refresh_never", 0.5, refresh_every=None, **fields),
        metric_row("refresh_100", 0.6, refresh_every=100, **fields),
    ]
    add_differences(rows)
    return {"rows": rows}


def _subwords() -> dict[str, Any]:
    neighbors = {"word": 0.7, "piece": 0.2, "character": 0.1, "special": 0.0}
    word = {
        "tokens": 22698,
        "neighbors": neighbors,
        "same_form": 0.041,
        "with_twin": 5,
        "twin_found": 0.6,
    }
    special = {**word, "tokens": 999, "with_twin": 0, "twin_found": None}
    return {"before": {"word": word, "special": special}, "after": None, "kept": None}


def _sweep() -> dict[str, Any]:
    rows = [
        metric_row("dist_harmonic", 0.5, knob=None, value=0.0),
        metric_row("epsilon_0.1", 0.4, knob="epsilon", value=0.1),
        metric_row("lambda_1", 0.6, knob="lambda", value=1.0),
    ]
    add_differences(rows)
    return {"rows": rows}


PAYLOADS = {
    name: {"seeds": SEEDS, "finding": f"what {name} found", **made}
    for name, made in {
        "overhead": _overhead(),
        "calibration": _calibration(),
        "tokens": _tokens(),
        "refresh": _refresh(),
        "subwords": _subwords(),
        "sweep": _sweep(),
    }.items()
}
