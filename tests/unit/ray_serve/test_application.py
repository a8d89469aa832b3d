"""The options that Ray Serve is given, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.ray_serve.settings import settings_of

pytest.importorskip("ray.serve", reason="Ray is not installed")

from penstock.ray_serve.application import application, placement_of, scale_of


def placed(**args: Any) -> tuple[float, float]:
    options = placement_of(settings_of(args, {}))["ray_actor_options"]
    return options["num_cpus"], options["num_gpus"]


def test_a_replica_takes_a_cpu_for_each_thread_or_a_gpu_for_each_stage() -> None:
    assert placed() == (1, 0)
    assert placed(pipeline_parallel_size=2, threads=3) == (6, 0)
    assert placed(cpus=4, pipeline_parallel_size=2) == (4, 0)
    assert placed(device="cuda", pipeline_parallel_size=2) == (1, 2)
    assert placed(device="cuda", gpus=0.5) == (1, 0.5)


def test_replicas_are_scaled_where_there_may_be_more() -> None:
    assert scale_of(settings_of({"min_replicas": 3}, {})) == {"num_replicas": 3}
    config = scale_of(settings_of({"min_replicas": 0, "max_replicas": 2, "max_num_seqs": 8}, {}))["autoscaling_config"]
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 2)
    assert config.policy.get_policy()(**config.policy.policy_kwargs)._requests == 8


def test_deployments_have_the_names_that_serves_config_file_uses() -> None:
    bound = application(settings_of({"drain_timeout": 7, "max_queue": 5, "max_num_seqs": 3}, {}))
    ingress = bound._bound_deployment
    (replicas,) = [one._bound_deployment for one in ingress.init_args if hasattr(one, "_bound_deployment")]
    assert (ingress.name, replicas.name) == ("Ingress", "Replica")
    assert replicas.max_ongoing_requests == 8
    assert replicas._deployment_config.graceful_shutdown_timeout_s == 7
