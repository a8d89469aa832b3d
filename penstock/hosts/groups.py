"""The groups of ranks that ``penstock doctor`` examines: their links, and whether these make them slower than one host.

The measured rates of hosts and links price the doctor's own example, TinyLlama-1.1B in float32, as the planner prices a
tensor parallel stage (``cluster/timing.py``): the slowest rank's share of every layer, and the exchange over the
slowest link between two ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from penstock.cluster import PRICES, Cluster
from penstock.cluster.spec import TENSORS, Device, Link, LinkBetween, Links, ModelPrice, Stage
from penstock.cluster.tensor_parallel import check_divisible
from penstock.cluster.timing import GroupTiming, part_timing
from penstock.config import FieldError
from penstock.hosts.placement import HERE, hosts_of_ranks, ranks_said
from penstock.hosts.probe import DeviceRates, DoctorReport, ExaminedGroup, ExaminedRank, GroupTime

EXAMPLE: Final[ModelPrice] = replace(PRICES["tinyllama-1.1b-fp16"], bytes_per_parameter=4.0, activation_bytes=4.0)
"""The model whose layer's matrices the hosts have multiplied."""
EXAMPLE_NAME: Final = "TinyLlama-1.1B in float32"
TIMED_ROWS: Final = (1, 64)
"""Rows of the batches that are predicted: a token of plain decoding, and a wide tree or many requests."""
WITHIN: Final = Link(bandwidth_gbit_s=1e6, latency_ms=0.0)
"""The link between ranks of one host, quicker than any network: a group over several hosts waits for the others."""
RANKS_ON: Final = "cpu"
"""The device of every rank: tensor parallel stages compute on processors."""


def groups_of(cluster: Cluster) -> dict[int, tuple[str, ...]]:
    """The hosts of the ranks of each tensor parallel stage of a cluster of real devices, by the stage's number."""
    hosts = hosts_of_ranks(None, cluster, len(cluster.stages))
    stages = enumerate(zip(cluster.stages, hosts, strict=True))
    return {i: tuple(host or HERE for host in group) for i, (stage, group) in stages if stage.tensor_parallel}


def examined_group(stage: int, hosts: Sequence[str], report: DoctorReport) -> ExaminedGroup:
    """The group of ranks on these ``hosts``, by a report on them; without times if one was not measured."""
    found = {one.host: one for one in report.hosts}
    there = Counter(hosts)
    rates = {host: cpu_of(found[host].rates) if host in found else None for host in there}
    ranks = [
        ExaminedRank(
            host=host,
            threads=None if (rate := rates[host]) is None else max(1, rate.threads // there[host]),
            problem=found[host].problem if host in found else "it was not examined",
        )
        for host in hosts
    ]
    links = slower_ways(report)
    between = [links.get(frozenset(pair)) for pair in combinations(there, 2)]
    known = [link for link in between if link is not None]
    measured = {host: rate for host, rate in rates.items() if rate is not None}
    complete = len(known) == len(between) and len(measured) == len(there)
    return ExaminedGroup(
        stage=stage,
        ranks=ranks,
        latency_ms=max((link.latency_ms for link in known), default=None),
        bandwidth_gbit_s=min((link.bandwidth_gbit_s for link in known), default=None),
        times=predicted(hosts, measured, tuple(known)) if complete and len(there) > 1 else [],
    )


def cpu_of(rates: Sequence[DeviceRates]) -> DeviceRates | None:
    return next((rate for rate in rates if rate.device == RANKS_ON), None)


def slower_ways(report: DoctorReport) -> dict[frozenset[str], LinkBetween]:
    """The links between hosts, each with the worse figures of its two directions."""
    ways: dict[frozenset[str], LinkBetween] = {}
    for link in report.links:
        if link.latency_ms is not None and link.bandwidth_gbit_s:
            ends = frozenset((link.source, link.to))
            back = ways.get(ends)
            ways[ends] = LinkBetween(
                ends=(link.source, link.to),
                latency_ms=max(link.latency_ms, back.latency_ms if back else 0.0),
                bandwidth_gbit_s=min(link.bandwidth_gbit_s, back.bandwidth_gbit_s if back else math.inf),
            )
    return ways


def predicted(hosts: Sequence[str], rates: dict[str, DeviceRates], links: tuple[LinkBetween, ...]) -> list[GroupTime]:
    """Times of the example's whole pass by a group over several hosts, and by its fastest host alone.

    Empty where the example cannot be shared by so many ranks. Ranks of one host share its rates.
    """
    try:
        check_divisible(EXAMPLE, len(hosts), "ranks")
    except FieldError:
        return []
    there = Counter(hosts)
    ranks = tuple(device(f"{host}, rank {i}", host, rates[host], 1 / there[host]) for i, host in enumerate(hosts))
    alone = tuple(device(host, host, rates[host], 1.0) for host in there)
    cluster = Cluster(
        name="examined",
        devices=ranks + alone,
        links=Links(local=WITHIN, between=links),
        stages=(Stage(devices=tuple(rank.name for rank in ranks), layers=(EXAMPLE.layers,), split=TENSORS),),
        engine=ranks[0].name,
    )
    group = part_timing(cluster, EXAMPLE, ranks, EXAMPLE.all_layers, head=True)
    assert isinstance(group, GroupTiming)
    each = {one.name: part_timing(cluster, EXAMPLE, [one], EXAMPLE.all_layers, head=True) for one in alone}
    found = []
    for rows in TIMED_ROWS:
        alone_s, host = min((timing.seconds(rows), name) for name, timing in each.items())
        found.append(
            GroupTime(
                rows=rows,
                group_ms=1e3 * group.seconds(rows),
                exchange_ms=1e3 * group.exchange.seconds(rows),
                alone_ms=1e3 * alone_s,
                alone_on=host,
            )
        )
    return found


def device(name: str, host: str, rates: DeviceRates, share: float) -> Device:
    """A host's processor, or the ``share`` of it that one of its ranks has."""
    return Device(
        name=name,
        host=host,
        weight_bandwidth_gb_s=share * rates.weight_bandwidth_gb_s,
        compute_tflops=share * rates.compute_tflops,
        overhead_ms=0.0,
    )


def about_groups(groups: Sequence[ExaminedGroup]) -> Iterator[str]:
    """The advice on groups: ranks that cannot run, and groups that are slower than one of their hosts."""
    for group in groups:
        where = f"stage {group.stage} ({ranks_said([rank.host for rank in group.ranks])})"
        for host, problem in {rank.host: rank.problem for rank in group.ranks if rank.threads is None}.items():
            yield f"{where} has no time predicted: {host} was not measured{f': {problem}' if problem else ''}"
        slower = [time for time in group.times if time.group_ms > time.alone_ms]
        if slower:
            told = "; ".join(
                f"{rows_said(time.rows)} would take {time.group_ms:.1f} ms, {time.exchange_ms:.1f} of them for the "
                f"exchange, and {time.alone_ms:.1f} on {time.alone_on} alone"
                for time in slower
            )
            yield (
                f"{where} is slower than one host, by {EXAMPLE_NAME}: {told}: give the ranks a faster "
                'link, or each host layers of its own (split = "layers")'
            )


def rows_said(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows} rows"
