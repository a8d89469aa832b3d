"""``penstock profile``: times of a model's layers on real devices, or on those that a cluster file prices."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from penstock.bench.profile.hosts import hosts_profile
from penstock.bench.profile.options import ProfileOptions
from penstock.bench.profile.priced import times_by_price
from penstock.bench.profile.show import Profile, device_table, held_table, link_table
from penstock.cluster import load_devices
from penstock.engine.profile.store import profiles_folder


def run_profile(options: ProfileOptions, *, as_json: bool = False, console: Console | None = None) -> Profile:
    """Measure, store and print. Raises ConfigError for what cannot work, and PipelineError for a lost stage."""
    console = console or Console(stderr=True)
    profile = profile_by_price(options) if options.cluster is not None else measured_profile(options, console)
    if as_json:
        print(json.dumps(asdict(profile)))
        return profile
    for name in profile.times:
        console.print(device_table(profile, name))
    console.print(held_table(profile))
    if profile.links:
        console.print(link_table(profile.links))
    if options.cluster is None:
        console.print(f"Kept in {profiles_folder()}, for `penstock plan --hosts` and layer_split auto.", soft_wrap=True)
    return profile


def profile_by_price(options: ProfileOptions) -> Profile:
    assert options.cluster is not None
    cluster = load_devices(options.cluster, as_model=options.model)
    assert cluster.as_model is not None
    return Profile(cluster.as_model, times_by_price(cluster), [], cluster.kv_slots)


def measured_profile(options: ProfileOptions, console: Console) -> Profile:
    found = hosts_profile(options, console, anew=True, texts=options.prompts)
    assert found.links is not None
    return Profile(found.candidates.price, found.times, found.links, found.candidates.capacity)
