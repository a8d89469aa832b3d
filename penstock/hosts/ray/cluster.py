"""An engine's part of a Ray cluster: Ray reserves nodes and starts an agent on each. No stage ever speaks to Ray."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from penstock.core import ConfigError
from penstock.hosts.fleet import address_toward
from penstock.hosts.ray.actors import Authority, NodeAgent, enrolled
from penstock.hosts.ray.bundles import bundles_for
from penstock.scratch import lasting_scratch, remove_scratch
from penstock.transport.security import LinkSecurity

PLACED_S: Final = 60.0
"""Seconds within which Ray has to reserve the bundles."""
STARTED_S: Final = 120.0
"""Seconds within which agents have to have started."""


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

        Raises ConfigError if there is no room, and if Ray on another host takes commands from anybody.
        """
        bundles = bundles_for([node["Resources"] for node in ray.nodes() if node["Alive"]], stages, device)
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")  # each bundle on a node of its own
        if not self._group.wait(PLACED_S):
            raise ConfigError(f"hosts: Ray has no room for {bundles}, each on a node of its own; others may hold it")
        agents = []
        for index, bundle in enumerate(bundles):
            placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
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
