"""Places stages on hosts: the host of each stage, its device there, and its threads."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.cluster import Cluster, spec
from penstock.cluster.load import ON_ENGINE, ON_FIRST, ON_LAST
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts.facts import DeviceFacts, HostFacts, shared_threads
from penstock.transport.addresses import MOST_PORT

Groups = tuple[tuple[str, ...], ...]
"""The hosts of each stage's ranks, the first one's first, as plans name them."""
HERE: Final = spec.HERE
"""The engine's own host among others. Plans name it by the empty string."""
JOIN: Final = "join://"
"""The beginning of the part of ``--hosts`` that says where workers come to."""
HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\[\]\s]+\]|[^:\[\]\s]+)(:(?P<port>[0-9]+))?")
"""A host with or without a port, where only an IPv6 address without one has colons of its own."""
RAY: Final = "ray"
"""The value of ``--hosts`` for this host's Ray cluster."""


@dataclass(frozen=True)
class AskedHosts:
    """The meaning of ``--hosts``: hosts by their names, in order, and where others may come from.

    A host is named once, or once for each of its GPUs that is to have stages.
    """

    names: tuple[str, ...]
    door: str = ""
    """HOST:PORT of this host, to which `penstock worker --join` comes."""
    ray: str = ""
    """A Ray cluster that starts them: "ray" for this host's, or "ray://HOST:PORT"."""

    @property
    def come(self) -> bool:
        """Whether hosts come whose names are not known before."""
        return bool(self.door or self.ray)


def asked_hosts(text: str) -> AskedHosts:
    """Parse "a:7700,b:7700", which may end in "join://HOST:PORT", or "ray". Raises FieldError for anything else."""
    if text == RAY or text.startswith(f"{RAY}://"):
        return AskedHosts((), ray=text)
    *before, last = text.split(",")
    door = last.strip().removeprefix(JOIN) if last.strip().startswith(JOIN) else ""
    if not door:
        return AskedHosts(listed_hosts(text))
    if not host_and_port(door)[1]:
        raise FieldError("hosts", f"is {text!r}; behind {JOIN} belongs HOST:PORT of this host, as others reach it")
    return AskedHosts(named_hosts(",".join(before)) if before else (), door)


def named_hosts(text: str) -> tuple[str, ...]:
    """The hosts of "a:7700,b:7700", in order. Raises FieldError where one is missing or named twice."""
    names = listed_hosts(text)
    if len(set(names)) < len(names):
        raise FieldError("hosts", f"is {text!r}; it has to be HOST or HOST:PORT, each once, with commas between")
    return names


def listed_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a text like ``named_hosts``', where one may be named several times."""
    names = tuple(part.strip() for part in text.split(","))
    if any(not name or "/" in name for name in names):
        raise FieldError("hosts", f"is {text!r}; it has to be HOST or HOST:PORT, with commas between")
    for name in names:
        host_and_port(name)
    return names


def host_and_port(name: str, field: str = "hosts", *, least_port: int = 1) -> tuple[str, str]:
    """HOST and PORT of a name in the user's ``field``; "" for a port that it leaves out.

    HOST is a name, an IPv4 address, or an IPv6 address, which is in brackets where a port follows. ``least_port`` is 0
    where this host listens: the system then chooses a port. Raises FieldError for anything else.
    """
    found = HOST_AND_PORT.fullmatch(name)
    if found is None and not is_ipv6(name):
        raise FieldError(field, f"names {name!r}; a host is HOST or HOST:PORT, and an IPv6 address is [HOST]:PORT")
    host, port = (name, "") if found is None else (found["host"], found["port"] or "")
    if host.startswith("[") and not is_ipv6(host[1:-1]):
        raise FieldError(field, f"names {name!r}; in brackets belongs an IPv6 address")
    if port and not (len(port) <= len(str(MOST_PORT)) and least_port <= int(port) <= MOST_PORT):
        raise FieldError(field, f"names {name!r}; a port is a number from {least_port} to {MOST_PORT}")
    return host, port


def is_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address, perhaps with a zone behind a "%"."""
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def check_gpus(names: Iterable[str], facts: Mapping[str, HostFacts]) -> None:
    """Raise FieldError for a host that is named more often than it has GPUs."""
    for name, count in Counter(names).items():
        found = facts.get(name)
        if count > 1 and found is not None and count > len(found.gpus) and not found.unlisted:
            raise FieldError(
                "hosts", f"names {name} {count} times; name it once for each of its GPUs: it has {found.known}"
            )


def check_named(text: str | None) -> None:
    """Raise FieldError if hosts come whose names are not known before."""
    if text is not None and asked_hosts(text).come:
        raise FieldError("hosts", f"is {text!r}; name them, since each is measured")


def hosts_asked_for(hosts: str | None, cluster: Cluster | None) -> tuple[str, ...]:
    """The names of all hosts for stages, in order: as ``hosts`` says, or a cluster of real devices.

    A host that is named for several GPUs is there as often.
    """
    if hosts is not None:
        return asked_hosts(hosts).names
    if cluster is None or cluster.emulated:
        return (HERE,)
    return tuple(dict.fromkeys(cluster.device(name).host for stage in cluster.stages for name in stage.devices))


def hosts_of_ranks(hosts: str | None, cluster: Cluster | None, stages: int, ranks: int = 1) -> Groups:
    """The hosts of each stage's ranks, of which it has so many unless a cluster says otherwise, as plans name them."""
    if hosts is None and cluster is not None and not cluster.emulated:
        return tuple(tuple(in_plans(cluster.device(name).host) for name in stage.devices) for stage in cluster.stages)
    return grouped(spread(hosts_asked_for(hosts, cluster), stages * ranks), [ranks] * stages)


def ranks_said(group: Sequence[str]) -> str:
    """The ranks of a stage for people, by their hosts: "2 ranks", or "2 ranks on a + b"; empty for one."""
    named = list(dict.fromkeys(host or HERE for host in group))
    where = f" on {' + '.join(named)}" if len(named) > 1 else ""
    return f"{len(group)} ranks{where}" if len(group) > 1 else ""


def grouped(hosts: Sequence[str], sizes: Iterable[int]) -> Groups:
    """The hosts of all ranks in order, stage by stage: so many for each."""
    left = iter(hosts)
    return tuple(tuple(islice(left, size)) for size in sizes)


def drafter_host(place: str | None, cluster: Cluster | None, stages: Sequence[str]) -> str:
    """The host of a drafter with weights, as plans name it.

    ``place`` is "engine", "first-stage", "last-stage" or a host's name, and ``stages`` are the hosts of the stages. A
    cluster file of real devices decides by its ``drafter``, which has been set to ``place`` before. The drafter is on
    the engine's host if ``place`` is None, and in emulated clusters, whose devices exist only as times.
    """
    if cluster is not None and (cluster.emulated or cluster.drafter is None):
        return ""
    if cluster is not None:
        return in_plans(cluster.device(str(cluster.drafter)).host)
    fixed = {None: "", ON_ENGINE: "", ON_FIRST: stages[0], ON_LAST: stages[-1]}
    return fixed[place] if place in fixed else in_plans(str(place))


def hosts_for_drafter(place: str | None, cluster: Cluster | None) -> list[str]:
    """The other host that is named for the drafter, whether it has a stage or not; empty where none is."""
    named = drafter_host(place, cluster, ("",))
    return [named] if named else []


def spread(names: Sequence[str], stages: int) -> tuple[str, ...]:
    """The host of each stage, or rank, as plans name it: neighbours share one. Hosts beyond their number are spares."""
    used = names[:stages]
    # Runs of consecutive stages, so that most hidden states stay on their host; lengths differ by one at most.
    return tuple(in_plans(used[stage * len(used) // stages]) for stage in range(stages))


def moved(
    hosts: Sequence[str], there: Sequence[str], has_room: Callable[[str, Sequence[int]], bool]
) -> tuple[str, ...]:
    """The host of each stage once some of ``hosts`` are gone; all names are those of plans.

    A stage stays where it is as long as that host is ``there``. Otherwise it goes to a host without stages, else to a
    neighbour's host, the one with fewer stages first, else to any. ``has_room`` says whether these stages fit on a host
    together. Raises ConfigError if a stage fits nowhere.
    """
    stages: dict[str, list[int]] = {name: [i for i, host in enumerate(hosts) if host == name] for name in there}
    placed = [host if host in stages else None for host in hosts]
    for stage, kept in enumerate(placed):
        if kept is None:
            # The neighbours: the stage before, which has a host by now, and the next one behind that has one.
            before = placed[stage - 1 : stage] if stage else []
            after = [host for host in placed[stage + 1 :] if host is not None][:1]
            beside = sorted((host for host in (*before, *after) if host is not None), key=lambda one: len(stages[one]))
            order = [one for one in there if not stages[one]] + beside + sorted(there, key=lambda one: len(stages[one]))
            found = next((one for one in order if has_room(one, [*stages[one], stage])), None)
            if found is None:
                raise ConfigError(f"none of the hosts that are there has room for stage {stage} of {len(hosts)}")
            placed[stage] = found
            stages[found].append(stage)
    return tuple(host for host in placed if host is not None)


def in_plans(name: str) -> str:
    """A host's name as plans have it: "" for the engine's own."""
    return "" if name == HERE else name


def device_on(host: str, facts: HostFacts, device: str, place: int, stages: int) -> str:
    """The device of stage number ``place`` of the ``stages`` on a host; "cuda" spreads them over its GPUs.

    Raises ConfigError, naming the host, for a device that is not there.
    """
    found = facts.gpus
    if device == "cuda" and found:
        # 5 stages on 2 GPUs: 0 0 0 1 1, as ``packing.placed`` spreads those of this host.
        return found[place * min(stages, len(found)) // stages]
    if not facts.may_have(device):
        raise ConfigError(f"host {host} has no device {device!r}; it has {facts.known}")
    return device


def devices_elsewhere(hosts: Sequence[str], facts: Mapping[str, HostFacts], device: str) -> dict[int, str]:
    """The devices of the stages on other hosts, by stage."""
    return {
        stage: device_on(host, facts[host], device, place, count)
        for host, stages in by_host(hosts)
        if host
        for count in (len(stages),)
        for place, stage in enumerate(stages)
    }


def threads_elsewhere(
    hosts: Sequence[str], facts: Mapping[str, HostFacts], stated: Sequence[int | None]
) -> dict[int, int]:
    """The threads of the stages on other hosts, by stage: as stated, else equal parts of the host's cores."""
    threads: dict[int, int] = {}
    for host, stages in by_host(hosts):
        if host:
            threads |= zip(stages, shared_threads([stated[stage] for stage in stages], facts[host].cores), strict=True)
    return threads


def by_host(hosts: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Each host with the numbers of its stages."""
    for host in dict.fromkeys(hosts):
        yield host, [stage for stage, one in enumerate(hosts) if one == host]


def check_memory(
    hosts: Sequence[str],
    devices: Sequence[str],
    needed: Sequence[int],
    facts: Mapping[str, HostFacts],
    drafts: bool = False,
) -> None:
    """Raise ConfigError, naming host and device with the numbers, where stages do not fit.

    ``needed``: bytes of weights and KV of each stage. ``facts``: those of the hosts to check, as plans name them. One
    entry more than there are stages is a drafter's: ``drafts``.
    """
    sums: Counter[tuple[str, str]] = Counter()
    for host, device, count in zip(hosts, devices, needed, strict=False):
        sums[host, device] += count
    drafting = (hosts[-1], devices[-1]) if drafts else None
    problems = [
        problem
        for place, count in sums.items()
        if (host := place[0]) in facts
        and (problem := too_much(host or HERE, facts[host].device(place[1]), count, place == drafting))
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def too_much(host: str, device: DeviceFacts | None, needed: int, drafts: bool = False) -> str:
    """The reason why ``needed`` bytes do not fit on a device; empty if they do, or nobody knows."""
    if device is None or device.free is None or needed <= device.free:
        return ""
    return (
        f"host {host}: {device.device} has {in_gb(device.free)} free, its stages need {in_gb(needed)} for weights and "
        f"KV{', the drafter included' if drafts else ''}; use more hosts, fewer kv_slots or a shorter max_model_len"
    )


def has_room(host: str, facts: HostFacts, device: str, needed: Sequence[int]) -> bool:
    """Whether stages that need so many bytes each fit on a host, spread over its devices as ``device`` says."""
    try:
        devices = [device_on(host, facts, device, place, len(needed)) for place in range(len(needed))]
        check_memory((host,) * len(needed), devices, needed, {host: facts})
    except ConfigError:
        return False
    return True


def in_gb(count: int) -> str:
    """Bytes in GB (1e9)."""
    return f"{count / 1e9:.2f} GB"


def other_hosts(names: Iterable[str]) -> list[str]:
    """The hosts beside this one, each once."""
    return [name for name in dict.fromkeys(names) if name != HERE]
