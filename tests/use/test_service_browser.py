"""The page of `rescene serve` in a real browser: a picture chosen, dropped and pasted, and what the page then shows."""

import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from rescene.use import Model, Service, serving

sys.path.append(str(Path(__file__).parents[1] / "report"))
from browser import CHROMIUM, browser  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")]
PHONE = 390
CLASSES = [
    "red fox",
    "green tree frog",
    "blue <b>whale</b>",
    "a class with a very long name that must not make the page wider",
]
ABOUT = {
    "arch": {"name": "mlp", "image_size": 32},
    "classes": CLASSES,
    "aa": 81.25,
    "title": "Moments",
    "data": "my photographs: 2,000 images, 4 sites",
    "lens": "leaves",
    "lens_made_from": "procedural pictures alone",
    "privacy": "(8.00, 1e-05)-differentially private for each image.",
}
WAIT = "(async () => {{ for (let i = 0; i < 200 && !({0}); i++) await new Promise(done => setTimeout(done, 50)); return {0}; }})()"


def colours(pixels):
    found = pixels.float().mean(dim=(2, 3)) / 100
    return torch.cat([found, torch.zeros(len(found), 1)], dim=1)


@pytest.fixture(scope="module")
def address():
    with serving(Service(Model(Path("colours.safetensors"), ABOUT, colours), max_bytes=300_000)) as found:
        yield found


@pytest.fixture(scope="module")
def tab():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in {"fox": (230, 60, 40), "frog": (40, 200, 60), "whale": (40, 60, 210)}.items():
        Image.linear_gradient("L").resize((240, 180)).convert("RGB").point(lambda v: v // 8).save(
            folder / f"{name}.png"
        )
        Image.blend(Image.new("RGB", (240, 180), colour), Image.open(folder / f"{name}.png"), 0.2).save(
            folder / f"{name}.png"
        )
    (folder / "notes.png").write_text("no picture")
    (folder / "huge.png").write_bytes(bytes(300_001))
    return folder


def answers(tab, count):
    """The text of each answer, newest first, once there are so many."""
    done = "[...document.querySelectorAll('.answer')].map(one => one.lastElementChild.innerText)"
    ready = f"document.querySelectorAll('.answer .guess.first, .answer .error').length >= {count}"
    assert tab.ask(WAIT.format(ready))
    return tab.ask(done)


def opened(tab, address, **how):
    tab.open(address, **how)
    assert tab.ask(WAIT.format("!document.getElementById('about').hidden"))


def choose(tab, *paths):
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])


def keep(tab, name):
    """With SCREENSHOTS=folder, a picture of the page to look at."""
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(tab.picture())


@pytest.mark.parametrize(("width", "dark"), [(1000, False), (PHONE, True)])
def test_a_chosen_picture_is_named_and_the_page_says_what_the_model_is(tab, address, files, width, dark):
    opened(tab, address, width=width, dark=dark)
    text = tab.ask("document.body.innerText")
    for words in (
        "4 classes",
        "81.3 %",
        "25.0 %",
        "Trained with Moments on my photographs",
        "procedural pictures alone",
        "differentially private",
    ):
        assert words in text
    choose(tab, files / "whale.png")
    (found,) = answers(tab, 1)
    assert found.splitlines()[0] == "blue <b>whale</b>"  # text, not HTML
    assert tab.ask("document.querySelectorAll('.answer b').length") == 0
    widths = tab.ask("[...document.querySelectorAll('.bar .value')].map(bar => +bar.getAttribute('width'))")
    assert len(widths) == 4 and widths == sorted(widths, reverse=True) and sum(widths) == pytest.approx(100)
    assert tab.ask("document.querySelector('.answer img').naturalWidth") == 240
    assert tab.ask("document.documentElement.scrollWidth") <= width
    keep(tab, f"service-{width}{'-dark' if dark else ''}")


def test_pictures_are_dropped(tab, address, files):
    opened(tab, address)
    data = {"items": [], "files": [str(files / "fox.png"), str(files / "frog.png")], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        tab.call("Input.dispatchDragEvent", type=kind, x=300, y=300, data=data)
    newest, first = answers(tab, 2)
    assert first.startswith("red fox") and newest.startswith("green tree frog")
    assert tab.ask("document.body.classList.contains('over')") is False


def test_a_picture_is_pasted(tab, address):
    opened(tab, address)
    tab.ask(
        "new Promise(done => {const c = document.createElement('canvas'); c.width = c.height = 50; const g = c.getContext('2d');"
        "g.fillStyle = 'rgb(20,20,250)'; g.fillRect(0, 0, 50, 50); c.toBlob(blob => {const data = new DataTransfer();"
        "data.items.add(new File([blob], 'image.png', {type: 'image/png'}));"
        "document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true})); done(true)})})"
    )
    (found,) = answers(tab, 1)
    assert found.startswith("blue <b>whale</b>")


def test_what_cannot_be_read_is_told_and_the_next_picture_works(tab, address, files):
    opened(tab, address)
    choose(tab, files / "notes.png", files / "huge.png", files / "frog.png")
    good, huge, notes = answers(tab, 3)
    assert "cannot be read as a picture" in notes and "[E284]" in notes
    assert "too large" in huge and "[E283]" in huge and good.startswith("green tree frog")
    keep(tab, "service-errors")


def test_the_page_asks_nobody_else(tab, address):
    before = len(tab.requests)
    opened(tab, address)
    asked = tab.requests[before:]
    assert asked and all(one.startswith(address) for one in asked)
    assert tab.ask("fetch('https://example.org/').then(() => 'sent', () => 'blocked')") == "blocked"


def test_a_service_that_is_gone_is_told(tab, files):
    with serving(Service(Model(Path("colours.safetensors"), ABOUT, colours))) as address:
        opened(tab, address)
    choose(tab, files / "fox.png")
    assert "does not answer" in answers(tab, 1)[0]
