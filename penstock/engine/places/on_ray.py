"""Opens an engine's hosts on a Ray cluster."""

from __future__ import annotations

from contextlib import ExitStack

from penstock.config import check
from penstock.engine.options import EngineOptions
from penstock.extras import RAY, require
from penstock.hosts.fleet import Fleet
from penstock.hosts.host import FleetHost
from penstock.pipeline.processes import OnLoading


def open_on_ray(options: EngineOptions, address: str, on_loading: OnLoading | None) -> FleetHost:
    """The host that runs the stages, once an agent on each node that is needed has come.

    Raises ConfigError if Ray is not installed, does not answer, has no room, or takes commands from anybody.
    """
    require([RAY])
    check(options.keys is None, "keys", options.keys, "left out with Ray: each engine makes keys of its own")
    from penstock.hosts.ray.cluster import STARTED_S, RayCluster

    assert options.pipeline_parallel_size is not None
    with ExitStack() as in_vain:
        cluster = RayCluster(address, options.insecure)
        in_vain.callback(cluster.close)
        fleet = Fleet([], cluster.security, private_network=options.insecure, door=f"{cluster.here}:0")
        in_vain.callback(fleet.close)
        # An agent that is lost before it has come is started again only where Ray has another node for it.
        fleet.wait_for(cluster.start_agents(options.pipeline_parallel_size, options.device, fleet.door), STARTED_S)
        host = FleetHost(fleet, options.stage_timeout, on_loading, started_by=cluster)
        in_vain.pop_all()
    return host
