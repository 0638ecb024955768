"""The page of ``holdfast report`` in a real Chromium: it renders, sorts, filters and unfolds, and asks for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.cli.browser import Browser, missing
from tests.cli.test_run_report import HOSTILE, LEAF

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.manager import append_after_death

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run that was preempted, crashed and hung."""
    run = tmp_path_factory.mktemp("browser") / "run"
    options = hf.CheckpointManagerOptions(max_to_keep=4, best_fn="loss", best_mode="min")
    for start, how in enumerate(("preempted", "crashed", "hung", "finished")):
        with hf.CheckpointManager(run, options=options, metadata={"name": HOSTILE}) as manager:
            manager.restore_latest()
            for step in range(10 * start + 1, 10 * start + 4):
                layers = [{"kernel": np.full(50, step + n, np.float32), "bias": np.zeros(3)} for n in range(12)]
                manager.save(
                    step,
                    {"layers": layers, HOSTILE: step},
                    metrics={"loss": 1 / step, HOSTILE: step, "long" * 30: step},
                )
            manager.wait_until_finished()
        last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
        facts = {"how": how, "status": 1, "step": last["step"], "why": "no step within 9 s" if how == "hung" else None}
        append_after_death(run / "events.jsonl", {"event": "ended", "time": last["time"], "run": last["run"], **facts})
    page = run.parent / "a #report?.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_it_renders(browser: Browser, report: Path, width: int, dark: bool) -> None:
    browser.requests()
    browser.open(report, width=width, dark=dark)
    assert browser.log() == [], "errors, and breaches of the policy"
    assert browser.requests() == [report.as_uri()]
    assert browser.run("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    shown = browser.run(
        "const seen = (one) => { const box = one.getBoundingClientRect(); return box.width > 0 && box.height > 0; };"
        "return ['h1', '.figures b', '.timeline .programs rect', '.mark', '.chart .line', '.chart .kept', '.table td',"
        " '.tree summary', '.sizes rect'].filter((one) => !seen(document.querySelector(one)))"
    )
    assert [one for one in shown if not one.endswith(("line", "kept"))] == []  # flat lines have no height
    outside = browser.run(
        "return [...document.querySelectorAll('main *')].filter((one) => !one.closest('.table, .reading, svg, pre') &&"
        " one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 100))"
    )
    assert outside == []
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) is dark
    colours = [
        browser.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", *one)
        for one in ((".line", "stroke"), (".programs .how-crashed", "fill"))
    ]
    assert len(set(colours)) == 2
    assert "rgb(0, 0, 0)" not in colours, "the style of drawings is missing"


def test_names_are_only_text(browser: Browser, report: Path) -> None:
    browser.open(report)
    assert browser.run("return document.scripts.length") == 1
    names = browser.run("return [...document.querySelectorAll('code')].map((one) => one.textContent)")
    assert LEAF in names
    titles = browser.run("return [...document.querySelectorAll('figcaption b')].map((one) => one.textContent)")
    assert titles[:2] == ["loss", HOSTILE]
    assert browser.run("return document.querySelector('footer').textContent").startswith("Made by holdfast")
    marks = browser.run("return [...document.querySelectorAll('.mark')].map((one) => one.dataset.mark)")
    assert marks == ["preempted", "crash", "hung", "finished"]


def column(browser: Browser, name: str, number: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`[aria-label='${arguments[0]}'] tbody tr:not([hidden])`)].map((row) =>"
    )
    found: list[str] = browser.run(f"{script} row.cells[arguments[1]].textContent)", name, number)
    return found


def test_tables_sort_by_mouse_and_keyboard(browser: Browser, report: Path) -> None:
    browser.open(report)
    press = "document.querySelectorAll(\"[aria-label='Kept steps'] th button\")[arguments[0]].click()"
    before = column(browser, "Kept steps", 0)
    assert before == ["23", "31", "32", "33 best"]
    browser.run(press, 0)
    assert column(browser, "Kept steps", 0) == before[::-1]
    browser.run(press, 0)
    assert column(browser, "Kept steps", 0) == before
    browser.run("document.querySelectorAll(\"[aria-label='Kept steps'] th button\")[1].focus()")
    browser.press("Enter", "Enter")
    assert column(browser, "Kept steps", 0) == before[::-1]
    sorts = "return [...document.querySelectorAll(\"[aria-label='Kept steps'] th\")].map((one) => one.ariaSort)"
    assert browser.run(sorts)[:3] == ["none", "descending", "none"]
    names = column(browser, "Values by leaf", 0)
    browser.run("document.querySelectorAll(\"[aria-label='Values by leaf'] th button\")[6].click()")
    norms = [float(text) if text != "-" else -1.0 for text in column(browser, "Values by leaf", 6)]
    assert norms == sorted(norms, reverse=True)
    assert column(browser, "Values by leaf", 0) != names


def test_a_table_is_filtered(browser: Browser, report: Path) -> None:
    browser.open(report)
    type_ = (
        "const one = document.querySelector('input'); one.value = arguments[0]; one.dispatchEvent(new Event('input'))"
    )
    browser.run(type_, "7/KERN")
    assert column(browser, "Values by leaf", 0) == ["layers/7/kernel"]
    browser.run(type_, "")
    assert len(column(browser, "Values by leaf", 0)) == 25


def test_the_tree_unfolds(browser: Browser, report: Path) -> None:
    browser.open(report)
    shown = (
        "return [...document.querySelectorAll('.tree code')].filter((one) => one.checkVisibility())"
        ".map((one) => one.textContent)"
    )
    browser.run("document.querySelector('button[data-unfold=false]').click()")
    assert browser.run(shown) == ["state"]
    browser.run("document.querySelector('.tree summary').focus()")
    browser.press("Enter")
    assert browser.run(shown) == ["state", "layers", LEAF]
    browser.run("document.querySelector('button[data-unfold=true]').click()")
    assert len(browser.run(shown)) == 1 + 1 + 12 * 3 + 1


def test_charts_say_their_numbers(browser: Browser, report: Path) -> None:
    browser.open(report)
    reading = "return [...document.querySelectorAll('.reading:not([hidden])')].map((one) => one.textContent)"
    assert browser.run(reading) == []
    browser.run("document.querySelector('.chart .plot[tabindex]').focus()")
    assert browser.run(reading) == ["step 33: 0.0303"]
    browser.press("ArrowLeft", "Home")
    assert browser.run(reading) == ["step 1: 1"]
    box = browser.run(
        "document.activeElement.blur(); document.querySelector('.chart').scrollIntoView();"
        "const box = document.querySelector('.chart .plot').getBoundingClientRect();"
        "return [box.left, box.top, box.width]"
    )
    browser.command("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] - 2, y=box[1] + 20)
    assert browser.run(reading) == ["step 33: 0.0303"]


def test_it_prints(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.command("Emulation.setEmulatedMedia", media="print", features=[])
    try:
        assert browser.run("return getComputedStyle(document.querySelector('.tools')).display") == "none"
        assert browser.run("return getComputedStyle(document.querySelector('.table')).overflowX") == "visible"
        assert browser.command("Page.printToPDF", printBackground=True)["data"].startswith("JVBER")
    finally:
        browser.command("Emulation.setEmulatedMedia", media="", features=[])
