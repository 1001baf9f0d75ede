"""The load of a mixture's experts on the device page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_engine import make_memory_ledger, make_model_info
from tui_harness import NOW_NS, busy_snapshot

from termgen.client import ModelInfo
from termgen.tui.dashboard.pages.experts import LABEL, MOST_ROWS, experts_height, experts_panel
from termgen.tui.dashboard.pages.graphs import graphs_page
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row, row_text, row_width
from termgen.vocabulary.device.expert_load import ExpertLoad
from termgen.vocabulary.memory_ledger import WeightReads

MIXTURE = make_memory_ledger(reads=WeightReads(always_bytes=10, experts_bytes=100))


def model_of(device: str = "cpu", *, is_mixture: bool = True) -> ModelInfo:
    return make_model_info(device=device, memory=MIXTURE if is_mixture else make_memory_ledger())


def view_of(counts: np.ndarray | None, *, on_cpu: bool = True) -> DashboardView:
    store = DashboardStore(started_ns=NOW_NS - 10**9, on_cpu=on_cpu)
    load = None if counts is None else ExpertLoad.of(counts)
    store.set_snapshot(replace(busy_snapshot(), experts=load))
    return store.view(NOW_NS)


def text(rows: list[Row]) -> str:
    return "\n".join(row_text(row) for row in rows)


UNEVEN = np.array([[10] * 8, [0, 70, 0, 10, 0, 0, 0, 0], [16, 0, 24, 8, 8, 8, 8, 8]], np.int64)


def test_layers_experts_and_their_imbalance() -> None:
    rows = experts_panel(view_of(UNEVEN), model_of(), Frame(70, 7, True))
    shown = text(rows)
    assert "experts · 8 in each of 3 layers" in shown
    assert "busiest 3.5x an even share" in shown, "the mean of 1, 7 and 2.4"
    assert "most uneven: layer 1, expert 1 with 7.0x" in shown
    assert "29% of the experts had no token since the start" in shown
    cells = [row_text(row).strip("│ ").split() for row in rows[3:6]]
    assert cells == [["0", "▒▒▒▒▒▒▒▒"], ["1", "█", "▒"], ["2", "▓", "▓▒▒▒▒▒"]]


@pytest.mark.parametrize("width", [14, 20, 40, 80, 200])
@pytest.mark.parametrize("num_layers", [1, 5, 13, 94])
@pytest.mark.parametrize("num_experts", [4, 100, 512])
def test_any_number_fits(width: int, num_layers: int, num_experts: int) -> None:
    counts = np.full((num_layers, num_experts), 5, np.int64)
    view, model = view_of(counts), model_of()
    height = experts_height(view, model, 40, 2)
    assert height == 4 + min(MOST_ROWS, num_layers)
    rows = experts_panel(view, model, Frame(width, height, True))
    assert len(rows) == height and {row_width(row) for row in rows} == {width}
    layers = [row_text(row)[2:-2] for row in rows[3:-1]]
    assert len(layers) == min(MOST_ROWS, num_layers)
    assert {line[LABEL:].rstrip() for line in layers} == {
        "▒" * min(64, num_experts, max(1, width - 4 - LABEL))
    }
    names = [line[:LABEL].strip() for line in layers]
    assert names == sorted(names, key=int) and int(names[-1]) < num_layers


def test_of_many_layers_the_most_uneven_are_shown() -> None:
    counts = np.full((24, 8), 100, np.int64)
    counts[7, 2] = 900
    rows = experts_panel(view_of(counts), model_of(), Frame(60, 16, True))
    found = [row_text(row).strip("│ ").split() for row in rows[3:-1]]
    assert [name for name, *_ in found][:5] == ["0", "2", "4", "7", "8"] and len(found) == 12
    assert found[3][1] == "▒▒█▒▒▒▒▒"


def test_what_is_not_counted_says_so() -> None:
    def shown(view: DashboardView, device: str) -> str:
        return text(experts_panel(view, model_of(device), Frame(90, 3, True)))

    assert "is not counted in kernels of a GPU" in shown(view_of(None), "cuda:0")
    assert "is not counted where the weights are floats" in shown(view_of(None), "cpu")
    assert "no token went to any yet" in shown(view_of(np.zeros((2, 4), np.int64)), "cpu")
    empty = DashboardStore(started_ns=NOW_NS).view(NOW_NS)
    assert "not known yet" in shown(empty, "cpu")
    assert "not kept for this step" in shown(replace(empty, is_past=True), "cpu")


@pytest.mark.parametrize("size", [(60, 14), (80, 21), (110, 36), (140, 37), (200, 57)], ids=str)
@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_page_keeps_its_size(size: tuple[int, int], boxed: bool, device: str) -> None:
    view = view_of(UNEVEN, on_cpu=device == "cpu")
    rows = graphs_page(view, model_of(device), *size, boxed=boxed)
    assert len(rows) == size[1] and {row_width(row) for row in rows if row} <= {size[0]}
    assert size[1] < 30 or "busiest" in text(rows)


def test_other_models_have_no_such_panel() -> None:
    model = model_of(is_mixture=False)
    assert experts_height(view_of(None), model, 40, 2) == 0
    assert "experts" not in text(graphs_page(view_of(None), model, 140, 37, boxed=True))
