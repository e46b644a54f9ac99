"""The HTML report: its content, and its accessibility (in a headless Chromium where there is one)."""

import json
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from math import inf
from pathlib import Path
from typing import Any

import chromium
import pytest
from results import assert_refused, make_result, run, write
from sweep_tables import LINK, grid, make_row
from sweep_tables import write as write_sweep

from analysis.html_report.contents import contents_of
from analysis.html_report.markup import ALT_LENGTH, Column, table
from analysis.html_report.report import report
from gssim.errors import UserError

STUDY = Path(__file__).parents[2] / "scenarios/measured/studies/gpt-byte"
LAB = Path(__file__).parents[2] / "scenarios/measured/lab"
QUESTION = {"question": "Which plan <is> fastest & why?"}


def pair(folder: Path, name: str, scenario_id: str, **changes: Any) -> None:
    """Write a prediction and a measurement of one scenario."""
    same = {"name": name, "scenario_id": scenario_id, "scenario": QUESTION, **changes}
    write(folder, f"{name}.s.json", make_result("simulated", **same))
    write(folder, f"{name}.m.json", make_result("measured", **(same | {"step_time_s": 0.25}), losses=(2.0, 1.5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a comparison, a sweep's table and a study."""
    place = tmp_path_factory.mktemp("report")
    pair(place / "results", "dense", "d" * 16, method="gs")
    pair(place / "results", "sparse", "e" * 16, method="gs", threshold=1e-3, push_density=0.125)
    pair(place / "results", "silent", "f" * 16, method="gs", threshold=inf, push_density=0.0)
    write_sweep(
        [*grid(), make_row("ddp", status="invalid", point="bad", reason="no <b> ranks", step_time_s=None)],
        place / "t.parquet",
    )
    (place / "study").mkdir()
    for name in ("convergence.csv", "findings.txt", "loss_against_bytes.png"):
        shutil.copy(STUDY / name, place / "study" / name)
    return place


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return report(folder)


SCRIPT = re.compile(r"<script( type=\"application/json\")?>(.*?)</script>", re.DOTALL)


class Reader(HTMLParser):
    """Collects headings, and texts of tables by caption."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[tuple[str, str]] = []
        self.text, self._open = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._open = tag
        if tag in ("h1", "h2", "h3"):
            self.headings.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("h1", "h2", "h3"):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)
        if self._open not in ("style", "script"):
            self.text += f"{data} "


# Contents ------------------------------------------------------------------------------------------------------------


def test_a_page_says_first_what_makes_its_measurements_doubtful(tmp_path: Path) -> None:
    measured = make_result("measured")
    write(tmp_path, "p.json", make_result("simulated"))
    for ratio, doubtful in ((0.4, True), (0.01, False)):
        write(tmp_path, "m.json", replace(measured, provenance={"core_wait_ratio": ratio}))
        short = Reader(report(tmp_path)).text.partition("Collectives are equal")[2].partition("Every scenario")[0]
        assert ("Doubtful: measured while ranks waited for cores that other work used" in short) == doubtful


def test_a_page_has_all_that_a_folder_holds(page: str) -> None:
    read = Reader(page)
    titles = [text for level, text in read.headings if level == "h2"]
    assert titles == [
        "In short",
        "How far off are the predictions?",
        "What did thresholds gain, and what did they cost?",
        "Charts of predicted beside measured",
        "Bottlenecks",
        "What the sweep found",
        "Explore the sweep",
        "Charts of the sweep",
        "Bottlenecks of the sweep",
        "What the study found: study",
        "Charts of the study: study",
        "What was measured, and what is only predicted",
        "Provenance",
    ]
    for words in (
        "Who is fastest on which network?",
        "Which plan <is> fastest & why?",
        "3 scenarios predicted and measured",
        "22 points: 21 fit; 1 invalid",
        "no <b> ranks",
        "1.80 times the speed",
        "gpu0 -> switch, used 80 %",
        "threshold 3e-4",
        "Only predicted: all 22 points of the sweep made-up.toml",
        "c" * 16,
    ):
        assert words in read.text, words
    without_scripts = SCRIPT.sub("", page)
    assert without_scripts.count("<figure>") == without_scripts.count("data:image/") == 3 + 5 + 1


def test_a_study_at_equal_samples_bytes_and_time_has_a_page(tmp_path: Path) -> None:
    for path in (STUDY.parent / "rivals-gpt").iterdir():
        if path.suffix in (".csv", ".txt", ".png"):
            shutil.copy(path, tmp_path)
    text = report(tmp_path)
    assert "Which method has the least loss at equal samples, bytes and time?" in text
    assert text.count("<figure>") == 3
    row = next(row for row in text.split("<tr>") if ">half, bf16<" in row)
    assert re.findall(r">([^<>]+)</t", row)[:4] == ["half, bf16", "all", "401.25 KiB", "2.723 [\u22120.022, +0.013]"]


def test_speeds_on_the_page_stand_beside_density_loss_and_control(page: str) -> None:
    (found,) = re.findall(r"<table>\n<caption><span>Speed beside dense.*?</table>", page, re.DOTALL)
    (sparse,) = [row for row in found.split("<tr>") if ">sparse<" in row]
    assert [cell for cell in re.findall(r">([^<>]+)</t", sparse) if cell.strip()] == [
        "sparse", "dense", "1.00", "1.00", "12 %", "12 %", "all", "0.0 %", "1.00, 0.0 %",
    ]  # fmt: skip
    (found,) = re.findall(r"<table>\n<caption><span>The fastest plans that fit.*?</table>", page, re.DOTALL)
    assert "not measured" in found
    assert "0.2 % pushed" in found


def test_a_page_is_whole_in_itself(page: str) -> None:
    rest = SCRIPT.sub("", page)
    assert not re.findall(r"(?:src|href)=\"(?!data:image/|#)[^\"]*\"", rest)
    assert "<script" not in rest
    assert "url(" not in rest
    allowed = set(re.findall(r"'(sha256-[^']+)'", unescape(rest)))
    run = [text for kind, text in SCRIPT.findall(page) if not kind]  # others are data
    assert {f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}" for text in run} == allowed
    assert len(run) == 3


def test_a_comparison_without_its_results_is_reported_from_its_tables(tmp_path: Path) -> None:
    for name in ("comparison.csv", "gs_against_dense.csv"):
        lines = (LAB / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:9]))
    page = Reader(report(tmp_path)).text
    assert "8 scenarios predicted and measured" in page
    assert "Comparison comparison.csv, without its Results" in page
    whole = (tmp_path / "comparison.csv").read_text()
    for damaged, column in (
        (f"{whole}\n", "scenario_id"),
        (re.sub(r",(true|false),", ",,", whole), "collectives_equal"),
    ):
        (tmp_path / "comparison.csv").write_text(damaged)
        with pytest.raises(UserError, match=rf"comparison.csv: {column}: an empty cell"):
            report(tmp_path)
    (tmp_path / "comparison.csv").write_text("name\na\n")
    with pytest.raises(UserError, match=r"comparison.csv: no column '\w+': not a table of this version"):
        report(tmp_path)


@pytest.mark.slow
def test_of_very_many_calibrations_the_most_used_are_listed_and_pages_of_charts_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.html_report.markup.svg", lambda _figure: b"<svg/>")  # what is drawn is not looked at
    rates = tuple(1e8 * 1.2**i for i in range(25))
    rows = [row | {"calibration_id": f"{row[LINK]:.9g}"} for row in grid(rates)]
    often = [make_row("ddp", calibration_id="often", point=f"more {i}") for i in range(30)]
    write_sweep([*rows, *often], tmp_path / "t.parquet")
    page = report(tmp_path)
    (found,) = re.findall(r"<table>\n<caption><span>Calibrations.*?</table>", page, re.DOTALL)
    assert found.count("<tr>") - 1 == 20
    assert ">often<" in found
    assert "6 more, of no more points each" in page
    headings = [text for _, text in Reader(page).headings]
    pages = [text for text in headings if text.startswith("At which threshold")]
    assert [text.rpartition("? ")[2] for text in pages] == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]


def test_one_question_is_the_title(tmp_path: Path) -> None:
    pair(tmp_path, "ddp", "d" * 16)
    assert Reader(report(tmp_path)).headings[0] == ("h1", QUESTION["question"])


def test_one_side_alone_is_listed_as_such(tmp_path: Path) -> None:
    write(tmp_path, "m.json", make_result("measured", name="alone"))
    read = Reader(report(tmp_path))
    assert "Only measured: 1 scenario." in read.text
    assert "alone" in read.text


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
    {"ph": "X", "name": "forward", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2e5},
]


def test_traces_of_both_sides_of_one_scenario_are_laid_over_each_other(tmp_path: Path) -> None:
    for source, name in (("simulated", "alone"), ("simulated", "both"), ("measured", "both")):
        trace = {"traceEvents": EVENTS, "otherData": {"source": source, "scenario_id": name, "step_time_s": 0.2}}
        (tmp_path / f"{name}.{source}.trace.json").write_text(json.dumps(trace))
    (overlay,) = contents_of(tmp_path).overlays
    assert (overlay.name, overlay.predicted.source, overlay.measured.source) == ("both", "simulated", "measured")
    assert overlay.files == ("both.simulated.trace.json", "both.measured.trace.json")


def test_an_empty_folder_or_none_is_refused_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    assert_refused(capsys, run(monkeypatch, tmp_path, verb="report"), "nothing to report: no Results")
    assert_refused(capsys, run(monkeypatch, tmp_path / "none", verb="report"), "none: no such folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # tests/real/test_readme.py runs the command
def test_the_command_says_where_the_page_is(tmp_path, monkeypatch, capsys) -> None:
    pair(tmp_path, "ddp", "d" * 16)
    assert run(monkeypatch, tmp_path, verb="report") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert run(monkeypatch, tmp_path, "--out", tmp_path / "x" / "y.html", verb="report") == 0
    # the same page again
    assert (tmp_path / "x" / "y.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_tables_escape_what_they_are_given() -> None:
    made = table("a & b", [Column("<h>", False), Column("n")], [["<script>", ("1", True)]])
    assert "<script>" not in made
    assert '<th scope="col">&lt;h&gt;</th><th scope="col" class="number">n</th>' in made
    assert '<th scope="row">&lt;script&gt;</th><td class="number"><span class="bad">1</span></td>' in made


# In a browser --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if chromium.program() is None:
        pytest.skip("Chromium is not installed (Debian: chromium-headless-shell)")
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def file(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


AUDIT = """
(() => {
  const faults = [], seen = new Set();
  let level = 0;
  for (const h of document.querySelectorAll('h1,h2,h3,h4')) {
    const now = Number(h.tagName[1]);
    if (now > level + 1) faults.push('heading jumps: ' + h.textContent);
    level = now;
  }
  if (document.querySelectorAll('h1').length !== 1) faults.push('not one h1');
  for (const e of document.querySelectorAll('[id]')) {
    if (seen.has(e.id)) faults.push('id twice: ' + e.id);
    seen.add(e.id);
  }
  for (const e of document.querySelectorAll('[aria-labelledby]'))
    if (!seen.has(e.getAttribute('aria-labelledby'))) faults.push('label of nothing');
  for (const a of document.querySelectorAll('a'))
    if (!seen.has(a.getAttribute('href').slice(1))) faults.push('link to nothing: ' + a.textContent);
  for (const i of document.querySelectorAll('img')) {
    if (!i.alt || i.alt.length > ALT_LENGTH) faults.push('alt: ' + i.alt);
    if (!i.complete || !i.naturalWidth) faults.push('no picture: ' + i.alt);
  }
  for (const t of document.querySelectorAll('table')) {
    if (!t.caption) faults.push('no caption');
    for (const h of t.querySelectorAll('th')) if (!h.scope) faults.push('no scope');
    const wide = t.rows[0].cells.length;
    for (const r of t.rows) if (r.cells.length !== wide) faults.push('ragged: ' + t.caption.textContent);
  }
  for (const s of document.querySelectorAll('.scroll'))
    if (s.tabIndex !== 0 || !s.getAttribute('aria-label')) faults.push('not to be scrolled by keyboard');
  if (!document.documentElement.lang || !document.title) faults.push('no lang or title');
  return faults;
})()
""".replace("ALT_LENGTH", str(ALT_LENGTH))

CONTRAST = """
(() => {
  const part = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const rgba = s => { const n = s.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const back = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
  let worst = [99, ''];
  for (const d of document.querySelectorAll('details')) d.open = true;
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(back(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + ' ' + e.textContent.slice(0, 40)];
  }
  return worst;
})()
"""

OVERFLOWING = """
[document.documentElement.scrollWidth, innerWidth, [...document.querySelectorAll('body *')].filter(
  e => !e.closest('.scroll') && !e.matches('.skip') && e.getBoundingClientRect().right > innerWidth + 1
).map(e => e.tagName + ' ' + e.textContent.slice(0, 60))]
"""

FOCUSED = """
(() => { const e = document.activeElement, s = getComputedStyle(e), b = e.getBoundingClientRect();
  return {tag: e.tagName, name: e.getAttribute('aria-label') || e.textContent, outline: s.outlineStyle,
          left: b.left, id: e.id}; })()
"""


REACHABLE = (
    "[...document.querySelectorAll('main .scroll, main summary, main a, main select, main button, main .chart')]"
    ".filter(e => e.tagName === 'SUMMARY' || !e.closest('details:not([open])'))"
)


SCROLLED = """
new Promise(done => { const end = performance.now() + 20000, look = () => {
  const left = document.activeElement.scrollLeft;
  if (left > 0 || performance.now() > end) done(left); else setTimeout(look, 50); }; look(); })
"""  # scrolling is smooth, and the machine may be busy


def test_structure_is_sound(browser: Any, file: Path) -> None:
    browser.open(file)
    assert browser.evaluate(AUDIT) == []
    assert (
        browser.evaluate("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
        == 0
    )
    roles = browser.roles()
    kinds = [role for role, _ in roles]
    assert [kinds.count(role) for role in ("banner", "navigation", "main")] == [1, 1, 1]
    assert ("navigation", "Contents") in roles
    assert ("region", "Table: Every scenario, predicted beside measured") in roles
    assert all(name for role, name in roles if role in ("image", "img", "region", "table", "link"))


@pytest.mark.parametrize("wide", [320, 480, 1200])
def test_nothing_is_wider_than_the_window_but_what_scrolls(browser: Any, file: Path, wide: int) -> None:
    browser.open(file, wide=wide)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    width, window, too_wide = browser.evaluate(OVERFLOWING)
    assert too_wide == []
    assert width <= window == wide


@pytest.mark.parametrize(
    ("scheme", "media"),
    [("light", "screen"), ("dark", "screen"), pytest.param("light", "print", marks=pytest.mark.slow)],
)
def test_text_stands_out_from_its_ground(browser: Any, file: Path, scheme: str, media: str) -> None:
    browser.open(file, scheme=scheme, media=media)
    ratio, where = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    ground = browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(22, 22, 22)" if scheme == "dark" else "rgb(255, 255, 255)")


def test_everything_is_reached_and_opened_by_keyboard(browser: Any, file: Path) -> None:
    browser.open(file, wide=600)
    browser.press("Tab")
    first = browser.evaluate(FOCUSED)
    assert (first["name"], first["left"] >= 0) == ("Skip to the report", True)
    browser.press("Enter")
    assert browser.evaluate(FOCUSED)["id"] == "main"
    reached = []
    expected = browser.evaluate(f"{REACHABLE}.length")
    for _ in range(expected):
        browser.press("Tab")
        found = browser.evaluate(FOCUSED)
        assert found["outline"] not in ("none", ""), found
        reached.append(found["tag"])
    assert reached == browser.evaluate(f"{REACHABLE}.map(e => e.tagName)")
    assert {"DIV", "SUMMARY"} <= set(reached)
    browser.evaluate("document.querySelector('main summary').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.parentElement.open") is True


def test_a_narrow_table_scrolls_by_keyboard(browser: Any, file: Path) -> None:
    browser.open(file, wide=320)
    browser.evaluate("document.querySelector('main .scroll').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(SCROLLED) > 0
