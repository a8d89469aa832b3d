"""Clusters: their devices and links, the place of each stage, and the times of emulated ones."""

from __future__ import annotations

from penstock.cluster.load import load_cluster, load_devices, preset_names, random_cluster
from penstock.cluster.spec import PRICES, Cluster, Device, Link, Links, ModelPrice, Stage
from penstock.cluster.timing import (
    Attended,
    DeviceTiming,
    LinkTiming,
    StageTiming,
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    plain_step_seconds,
    speculator_timing,
    stage_timings,
)

__all__ = [
    "PRICES",
    "Attended",
    "Cluster",
    "Device",
    "DeviceTiming",
    "Link",
    "LinkTiming",
    "Links",
    "ModelPrice",
    "Stage",
    "StageTiming",
    "draft_link",
    "draft_timing",
    "feature_links",
    "link_timings",
    "load_cluster",
    "load_devices",
    "plain_step_seconds",
    "preset_names",
    "random_cluster",
    "speculator_timing",
    "stage_timings",
]
