"""Plots: files of the right size, colours that stay with their strategy, nothing beyond the panels."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from penstock.lab import plots
from penstock.lab.plots import DPI, Labels, colours_of, ink, plot_bars, plot_heat_map, plot_lines, right_edge
from tests.unit.lab.png import check_nothing_is_cut, png_size

NAN = float("nan")
LABELS = Labels("title", "x", "y")
MANY = [f"pipedec[width={width},children={children}]" for width in (8, 16, 32, 64) for children in (2, 4, 8, 16)]


@pytest.mark.parametrize("labels", [["pipedec"], ["autoregressive", "pipedec"], ["autoregressive", *MANY]])
def test_lines_fit_with_few_and_with_many(figures: list[Figure], tmp_path: Path, labels: list[str]) -> None:
    y = [1.0, 0.8, NAN]
    plot_lines([2, 16, 64], dict.fromkeys(labels, (y, y, y)), LABELS, tmp_path / "p.png")
    (figure,) = figures
    assert png_size(tmp_path / "p.png") == tuple(int(side * DPI) for side in figure.get_size_inches())
    check_nothing_is_cut(figure)
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == labels
    assert axes.get_xscale() == "log", "from 2 to 64"
    assert len(axes.collections) == (len(labels) if len(labels) <= plots.MOST_BANDS else 0), "bands, where few"


def test_a_line_without_bounds_has_no_band(figures: list[Figure], tmp_path: Path) -> None:
    plot_lines([1, 2], {"a": ([1, 2], None, None)}, LABELS, tmp_path / "p.png")
    assert not figures[0].axes[0].collections
    assert figures[0].axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("labels", [["pipedec"], ["autoregressive", *MANY]])
def test_bars_have_a_panel_per_setting(figures: list[Figure], tmp_path: Path, labels: list[str]) -> None:
    bars = dict.fromkeys(labels, (2.0, 1.5, 2.5))
    panels = {(row, column): bars for row in ("chat", "code") for column in ("T = 0", "T = 1")}
    plot_bars(panels, LABELS, tmp_path / "p.png")
    (figure,) = figures
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["chat, T = 0", "chat, T = 1", "code, T = 0", "code, T = 1"]
    width, height = png_size(tmp_path / "p.png")
    assert (width, height) == tuple(int(side * DPI) for side in figure.get_size_inches())
    check_nothing_is_cut(figure)


def test_a_wide_interval_does_not_hide_the_bars() -> None:
    assert right_edge([(2.0, 1.5, 2.5), (3.0, 0.1, 90.0)]) == pytest.approx(1.03 * 6.0)
    assert right_edge([(2.0, 1.5, 2.5), (3.0, None, None)]) == pytest.approx(1.03 * 3.0)


def test_the_heat_map_frames_the_best_and_leaves_gaps(figures: list[Figure], tmp_path: Path) -> None:
    plot_heat_map(
        [[1.0, 2.0], [NAN, 4.0]], ["2", "4"], ["8", "16"], Labels("a long title " * 6, "", ""), tmp_path / "p.png"
    )
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "2.00", "4.00"]
    assert [patch.get_xy() for patch in axes.patches] == [(0.5, 0.5)]
    check_nothing_is_cut(figures[0])


def test_a_strategy_keeps_its_colour_and_its_entries_differ() -> None:
    alone, beside = colours_of(["pipedec"]), colours_of(["static_tree", "pipedec", "pipedec[width=8]"])
    assert alone["pipedec"] == beside["pipedec"] != beside["static_tree"]
    assert len(set(map(str, colours_of(["autoregressive", *MANY, "demo", "pipedec-7"]).values()))) == len(MANY) + 3
    assert [ink("black"), ink("white")] == ["white", "black"]
