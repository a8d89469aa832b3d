"""The plot of each stage's work over time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from penstock.lab.bench.meter import Bar, Timeline
from penstock.lab.bench.report import plot_timelines
from penstock.lab.plots import Labels
from tests.unit.lab.png import check_nothing_is_cut

LABELS = Labels("title", "x", "y")


def test_the_timeline_ends_with_its_window_and_shows_what_was_of_no_use(figures: list[Figure], tmp_path: Path) -> None:
    bars = (Bar(0, -0.5, 0.5, 1, True), Bar(1, 0.5, 9.0, 32, False), Bar(1, 9.0, 9.5, 1, True))
    timeline = Timeline(2, bars, ((0.5, 1), (2.0, 2), (9.0, 1)))
    plot_timelines({"autoregressive": timeline, "pipedec": timeline}, 4.0, LABELS, tmp_path / "p.png")
    above, below = figures[0].axes
    assert [(bar.get_x(), bar.get_width()) for bar in above.patches] == [(0.0, 0.5), (0.5, 3.5)]
    assert above.get_title("left") == "autoregressive: 3 tokens"
    white = [bar.get_facecolor()[:3] == (1, 1, 1) for bar in below.patches]
    assert white == [False, True]
    assert [text.get_text() for text in below.texts] == ["1", "32"]
    assert timeline.seconds == 9.0
    check_nothing_is_cut(figures[0])
