"""The clusters that can be simulated: those with modelled times."""

from __future__ import annotations

from typing import Any

from penstock.cluster import Cluster, load_cluster
from penstock.config import FieldError


def modelled_cluster(name: str, **changes: Any) -> Cluster:
    """``load_cluster``, which also raises FieldError where the cluster models no times."""
    cluster = load_cluster(name, **changes)
    if not cluster.emulated:
        raise FieldError("cluster", f"{name} has no as_model, so there are no modelled times to simulate; name another")
    return cluster


def check_drafter(cluster: Cluster) -> None:
    """Raise FieldError where the cluster names no drafter."""
    if cluster.drafter is None:
        raise FieldError("cluster", f"{cluster.name} names no drafter; add drafter and draft_as_model to its file")
