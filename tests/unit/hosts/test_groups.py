"""The doctor's groups of ranks: their slowest link, and a warning where that makes them slower than one host."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock.cluster import load_cluster
from penstock.hosts.doctor import EXAMPLE, examined_group, groups_of
from penstock.hosts.listing import advice_of, show_report
from penstock.hosts.probe import BYTES, SHAPES, DeviceRates, DoctorReport, ExaminedGroup, ExaminedHost, LinkRates

RATES = DeviceRates(
    device="cpu",
    threads=4,
    dtype="float32",
    weight_bandwidth_gb_s=10.0,
    compute_tflops=0.1,
    rows_per_second={1: 50.0, 64: 800.0},
)


def report(latency_ms: float, gbit_s: float = 10.0) -> DoctorReport:
    """Two equal hosts, whose links differ by their direction, and one that does not answer."""
    links = [
        LinkRates(source="a", to="b", latency_ms=latency_ms, bandwidth_gbit_s=2 * gbit_s),
        LinkRates(source="b", to="a", latency_ms=latency_ms / 2, bandwidth_gbit_s=gbit_s),
    ]
    hosts = [ExaminedHost(host=name, rates=[RATES]) for name in "ab"]
    return DoctorReport(hosts=[*hosts, ExaminedHost(host="c", problem="host c runs Penstock 0.0.1")], links=links)


def advice(found: DoctorReport, *groups: ExaminedGroup) -> list[str]:
    return [said for said in advice_of(msgspec.structs.replace(found, groups=list(groups))) if said.startswith("stage")]


def test_two_ranks_over_a_quick_link_are_faster_and_nothing_is_said() -> None:
    found = report(0.02)
    group = examined_group(0, ("a", "b"), found)
    assert (group.latency_ms, group.bandwidth_gbit_s) == (0.02, 10.0)
    one, _ = group.times
    # A pass reads the weights: every rank half of them.
    layer_ms = 1e3 * EXAMPLE.layer_parameters * 4 / 10e9
    assert one.alone_ms > EXAMPLE.layers * layer_ms
    assert one.alone_ms / 2 < one.group_ms < one.alone_ms
    assert one.group_ms - one.exchange_ms == pytest.approx(one.alone_ms / 2, rel=0.02)
    assert advice(found, group) == []


def test_a_slow_link_is_warned_of_with_the_figures() -> None:
    found = report(5.0)
    group = examined_group(3, ("a", "b"), found)
    # Every layer waits for four messages, and the pass for three more: the rows that are handed out, and the logits.
    one = group.times[0]
    assert one.exchange_ms > (4 * EXAMPLE.layers + 3) * 5.0
    (said,) = advice(found, group)
    assert said.startswith("stage 3 (2 ranks on a + b) is slower than one host, by TinyLlama-1.1B in float32: one row ")
    assert f"{one.group_ms:.1f} ms, {one.exchange_ms:.1f} of them for the exchange, and {one.alone_ms:.1f} on a" in said


def test_ranks_of_one_host_share_its_processor() -> None:
    group = examined_group(0, ("a", "a", "b"), report(0.02))
    assert [rank.threads for rank in group.ranks] == [2, 2, 4]
    # b has half of the speed of all, and half of the weights: as long as two hosts with a rank each.
    two = examined_group(0, ("a", "b"), report(0.02))
    assert group.times[0].group_ms - group.times[0].exchange_ms == pytest.approx(
        two.times[0].group_ms - two.times[0].exchange_ms, rel=0.05
    )
    alone = examined_group(0, ("a", "a"), report(0.02))
    assert (alone.latency_ms, alone.times) == (None, [])  # shared memory is no link that was measured


def test_what_was_not_measured_or_cannot_be_shared_is_not_predicted() -> None:
    found = report(0.02)
    group = examined_group(1, ("a", "c"), found)
    assert group.times == []
    assert advice(found, group) == [
        "stage 1 (2 ranks on a + c) has no time predicted: c was not measured: host c runs Penstock 0.0.1"
    ]
    assert examined_group(0, ("a", "b", "a", "b", "a"), found).times == []  # a layer has four groups of keys and values


def test_a_cluster_file_names_them_and_the_report_shows_them(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    devices = "".join(
        f'[[devices]]\nname = "{name}"\nhost = "{host}"\n' for name, host in zip("pqr", "aba", strict=True)
    )
    file.write_text(
        f'name = "groups"\nstages = [{{ devices = ["r"] }}, {{ devices = ["p", "q"], split = "tensors" }}]\n{devices}'
    )
    assert groups_of(load_cluster(str(file))) == {1: ("a", "b")}
    found = report(0.5)
    shown = Console(file=StringIO(), width=200)
    show_report(msgspec.structs.replace(found, groups=[examined_group(1, ("a", "b"), found)]), shown)
    assert isinstance(shown.file, StringIO)
    assert "0.50 ms, 10000 Mbit/s" in shown.file.getvalue()


def test_the_example_is_the_probes_own_layer() -> None:
    """The probe takes all heads for keys and values, too, which is more than the model has."""
    key_value = 2 * (EXAMPLE.hidden_size - EXAMPLE.keys) * EXAMPLE.hidden_size
    assert (
        sum(rows * columns for rows, columns in SHAPES) - key_value
        == EXAMPLE.layer_parameters - 2 * EXAMPLE.hidden_size
    )
    assert 4 * sum(rows * columns for rows, columns in SHAPES) == BYTES
