"""Binds ingress and replicas to one application of Ray Serve."""

from __future__ import annotations

from typing import Any, Final

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from penstock.hosts.placement import RAY
from penstock.ray_serve.replica import Replica
from penstock.ray_serve.settings import ReplicaSettings, ServeSettings

REPORTS_EVERY_S: Final = 1.0
"""Seconds between two reports of a replica to those who send it requests."""


def application(settings: ServeSettings) -> Application:
    """The application: an ingress over replicas. Serve's config file may change each deployment's options by name."""
    from penstock.ray_serve.ingress import Ingress  # it needs Ray, and so does whoever calls this

    server, engine = settings.server, settings.engine
    running = server.max_queue + engine.max_num_seqs * most_of(settings.replicas)
    replicas = serve.deployment(
        Replica,
        name="Replica",
        # All that wait do so in the replicas, whose queues know priorities: an answer that goes on goes ahead.
        max_ongoing_requests=engine.max_num_seqs + server.max_queue,
        graceful_shutdown_timeout_s=server.drain_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class="penstock.ray_serve.router.PrefixRouter",
            request_routing_stats_period_s=REPORTS_EVERY_S,
        ),
        **scale_of(settings),
        **placement_of(settings),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        max_surge_percent=100,  # a new one takes over before the old one begins to end
        max_ongoing_requests=2 * running,  # the ingress itself refuses what is too much, in the API's form
        graceful_shutdown_timeout_s=server.request_timeout,  # nobody goes on with what an ingress holds
        ray_actor_options={"num_cpus": 0},  # it mostly waits, and runs beside whatever is there
    )
    return ingress.bind(settings, replicas.bind(settings))


def most_of(replicas: ReplicaSettings) -> int:
    assert replicas.max_replicas is not None
    return replicas.max_replicas


def scale_of(settings: ServeSettings) -> dict[str, Any]:
    """Serve's options for the number of replicas: fixed, or scaled by requests and KV slots."""
    replicas = settings.replicas
    if replicas.min_replicas == replicas.max_replicas:
        return {"num_replicas": replicas.min_replicas}
    policy = {"requests": float(settings.engine.max_num_seqs), "kv_share": replicas.target_kv_share}
    config = AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=most_of(replicas),
        initial_replicas=max(1, replicas.min_replicas),
        target_ongoing_requests=float(settings.engine.max_num_seqs),
        upscale_delay_s=replicas.upscale_delay,
        downscale_delay_s=replicas.downscale_delay,
        policy=AutoscalingPolicy(policy_function="penstock.ray_serve.scaling:RequestsAndSlots", policy_kwargs=policy),
    )
    return {"autoscaling_config": config}


def placement_of(settings: ServeSettings) -> dict[str, Any]:
    """The resources that Ray reserves for a replica, as options of Serve's.

    They are the actor's own or, with stages elsewhere, a placement group: a bundle for the actor, and one a node.
    """
    engine, replicas = settings.engine, settings.replicas
    gpus = replicas.gpus
    if gpus is None:
        gpus = float(settings.stages) if engine.device != "cpu" else 0.0
    threads = settings.stages * (engine.threads or 1) if engine.device == "cpu" else 1
    cpus = replicas.cpus if replicas.cpus is not None else float(threads)
    if not settings.on_ray:
        return {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    from penstock.hosts.ray import bundles_at_hand, connect

    if not ray.is_initialized():  # `serve run` builds the application before it connects
        connect(RAY)
    # The engine's own bundle, then one for the agent on each node of its stages.
    own = {"CPU": replicas.cpus or 1.0}
    return {
        "ray_actor_options": {"num_cpus": own["CPU"]},
        "placement_group_bundles": [own, *bundles_at_hand(settings.stages, engine.device)],
        "placement_group_strategy": "SPREAD",
    }
