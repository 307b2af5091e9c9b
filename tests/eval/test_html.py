"""The report of a suite: what is in the file, and what a real browser makes of it."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

from harmonic_sft.eval.html import report_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# What Chromium asks for whatever page is open.
OF_BROWSER = re.compile(r"https?://[a-z0-9.-]*\.(google|gvt1|googleapis)\.com/")


def payload(**fields):
    figures = {
        "reliability": [{"confidence": 0.2, "accuracy": 0.1, "tokens": 5}],
        "frequency": [
            {"least": 1, "loss": 5.0, "accuracy": 0.1, "tokens": 5},
            {"least": 10, "loss": 3.0, "accuracy": 0.4, "tokens": 50},
        ],
    }
    row = {"group": "language", "set": "held-out data", "better": "lower", "n": 55}
    return {
        "suite": "quick",
        "models": ["mine", "<script>other"],
        "rows": [
            {**row, "metric": "loss, nats", "values": [3.25, 3.5]},
            {**row, "metric": "its 95 % interval", "values": [[3.0, 3.4], None], "better": ""},
            {**row, "metric": "accuracy", "values": [0.3, 0.4], "better": "higher", "note": "seen"},
            {"group": "geometry", "set": "MEN", "missing": "wordsim/*.tsv", "values": [None, None]},
        ],
        "differences": [
            {
                "metric": "loss",
                "model": "<script>other",
                "against": "mine",
                "mean": 0.25,
                "interval": [0.1, 0.4],
                "tokens": 55,
                "documents": 9,
                "verdict": "higher",
            }
        ],
        "problems": {"mine": [], "<script>other": ["all prototypes are equal"]},
        "figures": {"mine": figures, "<script>other": figures},
        "environment": {"date": "2026-01-01T00:00:00", "git_commit": "a" * 40, "dirty": True},
        **fields,
    }


def test_the_page_holds_every_number_and_two_figures():
    page = report_page(json.loads(json.dumps(payload())))
    for text in ("3.25", "3.000 to 3.400", "+0.250", "+0.100 to +0.400", "higher", "dirty"):
        assert text in page, text
    assert "not measured: needs wordsim/*.tsv" in page
    assert "all prototypes are equal" in page
    assert "2026-01-01, commit aaaa" in page
    assert re.findall(r'class="number best">([^<]+)', page) == ["3.25", "0.4"]
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 2
    assert [len(list(ElementTree.fromstring(svg).iter("circle"))) for svg in svgs] == [2, 4]


def test_the_page_asks_for_nothing_and_names_are_text():
    page = report_page(payload())
    assert "<script" not in page
    assert not re.findall(r"https?:|src=|@import|url\(", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="viewport" content="width=device-width' in page


def test_a_loss_of_zero_is_drawn():
    figures = payload()["figures"]["mine"]
    figures["frequency"] = [{"least": 1, "loss": 0.0, "accuracy": 1.0, "tokens": 5}]
    assert report_page(payload(figures={"mine": figures})).count("<svg") == 2


def test_one_model_is_not_compared():
    rows = [{**row, "values": row["values"][:1]} for row in payload()["rows"]]
    figures = {"mine": payload()["figures"]["mine"]}
    page = report_page(payload(models=["mine"], rows=rows, differences=[], figures=figures))
    assert "Loss against" not in page
    assert ' best"' not in page


def test_equal_values_are_none_the_better_and_intervals_of_several_models_are_so_named():
    names, figures = ["mine", "second", "third"], payload()["figures"]["mine"]
    row = {**payload()["rows"][0], "values": [3.5, 3.5, 3.5]}
    more = {"models": names, "figures": dict.fromkeys(names, figures)}
    best = {**payload()["differences"][0], "metric": "post_hoc_loss"}
    page = report_page(payload(rows=[row], differences=[*payload()["differences"], best], **more))
    assert re.findall("<td>(as trained|best)</td>", page) == ["as trained", "best"]
    assert ' best"' not in page
    assert '<th class="number">95 % interval, jointly</th>' in page
    assert ">95 % interval</th>" in report_page(payload())


def browse(path, width):
    """Open a file in Chromium; return its DOM, what it logs, and the addresses it asked for."""
    log = path.with_suffix(".json")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update"]
    command += [f"--user-data-dir={path.parent / 'profile'}", f"--log-net-log={log}"]
    command += ["--enable-logging=stderr", f"--window-size={width},800"]
    command += ["--virtual-time-budget=2000", f"--screenshot={path.with_suffix('.png')}"]
    command += ["--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    asked = re.findall(r'"url":"(https?://[^"]+)"', log.read_text())
    return done.stdout, done.stderr, [url for url in asked if not OF_BROWSER.match(url)]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 360])
def test_a_browser_shows_the_page_without_an_error_or_a_request(tmp_path, width):
    assert CHROMIUM, "no Chromium; `make test-browser` says how to get one"
    path = tmp_path / "report.html"
    path.write_text(report_page(payload()), encoding="utf-8")
    dom, said, asked = browse(path, width)
    assert "CONSOLE" not in said
    assert not asked
    assert (dom.count("<svg"), dom.count("<circle")) == (2, 6)
    assert path.with_suffix(".png").stat().st_size > 5000  # something was drawn


@pytest.mark.browser
def test_a_picture_from_elsewhere_would_be_noticed(tmp_path):
    """The control of the test above: the page forbids it, and without that it is asked for."""
    page = report_page(payload()).replace(
        "</body>", '<img src="http://report.invalid/x.png"></body>'
    )
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    _, said, asked = browse(path, 800)
    assert "CONSOLE" in said
    assert not asked
    path.write_text(page.replace("Content-Security-Policy", "none"), encoding="utf-8")
    assert "http://report.invalid/x.png" in browse(path, 800)[2]
