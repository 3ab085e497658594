"""Labels: short, cut where it hurts least, and never two alike in a figure; room for any number of them."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from rescene.core.method_style import style_of
from rescene.report.drawing import Plot, _drawn, name_rows, stroke, together
from rescene.report.formatting import distinct, shortened, visible, wrapped
from rescene.report.groups import RunGroup, telling, word

LONG = [f"ReSCENE step=fixed server_epochs={n} and a few other settings of it" for n in (1, 10, 100)]


def test_settings_are_called_as_the_papers_tables_call_them() -> None:
    told = {
        "train.server_epochs": 100,
        "method.step": "fixed",
        "privacy.epsilon": 8.0,
        "model.name": "mlp",
        "tasks.a{": None,
    }
    assert [word(key, value) for key, value in told.items()] == ["E_srv=100", "fixed steps", "ε=8", "mlp", ""]
    assert word("method.b{}", "{}") == "b{}={}"  # from other people's files
    assert word("federation.exclude", [2]) == "exclude=[2]"


def test_what_most_have_is_not_said_and_what_is_left_is_hinted_at() -> None:
    keys = ["federation.beta", "train.server_epochs", "method.step", "federation.wire", "train.lr"]
    values = [(0.5, 10, "fixed", "float32", 1), (0.5, 10, "fixed", "uint8", 1), (0.1, 10, "fixed", "float32", 1),
              (0.1, 100, "fixed", "float32", 1), (0.1, 100, "polyak", "float32", 2)]  # fmt: skip
    cells = [dict(zip(keys, row, strict=True)) for row in values]
    assert [" ".join(words) for words in telling(cells, [""] * 5, keys)] == [
        "beta=0.5 E_srv=10 fixed steps", "beta=0.5 E_srv=10 fixed steps uint8 wire", "beta=0.1 E_srv=10 fixed steps",
        "beta=0.1 E_srv=100 fixed steps", "beta=0.1 E_srv=100 …",
    ]  # fmt: skip


def test_what_is_asked_for_is_named_though_it_sets_nothing_apart() -> None:
    cell = {"train.server_epochs": 10}
    assert telling([cell], [""], [], ["train.server_epochs"]) == [["E_srv=10"]]
    assert telling([{}], [""], [], ["train.server_epochs"]) == [[]]


@pytest.mark.parametrize("limit", [2, 3, 10, 11])
def test_a_cut_keeps_both_ends(limit: int) -> None:
    text = "abcdefghijklmnop"
    cut = shortened(text, limit)
    assert len(cut) == limit and cut.count("…") == 1
    start, end = cut.split("…")
    assert text.startswith(start) and text.endswith(end)
    assert shortened(text, len(text)) == text


def test_lines_have_the_width_and_the_number_they_may_have() -> None:
    for text in (*LONG, "x" * 200, "one two"):
        parts = wrapped(text, 26).split("\n")
        assert len(parts) <= 2 and max(map(len, parts)) <= 26
    assert wrapped("", 10) == ""


def test_no_two_visible_labels_are_the_same() -> None:
    """Cut in the middle, or numbered where even that leaves them alike."""
    assert len(set(visible(LONG, 26))) == len(LONG)
    alike = [f"{'a' * 60}{n}{'b' * 60}" for n in range(3)]
    assert len(set(visible(alike, 20))) == 3
    assert distinct(["a (2)", "a", "a"]) == ["a (2)", "a", "a (3)"]


def lines(names: list[str], aspect: str = "auto") -> Plot:
    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for name in names:
            axes.plot([0, 1], label=name)
        axes.set(xlabel="x", ylabel="accuracy on seen classes (%)", aspect=aspect)

    return Plot("lines", "Lines", "", [{"a": 1}], draw, 3.5 if aspect == "auto" else 4.9)


def heights(plot: Plot) -> list[float]:
    """Inches of every axes, laid out for print without a warning; nothing reaches beyond the sheet, no legend into axes."""
    with warnings.catch_warnings(), _drawn(plot) as sheet:
        warnings.simplefilter("error")
        sheet.set_dpi(300)
        sheet.draw_without_rendering()
        (legend,) = sheet.legends
        box = legend.get_window_extent()
        assert box.x1 <= sheet.bbox.x1 + 1 and box.y1 <= sheet.bbox.y1 + 1
        for axes in sheet.axes:
            around = axes.get_tightbbox()
            assert around.y1 <= box.y0 + 1 and around.y0 >= 0 and around.x0 >= 0
        return [axes.get_window_extent().height / sheet.dpi for axes in sheet.axes]


def test_axes_keep_their_height_under_any_legend() -> None:
    (few,) = heights(lines(["a", "b"]))
    (many,) = heights(lines([f"ReSCENE beta=0.1 E_srv={n} fixed steps uint8 wire" for n in range(20)]))
    assert few > 2 and many == pytest.approx(few, abs=0.25)


def test_nothing_is_cut_from_square_axes() -> None:
    (height,) = heights(lines([f"ReSCENE beta=0.1 E_srv={n} fixed steps" for n in range(12)], "equal"))
    assert height > 3


def test_panels_keep_their_height_under_the_legend_they_share() -> None:
    names = [f"Raw upload (control) beta=0.1 E_srv={n}" for n in range(18)]
    alone = heights(together([lines(names[:2]), lines(names[:2])], 2))
    assert heights(together([lines(names), lines(names)], 2)) == pytest.approx(alone, abs=0.25)


def variant(number: int, method: str = "rescene") -> RunGroup:
    return RunGroup(method, LONG[number % 3], "x", number, (), ())


def test_names_down_the_side_differ() -> None:
    def draw(sheet: Any) -> None:
        name_rows(sheet.subplots(), [variant(n) for n in range(3)])

    with _drawn(Plot("names", "", "", [], draw)) as sheet:
        shown = [label.get_text() for label in sheet.axes[0].get_yticklabels()]
    assert len(set(shown)) == 3 and all(len(line) <= 30 for text in shown for line in text.split("\n"))


def test_many_variants_of_a_method_are_drawn_differently() -> None:
    styles = [stroke(variant(n), 6) for n in range(18)]
    assert len({(style["color"], style["fillstyle"]) for style in styles}) == 18
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 18  # also without markers


# sRGB as people without one kind of cone see it (Machado, Oliveira and Fernandes 2009, severity 1), on linear light
SIGHTS = {
    "all": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def lab(colour: str, sight: str) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as it is seen."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(SIGHTS[sight]) @ linear, 0, 1)
    white = np.array([0.9505, 1.0, 1.089])
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen / white
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
def test_the_ten_methods_differ_in_colour_to_everyone(sight: str) -> None:
    """A difference of 15 is several times what is seen side by side (about 2)."""
    known = ["rescene", "fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed", "feddm", "fedaf"]
    seen = {name: lab(style_of(name).colour, sight) for name in known}
    close = [(a, b) for a, b in combinations(known, 2) if np.linalg.norm(seen[a] - seen[b]) < 15]
    assert not close
