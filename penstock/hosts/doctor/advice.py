"""Advice on what to change, from a doctor's measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.hosts.doctor.report import LinkRates, Report
from penstock.hosts.listing import memory_of

SLOWER: Final = 4.0
"""Factor by which a link may be slower than the fastest one, or than its own reverse direction, without advice."""
SLOW_GBIT_S: Final = 0.5
"""Rate, in 1e9 bits/s, below which a link is no modern Ethernet."""
LATE_MS: Final = 2.0
"""Latency, in milliseconds, above which a network is not a wired one."""
UNEQUAL: Final = 1.3
"""Factor by which devices may differ in speed without advice: a stage then waits little for another."""
FREE: Final = 0.5
"""Share of its memory that a device should have free."""


def advice_of(report: Report) -> list[str]:
    """One sentence for each problem, links first, then devices, then memory; empty if there is none."""
    return [*about_links(report), *about_devices(report), *about_memory(report)]


def about_links(report: Report) -> Iterator[str]:
    rates = {(one.source, one.to): one.bandwidth_gbit_s for one in report.links if one.bandwidth_gbit_s}
    fastest = max(rates.values(), default=0.0)
    for link in report.links:
        if link.problem:
            yield (
                f"{link.source} cannot send to {link.to}: {link.problem}; let the hosts reach each other's ports: "
                "stages listen at those that the system chooses"
            )
            continue
        assert link.bandwidth_gbit_s is not None
        assert link.latency_ms is not None
        back = rates.get((link.to, link.source), 0.0)
        if SLOWER * link.bandwidth_gbit_s < back:
            yield f"{slow(link)}, the way back {megabits(back)}: look for a limit in one direction, or another duplex"
        elif SLOWER * link.bandwidth_gbit_s < fastest:
            yield f"{slow(link)}, the fastest link {megabits(fastest)}: check its cable and port, or use another host"
        elif link.bandwidth_gbit_s < SLOW_GBIT_S:
            yield f"{slow(link)}: a wired network carries a thousand"
        if link.latency_ms > LATE_MS and link.source < link.to:
            yield (
                f"{link.source} and {link.to} are {link.latency_ms:.1f} ms apart, which every token pays at each pass: "
                "use a wired network without detours"
            )


def slow(link: LinkRates) -> str:
    assert link.bandwidth_gbit_s is not None
    return f"{link.source} to {link.to} carries {megabits(link.bandwidth_gbit_s)}"


def megabits(gbit_s: float) -> str:
    return f"{1e3 * gbit_s:.0f} Mbit/s" if gbit_s >= 0.01 else f"{1e3 * gbit_s:.2f} Mbit/s"


def about_devices(report: Report) -> Iterator[str]:
    measured = {(one.host, rate.device): rate.weight_bandwidth_gb_s for one in report.hosts for rate in one.rates}
    fastest = max(measured.values(), default=0.0)
    for (host, device), rate in measured.items():
        if UNEQUAL * rate < fastest:
            yield (
                f"{host}: {device} reads weights at {rate:.1f} GB/s, the fastest device at {fastest:.1f}: a stage "
                "there should have fewer layers, in proportion (--layer-split)"
            )


def about_memory(report: Report) -> Iterator[str]:
    for one in report.hosts:
        for device in one.facts.devices if one.facts is not None else ():
            if device.free is not None and device.memory is not None and device.free < FREE * device.memory:
                yield f"{one.host}: {device.device} has {memory_of(device)} free: end what else runs there"
        if one.facts is not None and one.facts.unlisted:
            yield f"{one.host} may have GPUs that are not listed: {one.facts.unlisted}"
