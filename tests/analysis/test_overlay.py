"""Two runs over each other: the right curves, one page that stands alone, quiet when empty."""

import base64
import dataclasses
import re

import numpy as np
import pytest

from mdi_analysis import compare, overlay_figure, overlay_page, save_overlay
from mdi_analysis.overlay import ROWS, overlay_rows
from mdi_shared.errors import ConfigError, SaveError

NAMES = ("real", "model <b>")


@pytest.fixture
def slower(run):
    """The small run with decode steps half as long again."""
    start, end = run.steps["t_dev_start"], run.steps["t_dev_end"]
    longer = np.where(run.steps["kind"] == "decode", 1.5, 1.0)
    return run.but(steps=run.steps.assign(t_dev_end=start + (end - start) * longer))


def curves(ax):
    return {str(line.get_label()).split(" (")[0]: line for line in ax.lines}


def test_every_panel_shows_both_runs(run, slower):
    figures = overlay_rows(run, slower, NAMES)
    assert list(figures) == list(ROWS)
    shares = figures["Step times and gaps"].axes
    decode = curves(shares[1])
    assert set(decode["real"].get_xdata()) == {2}
    assert set(decode["model <b>"].get_xdata()) == {3}
    ttft = curves(figures["Latency"].axes[0])
    assert list(ttft["real"].get_xdata()) == list(ttft["model <b>"].get_xdata()) == [16, 16, 21]
    for title in ("Requests and memory over time", "Throughput over time"):
        for ax in figures[title].axes:
            assert [text.get_text() for text in ax.get_legend().get_texts()] == list(NAMES)


def test_percentile_errors_are_drawn_by_kind(run, slower):
    errors = curves(overlay_rows(run, slower, NAMES)["Step time by rows"].axes[2])
    assert errors["prefill"].get_ydata() == pytest.approx(np.zeros(99))
    assert errors["decode"].get_ydata() == pytest.approx(np.full(99, 0.5))


def test_one_figure_holds_all_rows(run, slower):
    figure = overlay_figure(run, slower, NAMES)
    assert len(figure.axes) == 3 * len(ROWS)
    assert "real: tiny, H200, simulator, 5 steps" in figure.get_suptitle()


def test_page_stands_alone_and_escapes_names(run, slower):
    page = overlay_page(compare(run, slower, NAMES), run, slower, basis={"real": "measured"})
    pictures = re.findall(r"src='data:image/png;base64,([^']+)'", page)
    assert len(pictures) == len(ROWS)
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for data in pictures)
    assert "<b>real</b>: tiny, H200, measured, 5 steps, 4 requests" in page
    assert "model <b>" not in page
    assert "model &lt;b&gt;" in page
    assert "decode steps paired: differ by 50.0% in the median, 50.0% at P90" in page
    worse = r"<tr class='worse'><td class='text'>decode step, P50, ms</td><td>2\.00</td>"
    assert re.search(worse + r"<td>3\.00</td><td>▼ \+50\.0%</td>", page)
    assert not re.search(r"\w+_(ms|s|gpu|share|mean)\b", re.sub(r"<style>.*?</style>", "", page,
                                                               flags=re.DOTALL))  # fmt: skip
    tables, pictures = page.index("<details>"), page.index("<img")
    assert page.index("no recorded one differs") < page.index("at a glance") < pictures < tables
    assert not re.search(r"https?://|<script|<link", page)


def test_the_options_that_differ_come_first(run, slower):
    """Those that both runs record; a model's numbers are named, not listed."""
    configs = (
        {"scheduler": {"max_num_seqs": 8, "eos": None}, "ranks": 1, "engine": {"device": "cuda"},
         "cost": {"kind": "linear", "prefill": {"const": 1}}, "left_free": {"a": 1}},
        {"scheduler": {"max_num_seqs": 16, "eos": None}, "ranks": 1,
         "cost": {"kind": "roofline", "hardware": "h200", "ep": 2}, "left_free": {"a": 2}},
    )  # fmt: skip
    a, b = (
        each.but(metadata=dataclasses.replace(each.metadata, config=config))
        for each, config in zip((run, slower), configs, strict=True)
    )
    found = compare(a, b, NAMES)
    assert found.options == [
        ("cost", "kind linear", "kind roofline, hardware h200, ep 2"),
        ("scheduler max_num_seqs", "8", "16"),
    ]
    page = overlay_page(found, a, b)
    assert page.index("<td class='text'>scheduler max_num_seqs</td>") < page.index("<img")


def test_empty_runs_and_absent_values_draw_without_a_warning(run, nothing):
    overlay_figure(run, nothing).canvas.draw()
    overlay_figure(nothing, nothing).canvas.draw()
    bare = run.but(items=None, metadata=type(run.metadata)(None, None, None, None, None, {}))
    overlay_figure(bare, run).canvas.draw()


def test_a_refused_file_is_one_line_and_leaves_the_old_one(run, tmp_path):
    found = compare(run, run, NAMES)
    (tmp_path / "there").write_text("kept")
    with pytest.raises(SaveError, match="cannot be written"):
        save_overlay(found, run, run, png=tmp_path / "there" / "x.png")
    assert (tmp_path / "there").read_text() == "kept"
    assert save_overlay(found, run, run) == []


def test_names_must_differ(run):
    with pytest.raises(ConfigError, match="must be two different names"):
        overlay_figure(run, run, ("a", "a"))
