"""The command ``penstock doctor``."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from rich.console import Console

from penstock.cluster import load_cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts.doctor.advice import advice_of
from penstock.hosts.doctor.examine import examine
from penstock.hosts.doctor.show import show
from penstock.hosts.placement import named_hosts, other_hosts
from penstock.progress import progress_bar


def run_doctor(hosts: str | None, cluster: str | None, keys: str | None, insecure: bool, as_json: bool) -> None:
    """Examine the hosts, and print a report. Raises ConfigError for invalid names, and if no host can be used."""
    names = hosts_to_examine(hosts, cluster)
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("measuring hosts and links", total=None)
        found = examine(names, keys, insecure, lambda done, total: bar.update(task, completed=done, total=total))
    report = replace(found, advice=advice_of(found))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show(report, Console(soft_wrap=True))
    if names and not any(one.facts for one in report.hosts[1:]):
        raise ConfigError("; ".join(one.problem for one in report.hosts[1:]))


def hosts_to_examine(hosts: str | None, cluster: str | None) -> list[str]:
    """The hosts beside this one. Raises ConfigError for invalid names, and for an emulated cluster."""
    if hosts is not None and cluster is not None:
        raise FieldError("hosts", "is left out where a cluster file names them")
    if hosts is not None:
        return other_hosts(named_hosts(hosts))
    if cluster is None:
        return []
    loaded = load_cluster(cluster)
    if loaded.emulated:
        raise FieldError("cluster", f"{loaded.name} is emulated: there is nothing to measure")
    return other_hosts(dict.fromkeys(device.host for device in loaded.devices))
