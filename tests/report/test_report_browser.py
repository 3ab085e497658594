"""The page in a real browser: figures to be seen, no request, tables that sort, a phone that need not scroll sideways."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browser
from report_fixtures import config, cost, write_run, write_running

from rescene.report import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium"),
]
PHONE = 390
OPEN = "document.querySelectorAll('details').forEach(box => box.open = true)"
PAPER = 688  # A4 less its margins


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, two seeds, one of them with a long name; every figure has a deviation."""
    base = tmp_path_factory.mktemp("page")
    names = ("rescene", "fedavg", "my-quite-long-method-name-with-words")
    folders = [write_run(base / f"{name}-{seed}", name, seed) for name in names for seed in (0, 1)]
    folders.append(write_run(base / "rescene-2", "rescene", 2, cost=cost(68_666, 75, True)))
    return write_report(folders, base / "report.html")


def methods(tab: Tab) -> list[str]:
    rows = "document.querySelectorAll('#comparison tbody tr')"
    return tab.ask(f"[...{rows}].map(row => row.cells[0].textContent.trim().replace(/^\\W+/, ''))")


def titles(tab: Tab) -> str:
    return "[...document.querySelectorAll('#comparison th button')]"


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (PHONE, False)])
def test_figures_are_there_and_seen(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.open(page, width, dark)
    tab.ask(OPEN)
    boxes = tab.ask(
        "[...document.querySelectorAll('svg.plot')].map(plot => {const box = plot.getBoundingClientRect();"
        "return [plot.closest('figure').id, box.width, box.height, plot.querySelectorAll('path, image').length]})"
    )
    assert len(boxes) >= 14
    for name, wide, high, shapes in boxes:
        assert min(200, width / 2) < wide <= width and high > 60 and shapes > 3, name
    ink, paper = (tab.ask(f"getComputedStyle(document.body).{key}") for key in ("color", "backgroundColor"))
    light = [sum(map(int, text[4:-1].split(","))) for text in (ink, paper)]
    assert (light[0] > light[1]) == dark  # letters are light on dark, dark on light
    text = tab.ask("getComputedStyle(document.querySelector('#figure-tasks svg text')).fill")
    assert (sum(map(int, text[4:-1].split(","))) > 380) == dark  # figures follow


def test_no_request_leaves_the_page(tab: Tab, page: Path) -> None:
    tab.requests.clear()
    tab.open(page)
    tab.ask(OPEN)
    tab.ask("window.scrollTo(0, document.body.scrollHeight)")
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    # and could not: the page's own policy refuses what a hostile name might smuggle in
    tab.ask("document.body.append(Object.assign(new Image(), {src: 'http://192.0.2.1/x.png'}))")
    refused = tab.ask("fetch('http://192.0.2.1/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    assert (
        tab.ask("document.body.innerHTML += '<img src=x onerror=\"window.hurt = 1\">'; window.hurt ?? 'unhurt'")
        == "unhurt"
    )


def test_a_click_on_a_title_sorts_and_a_second_turns_it_round(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert methods(tab)[0] == "ReSCENE"
    tab.ask(f"{titles(tab)}[0].click()")
    by_name = methods(tab)
    assert by_name == sorted(by_name, key=str.lower) and by_name[0] == "FedAvg"
    tab.ask(f"{titles(tab)}[0].click()")
    assert methods(tab) == by_name[::-1]
    tab.ask(f"{titles(tab)}.find(one => one.textContent.startsWith('Upload')).click()")
    assert methods(tab)[0] == "FedAvg" and methods(tab)[-1] == "ReSCENE"  # bytes by size, not by letters
    assert tab.ask("document.querySelectorAll('#comparison th[aria-sort]').length") == 1
    tab.ask(f"{titles(tab)}.find(one => one.textContent.startsWith('Near')).click()")
    assert methods(tab)[0] == "ReSCENE"  # what was not measured stays at the end
    tab.ask(f"{titles(tab)}.find(one => one.textContent.startsWith('Near')).click()")
    assert methods(tab)[0] == "ReSCENE"


def test_the_first_screen_is_the_summary_and_a_link_opens_its_section(tab: Tab, page: Path) -> None:
    tab.open(page, 1280)
    assert tab.ask("document.querySelector('#figure-incremental').getBoundingClientRect().top") < 800
    assert tab.ask("document.querySelectorAll('details.fold[open]').length") == 0
    tab.ask("document.querySelector('nav a[href=\"#cost\"]').click()")
    tab.ask("new Promise(done => setTimeout(done, 300))")
    assert tab.ask("[...document.querySelectorAll('details.fold[open]')].map(box => box.parentElement.id)") == ["cost"]


def test_a_phone_need_not_scroll_sideways(tab: Tab, page: Path) -> None:
    tab.open(page, PHONE)
    tab.ask(OPEN)
    assert tab.ask("document.documentElement.scrollWidth") <= PHONE
    tab.ask("window.scrollTo(500, 0)")
    assert tab.ask("window.scrollX") == 0
    sizes = tab.ask("[...document.querySelectorAll('p, td, dd')].map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes) >= 12


def test_a_phone_shows_figures_beside_long_names(tab: Tab, page: Path) -> None:
    tab.open(page, PHONE)
    cell = "document.querySelector('#comparison tbody tr').cells"
    titles = tab.ask("[...document.querySelectorAll('#comparison th')].map(each => each.textContent)")
    at = next(i for i, title in enumerate(titles) if title.startswith("AIA"))
    assert tab.ask(f"{cell}[{at}].getBoundingClientRect().right") <= PHONE
    box = "document.querySelector('#comparison .scroll')"
    assert tab.ask(f"{box}.scrollWidth > {box}.clientWidth")  # more columns, and a shadow that says so
    assert "gradient" in tab.ask(f"getComputedStyle({box}).backgroundImage")
    tab.ask(f"{box}.scrollLeft = 1000")
    assert tab.ask(f"{cell}[0].getBoundingClientRect().left") >= 0  # names stay


def test_printed_all_is_open_and_the_menu_gone(tab: Tab, page: Path) -> None:
    tab.open(page, media="print")
    assert tab.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    tops = [tab.ask(f"document.querySelector('{place}').getBoundingClientRect().top") for place in
            ("#comparison table", "#cost table", "#settings table")]  # fmt: skip
    assert tops == sorted(tops)  # results first, the long list of settings last
    heights = "[...document.querySelectorAll('details table')].map(each => each.getBoundingClientRect().height)"
    assert min(tab.ask(heights)) > 50


@pytest.mark.parametrize(("width", "media"), [(PAPER, "print"), (1280, "screen"), (PHONE, "screen")])
def test_settings_and_figures_stay_in_one_piece(tab: Tab, tmp_path: Path, width: int, media: str) -> None:
    folders = []
    for scope, epochs in (("client", 100), ("global", 10)):
        settings = config("rescene", 0)
        settings["method"]["budget_scope"], settings["train"]["server_epochs"] = scope, epochs
        folders.append(write_run(tmp_path / scope, config=settings))
    tab.open(write_report(folders, tmp_path / "report.html"), width, media=media)
    names = tab.ask("[...document.querySelectorAll('.named td:first-child')].map(cell => cell.textContent)")
    assert any("E_srv=100 budget_scope=client" in name for name in names)
    assert tab.ask(_BROKEN.format(cells=".named td:first-child", piece="[^ ]+")) == []
    assert tab.ask(_BROKEN.format(cells=".named td", piece="[0-9.]+ [kMG]?B")) == []
    assert tab.ask("document.documentElement.scrollWidth") <= width


# The pieces of text in these cells that stand on more than one line.
_BROKEN = """[...document.querySelectorAll('{cells}')].flatMap(cell => {{
  const found = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (texts.nextNode()) for (const part of texts.currentNode.data.matchAll(/{piece}/g)) {{
    range.setStart(texts.currentNode, part.index);
    range.setEnd(texts.currentNode, part.index + part[0].length);
    if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) found.push(part[0]);
  }}
  return found;
}})"""


def test_a_table_that_goes_on_repeats_its_titles_in_print(tab: Tab, page: Path) -> None:
    tab.open(page, media="print")
    assert tab.ask("[...document.querySelectorAll('table')].every(table => table.tHead)")
    displays = "[...document.querySelectorAll('th button')].map(each => getComputedStyle(each).display)"
    assert set(tab.ask(displays)) == {"contents"}  # Chromium does not repeat what holds a box of a button


def test_a_page_of_a_running_run_reads_itself_again(tab: Tab, tmp_path: Path) -> None:
    going = write_report([write_running(tmp_path / "a" / "rescene-s0")], tmp_path / "a" / "report.html")
    done = write_report([write_run(tmp_path / "b" / "rescene-s0")], tmp_path / "b" / "report.html")
    going.write_text(going.read_text("utf-8").replace('content="10"', 'content="1"'), "utf-8")
    tab.open(going)
    assert "task 2 of 5" in tab.ask("document.body.innerText")
    shutil.copy(done, going)  # the run ends and writes its page
    tab.wait_for_reload()
    while "task 2 of 5" in tab.ask("document.body.innerText"):  # read just before the copy
        tab.wait_for_reload()
    assert "ReSCENE reaches" in tab.ask("document.body.innerText")
    assert tab.ask("document.querySelectorAll('meta[http-equiv=refresh]').length") == 0
