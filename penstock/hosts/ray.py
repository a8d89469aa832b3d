"""Agents on the nodes of a Ray cluster, which an engine reserves."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from penstock.core import ConfigError
from penstock.files import lasting_scratch, remove_scratch
from penstock.hosts import keys
from penstock.hosts.fetching import WeightCache, default_cache
from penstock.hosts.fleet import address_toward
from penstock.hosts.keys import pem
from penstock.hosts.worker import HostAgent, Joining
from penstock.transport.addresses import LinkSecurity, is_loopback

# --------------------------------------------------------------------------------------------------------------- actors
# The Ray actors on a cluster's nodes: an authority for keys, one for each engine, and an agent on each node.
#
# A node's key never leaves it. The authority signs every request that Ray lets through: Ray's own authentication
# decides who may ask.

CACHE_BYTES: Final = 50 * 10**9
"""Bytes of checkpoints that are kept while they are not in use, as many as with `penstock worker`."""


class Authority:
    """The key authority of one engine's hosts. Its own key is made in this process and never leaves it."""

    def __init__(self) -> None:
        self._folder = lasting_scratch("penstock-authority-")
        keys.make_cluster(self._folder / "keys", "penstock on ray")

    def sign(self, request: bytes) -> tuple[bytes, bytes]:
        """See ``keys.sign``."""
        return keys.sign(self._folder / "keys", request)


def enrolled(authority: str, folder: Path) -> LinkSecurity | None:
    """Keys for this process, signed by the ``Authority`` of that name and kept in ``folder``."""
    key = keys.new_key()
    request = pem(keys.request_of(key, "ray node"))
    keys.keep(folder, key, *ray.get(ray.get_actor(authority).sign.remote(request)))
    return keys.link_security(folder)


class NodeAgent:
    """A host agent that comes to the engine's ``door`` (HOST:PORT), also when Ray has started it again.

    ``authority`` is an ``Authority``'s name; without one the network has to be private.
    """

    def __init__(self, authority: str | None, door: str) -> None:
        self._folder = lasting_scratch("penstock-node-")
        security = None if authority is None else enrolled(authority, self._folder / "keys")
        insecure = security is None
        address = ray.util.get_node_ip_address()
        self._agent = HostAgent(f"tcp://{address}:*", security, insecure, WeightCache(default_cache(), CACHE_BYTES))
        threading.Thread(target=self._agent.serve, name="penstock agent", daemon=True).start()
        self._joining = Joining(door, self._agent.address.removeprefix("tcp://"), security, insecure)

    def open_to_anybody(self) -> str:
        """The node's address if Ray there takes commands from anybody on another host; else an empty string."""
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        address = ray.util.get_node_ip_address()
        guarded = is_token_auth_enabled() or is_loopback(address)
        return "" if guarded else str(address)


# -------------------------------------------------------------------------------------------------------------- bundles
# The resources for which an engine asks Ray: as few nodes as hold its stages evenly, with a bundle on each.

DEVICE: Final = "penstock"
"""A resource that nodes may state (`ray start --resources`): one unit for each device that is to hold a stage."""

Resources = Mapping[str, float]


def bundles_for(nodes: Sequence[Resources], stages: int, device: str) -> list[dict[str, float]]:
    """A bundle for each node that is needed. ``nodes``: the resources of each, in use or not.

    A stage takes one GPU; on CPUs it takes one unit of DEVICE or, if no node states any, a node that it may share.
    Raises ConfigError if the nodes have too few.
    """
    resource = "GPU" if device != "cpu" else DEVICE if any(DEVICE in node for node in nodes) else "CPU"
    if resource == "CPU":
        used = min(stages, sum(node.get("CPU", 0) >= 1 for node in nodes))
        if used:
            return [{"CPU": 1.0}] * used
    units = sorted((int(node.get(resource, 0)) for node in nodes), reverse=True)
    for count in range(1, len(units) + 1):
        each = -(-stages // count)
        if units[count - 1] >= each:
            return [{resource: float(each)}] * count
    raise ConfigError(f"hosts: {stages} stages need {resource}s evenly on Ray's nodes, which have {units}")


def bundles_at_hand(stages: int, device: str) -> list[dict[str, float]]:
    """``bundles_for`` the nodes of the cluster to which this process is connected."""
    return bundles_for([node["Resources"] for node in ray.nodes() if node["Alive"]], stages, device)


def bundles_behind_first(bundles: Sequence[Resources]) -> list[dict[str, float]]:
    """The bundles of a placement group that are for stages. Raises ConfigError if the engine's is the only one."""
    if len(bundles) < 2:
        raise ConfigError(
            "hosts: this process is in a placement group whose only bundle is its own; make the group with a bundle "
            "for each node behind it, or start the engine outside of the group"
        )
    return [dict(bundle) for bundle in bundles[1:]]


# -------------------------------------------------------------------------------------------------------------- cluster
# An engine's part of a Ray cluster: Ray reserves nodes and starts an agent on each. No stage ever speaks to Ray.

PLACED_S: Final = 60.0
"""Seconds within which Ray has to reserve the bundles. Ray waits without end for bundles that others hold."""
STARTED_S: Final = 120.0
"""Seconds within which agents have to have started. Ray starts a process on each node first."""


class RayCluster:
    """Connects to ``address``, "ray" for the cluster of this host or "ray://HOST:PORT"; ``close`` gives all back.

    ``here`` is this host's address as the nodes reach it, ``security`` this process's keys, made for this engine alone;
    None if ``insecure``. Raises ConfigError if there is no cluster.
    """

    def __init__(self, address: str, insecure: bool) -> None:
        self._connected = not ray.is_initialized()
        self._actors: list[Any] = []
        self._authority: str | None = None
        self._group: Any = None
        """The placement group that this engine has made; None if it is in one, which is then its maker's to remove."""
        self._folder = lasting_scratch("penstock-ray-")
        if self._connected:
            connect(address)
        try:
            by_client = address.startswith("ray://")
            self.here = address_toward(address.removeprefix("ray://")) if by_client else ray.util.get_node_ip_address()
            self.security: LinkSecurity | None = None
            if not insecure:
                self._authority = f"penstock-{secrets.token_hex(8)}"
                # Beside this process: agents that Ray starts again need it, whichever other node is lost.
                own_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
                options = {"name": self._authority, "num_cpus": 0, "scheduling_strategy": own_node}
                self._actors.append(ray.remote(Authority).options(**options).remote())
                self.security = enrolled(self._authority, self._folder / "keys")
        except BaseException:
            self.close()
            raise

    def start_agents(self, stages: int, device: str, door: str) -> int:
        """Start an agent on each node that is needed, which then comes to ``door``. Returns how many there are.

        Within a placement group, as a replica of Ray Serve may be, they take its bundles behind the first, which is
        the engine's own. Raises ConfigError if there is no room, and if Ray on another host takes commands from
        anybody.
        """
        group = get_current_placement_group()
        bundles = bundles_behind_first(group.bundle_specs) if group is not None else bundles_at_hand(stages, device)
        first = 1 if group is not None else 0
        if group is None:
            group = self._group = placement_group(bundles, strategy="STRICT_SPREAD")  # each on a node of its own
        if not group.wait(PLACED_S):
            raise ConfigError(f"hosts: Ray has no room for {bundles}, each on a node of its own; others may hold it")
        agents = []
        for index, bundle in enumerate(bundles):
            placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first + index)
            options = {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "resources": {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
            }
            # Without a limit on restarts Ray starts an agent again whenever it ends.
            agent = ray.remote(NodeAgent).options(scheduling_strategy=placed, max_restarts=-1, **options)
            agents.append(agent.remote(self._authority, door))
        self._actors += agents
        try:
            open_nodes = ray.get([agent.open_to_anybody.remote() for agent in agents], timeout=STARTED_S)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"hosts: an agent did not start on a node of Ray's: {error}") from error
        if any(open_nodes) and self._authority is not None:
            raise ConfigError(
                f"hosts: Ray at {', '.join(filter(None, open_nodes))} obeys whoever reaches it; start it with "
                "RAY_AUTH_MODE=token and one token on every node (`ray get-auth-token --generate`), or use --insecure "
                "where the network is private"
            )
        return len(bundles)

    def close(self) -> None:
        """End the agents and give all resources back. Safe to call twice, and if the cluster is gone."""
        with contextlib.suppress(Exception):
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actors, self._group = [], None
        if self._connected:
            ray.shutdown()
        remove_scratch(self._folder)


def connect(address: str) -> None:
    """Connect this process to Ray. Raises ConfigError if no cluster answers."""
    where = address if address.startswith("ray://") else "auto"
    try:
        ray.init(where, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises many kinds
        hint = "start one with `ray start --head`" if where == "auto" else "is `ray start --head` running there?"
        raise ConfigError(f"hosts: no Ray cluster at {address}: {error}; {hint}") from error
