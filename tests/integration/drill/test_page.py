"""The report and the index as a browser shows them: verdict, plots, nothing fetched, no complaint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.browser import Page
from tests.unit.drill.samples import failed, passed
from tikv_br.drill.history import past_drill_of
from tikv_br.drill.objectives import Measured, Objectives, judge
from tikv_br.drill.run import NOT_RECOVERED, OUTCOMES, RECOVERED, SCENARIOS, render_index, render_report
from tikv_br.report.facts import Compared, DrillVerdict, ReportedError

PLOTS = "[...document.querySelectorAll('svg[data-plot]')].map(plot => plot.dataset.plot)"
DRAWN = "[...document.querySelectorAll('svg[data-plot]')].every(plot => plot.getBBox().width > 100 && plot.getBBox().height > 10)"


def show(page: Page, path: Path, html: str) -> str:
    """Open a page from a file, and return what a reader sees."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(html, encoding="utf-8")
    page.go(path.as_uri())
    page.wait("document.readyState === 'complete'")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    return page.text()


def test_a_passed_drill_is_shown_with_all_plots(page: Page, tmp_path: Path) -> None:
    """Verdict, figures and what was compared are in the text, and every plot has been drawn; markup in texts is text."""
    text = show(page, tmp_path / "report.html", render_report(passed(4)))
    assert "Recovery drill against an emulator: passed" in text
    assert "a note <b>that is no markup</b>" in text
    assert text.count("✓ met") == 3
    assert "34.0 s" in text
    assert "complete up to\n2026-09-21 14:08:20 UTC backup-ts 469237681356800000" in text
    assert "Source: the cluster at 10.0.0.1:2379" in text
    assert page.value("document.querySelectorAll('.asked.met, .limit.met').length") == 4
    good = page.value("getComputedStyle(document.querySelector('.good')).color")
    assert page.value("getComputedStyle(document.querySelector('.asked')).fill") == good
    plots = page.value(PLOTS)
    assert plots == ["timeline", "throughput", "map", "trend-RTO", "trend-RPO", "trend-size", "trend-speed"]
    assert page.value(DRAWN)
    assert page.value("document.querySelectorAll('[data-plot=trend-RTO] circle').length") == 4
    assert page.value("document.querySelectorAll('[data-plot=map] rect').length") == 2
    assert "by the 3 regions of the source that held rows when they were backed up, neighbours merged." in text


def test_a_failed_drill_says_first_what_went_wrong(page: Page, tmp_path: Path) -> None:
    """The cause, what to do, and the step stand above the figures; what was not measured is said not to be."""
    text = show(page, tmp_path / "report.html", render_report(failed()))
    assert "Recovery drill against an emulator: failed" in text
    assert "sst/1.sst is not what was written" in text
    assert text.index("Use another copy.") < text.index("Objectives and measurements")
    assert "in the step “restore”" in text
    assert "not measured" in text
    assert "missed" in text
    headings = page.value("[...document.querySelectorAll('h2')].map(each => each.textContent)")
    assert "Comparisons" not in headings
    assert "Throughput over time" not in headings
    assert page.value("document.querySelectorAll('[data-plot=timeline] .broken').length") == 1


CONTRAST = """
(() => {
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const read = text => text.match(/[\\d.]+/g).map(Number);
  const behind = e => { for (; e; e = e.parentElement) { const c = read(getComputedStyle(e).backgroundColor); if (c[3] !== 0) return c; } };
  const poor = [];
  for (const e of document.querySelectorAll('body *:not(title)')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(e), svg = e.closest('svg');
    const [a, b] = [light(read(svg ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) poor.push([e.textContent.trim().slice(0, 40), ratio]);
  }
  return poor;
})()
"""
"""Texts whose contrast is less than WCAG 2 wants at level AA."""
OVERFLOWING = "[...document.querySelectorAll('#goals, #compared')].filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.id)"
NAMELESS = "[...document.querySelectorAll('svg')].filter(plot => plot.getAttribute('role') !== 'img' || plot.getAttribute('aria-label').length < 20).length"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_readable_by_all_and_everywhere(page: Page, tmp_path: Path, scheme: str) -> None:
    """In both colour schemes texts stand out; plots say in words what they show; a small screen need not be moved sideways."""
    try:
        page.colour_scheme(scheme)
        for report in (passed(4), failed()):
            page.size(1200, 900)
            show(page, tmp_path / "report.html", render_report(report))
            page.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert page.value(CONTRAST) == []
            assert page.value(NAMELESS) == 0
            assert page.value("document.querySelectorAll('h1').length") == 1
            assert page.value("document.documentElement.lang") == "en"
            page.size(390, 900)
            assert page.value("document.documentElement.scrollWidth") <= 390
            assert page.value(OVERFLOWING) == []
    finally:
        page.colour_scheme("light")
        page.size(1200, 900)


@pytest.mark.parametrize("scenario", ["lost-cluster", "deleted-range", "corrupt-backup", "stale-safe-point"])
def test_each_scenario_is_told_in_a_sentence(page: Page, tmp_path: Path, scenario: str) -> None:
    """Passed and failed, the page describes the rehearsal, and draws its figures."""
    for report in (passed(2), failed()):
        text = show(page, tmp_path / "report.html", render_report(replace(report, scenario=scenario)))
        assert f"Recovery drill against an emulator: {report.verdict.value}" in text
        assert SCENARIOS[scenario] in text
        assert OUTCOMES.get(scenario, (RECOVERED, NOT_RECOVERED))[report.verdict is DrillVerdict.FAILED] in text
        assert {"timeline", "map"} <= set(page.value(PLOTS))
        assert page.value(DRAWN)


def test_a_missed_objective_is_named_beside_what_worked(page: Page, tmp_path: Path) -> None:
    """Also where nothing is recovered: an old backup whose damage was found."""
    missed = judge(Objectives(max_age=1.0), Measured(age=70.0))
    report = replace(passed(), verdict=DrillVerdict.MISSED, scenario="corrupt-backup", goals=missed)
    text = show(page, tmp_path / "report.html", render_report(report))
    assert f"{OUTCOMES['corrupt-backup'][0]} But it missed objectives: backup age." in text
    assert "recovery worked" not in text


def test_a_backup_without_a_key_is_said_to_prove_little(page: Page, tmp_path: Path) -> None:
    """It came back, every key of it: a reader must not take that for a recovery of the data."""
    report = replace(passed(), goals=judge(Objectives(), Measured(rto=1.0, keys=0)), samples=(), keyspace_map=())
    text = show(page, tmp_path / "report.html", render_report(report))
    assert "But the backup has no keys, so this proves little" in text
    assert "No transfer is recorded." in text


def test_hostile_texts_are_inert(page: Page, tmp_path: Path) -> None:
    """Keys, names and messages with markup, script or another direction are text, on the page and in the index."""
    evil = "</title></style><script>document.title='owned'</script><img src=http://127.0.0.1:1/x onerror=alert(1)>\u202e\x00"
    report = passed(2)
    trouble = ReportedError(evil, 1, evil, evil, evil)
    hostile = replace(
        report,
        id=evil,
        verdict=DrillVerdict.FAILED,
        target=evil,
        trouble=trouble,
        phases=(replace(report.phases[0], name=evil),),
        keyspace_map=(structs.replace(report.keyspace_map[0], start=evil, end=evil),),
        compared=(Compared(evil, evil, 1, 1),),
        notices=(evil,),
    )
    text = show(page, tmp_path / "report.html", render_report(hostile))
    assert text.count("onerror=alert(1)>\\u202e\\x00") >= 6
    assert page.value("document.querySelectorAll('script, img').length") == 0
    assert page.value("document.title").startswith("Recovery drill </title>")
    show(
        page, tmp_path / "index.html", render_index([replace(past_drill_of(report.to_json()), id=evil, scenario=evil)])
    )
    assert page.value("document.querySelectorAll('script, img').length") == 0
    assert page.value("document.querySelector('#drills a').href").startswith(tmp_path.as_uri() + "/reports/")


def test_the_index_lists_all_drills_and_leads_to_their_pages(page: Page, tmp_path: Path) -> None:
    """The newest stands first, and its link is a page."""
    report = passed(2)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / f"{report.id}.html").write_text(render_report(report), encoding="utf-8")
    text = show(
        page,
        tmp_path / "index.html",
        render_index([past_drill_of(failed().to_json()), past_drill_of(report.to_json())]),
    )
    assert text.index("passed") < text.index("failed")
    page.go(page.value("document.querySelector('#drills a').href"))
    page.wait("document.querySelector('#verdict') && document.readyState === 'complete'")
    assert "Recovery drill against an emulator: passed" in page.text()
