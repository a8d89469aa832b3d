"""Prints a doctor's report for a person."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from penstock.hosts.doctor.advice import megabits
from penstock.hosts.doctor.report import DeviceRates, ExaminedHost, Report
from penstock.hosts.listing import memory_of

ROWS_BITS: Final = 64 * 4096 * 16
"""Bits of the hidden states of 64 rows of Llama-3.1-8B (hidden size 4096) in bfloat16."""


def show(report: Report, console: Console) -> None:
    tables = [hosts_table(report), devices_table(report), links_table(report)]
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()
    for host in report.hosts:
        if host.problem:
            console.print(f"{host.problem}\n", highlight=False, markup=False)
    console.print("To change:" if report.advice else "Nothing to change.")
    for sentence in report.advice:
        console.print(f"- {sentence}.", highlight=False, markup=False)


def hosts_table(report: Report) -> Table:
    table = Table("host", "Penstock", "torch", "clock, by this one's", box=None, header_style="bold")
    for host in report.hosts:
        if host.facts is not None:
            table.add_row(host.host, host.facts.versions.penstock, host.facts.versions.torch, clock_of(host))
    return table


def clock_of(host: ExaminedHost) -> str:
    return "" if host.clock is None else f"{host.clock.seconds:+.4f} s, ±{1e3 * host.clock.error:.2f} ms"


def devices_table(report: Report) -> Table:
    """A table with a row for each device. ``rows/s``: with one row at a time, and with 64."""
    headings = ("host", "device", "memory free", "threads", "weights", "operations", "rows/s\nof 1, 64")
    table = Table(*headings, box=None, header_style="bold")
    for host in report.hosts:
        rates = {rate.device: rate for rate in host.rates}
        for device in host.facts.devices if host.facts is not None else ():
            measured = rates_of(rates[device.device]) if device.device in rates else ("not measured", "", "", "")
            table.add_row(host.host, device.device, memory_of(device), *measured)
    return table


def rates_of(rate: DeviceRates) -> tuple[str, str, str, str]:
    rows = f"{rate.rows_per_second[1]:.0f}, {rate.rows_per_second[64]:.0f}"
    return str(rate.threads), f"{rate.weight_bandwidth_gb_s:.1f} GB/s", operations_of(rate.compute_tflops), rows


def operations_of(tflops: float) -> str:
    return f"{tflops:.1f} TFLOPS" if tflops >= 1 else f"{1e3 * tflops:.0f} GFLOPS"


def links_table(report: Report) -> Table:
    table = Table("from", "to", "latency", "rate", "64 rows of 4096, bfloat16", box=None, header_style="bold")
    for link in report.links:
        if link.latency_ms is not None and link.bandwidth_gbit_s is not None:
            rows_ms = link.latency_ms + ROWS_BITS / link.bandwidth_gbit_s / 1e6
            rate = megabits(link.bandwidth_gbit_s)
            table.add_row(link.source, link.to, f"{link.latency_ms:.2f} ms", rate, f"{rows_ms:.1f} ms")
    return table
