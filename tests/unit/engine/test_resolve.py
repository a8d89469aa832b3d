"""How options are resolved on this host, and what is refused or warned of before any stage starts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import LLM
from penstock.cluster import load_cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.build import drafting_plan, stage_plans
from penstock.engine.options import DEMO, EngineOptions
from penstock.engine.resolve import check_options, resolve_options


@pytest.mark.parametrize(
    ("device", "found", "built", "said"),
    [
        ("cuda", 0, None, "device is 'cuda', but this torch was built without CUDA; use cpu"),
        ("cuda:1", 0, "12.6", "device is 'cuda:1', but torch finds no CUDA device here; use cpu"),
        ("cuda:1", 1, "12.6", "device is 'cuda:1'; torch finds cuda:0 here"),
        ("cuda:8", 2, "12.6", "device is 'cuda:8'; torch finds cuda:0 to cuda:1 here"),
    ],
)
def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, device: str, found: int, built: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.version, "cuda", built)
    nothing: Any = SimpleNamespace(close=lambda: None, wake=None)  # a host that cannot start anything
    with pytest.raises(FieldError) as refused:
        LLM("demo", device=device, host=nothing)
    assert str(refused.value) == said


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_options(EngineOptions(device=device)).options.device == device


@pytest.mark.parametrize(
    ("device", "stages", "gpus", "numbers"),
    [
        ("cuda", 2, 4, [0, 1, 2]),  # the drafter gets a GPU of its own
        ("cuda", 4, 4, [0, 1, 2, 3, 3]),
        ("cuda", 6, 4, [0, 0, 1, 2, 2, 3, 3]),
        ("cuda", 3, 1, [0, 0, 0, 0]),
        ("cuda:1", 3, 4, [1, 1, 1, 1]),
    ],
)
def test_stages_spread_over_all_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, stages: int, gpus: int, numbers: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    speculation = {"method": "draft_model", "model": str(DEMO / "draft")}
    options = EngineOptions(device=device, pipeline_parallel_size=stages, speculative_config=speculation)
    setup = resolve_options(options)
    plans = [*stage_plans(setup), drafting_plan(setup, str(DEMO / "draft"), 2)]
    assert [plan.device for plan in plans] == [f"cuda:{number}" for number in numbers]


def test_what_is_modelled_is_emulated() -> None:
    """A learned drafter is modelled by the target's sizes, also where the cluster knows none of a draft model."""
    cluster = replace(load_cluster("demo"), draft_as_model=None)
    setup = resolve_options(EngineOptions(cluster=cluster, speculative_config={"method": "medusa"}))
    assert all(plan.emulation is not None for plan in [*stage_plans(setup), drafting_plan(setup, "", 1)])
    setup = resolve_options(EngineOptions(cluster="local-2", speculative_config={"method": "medusa"}))
    assert not any(plan.emulation is not None for plan in [*stage_plans(setup), drafting_plan(setup, "", 1)])


def test_everything_stays_on_the_cpu() -> None:
    setup = resolve_options(EngineOptions(pipeline_parallel_size=3))
    assert {plan.device for plan in [*stage_plans(setup), drafting_plan(setup, str(DEMO / "draft"), 2)]} == {"cpu"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"pipeline_parallel_size": 17},
            "pipeline_parallel_size is 17; the model has 16 layers, and a stage needs one",
        ),
        ({"cluster": "local-20"}, "cluster local-20 has 20 stages; the model has 16 layers, and a stage needs one"),
        ({"pipeline_parallel_size": 16}, ""),
        ({"layer_split": "8,0,8"}, ""),  # whoever writes it down wants it
        ({"cluster": "pipedec-21"}, ""),  # emulated: there may be more stages than the demo model has layers
    ],
)
def test_stages_without_layers(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        resolve_options(EngineOptions(**options))


DRAFTING = {"method": "draft_model", "model": str(DEMO / "draft")}


@pytest.mark.parametrize(
    ("options", "stages", "drafter"),
    [
        ({"speculative_config": None}, [8], None),
        ({"speculative_config": {"method": "ngram"}}, [8], None),  # looked up by the engine: no process
        ({"pipeline_parallel_size": 3, "speculative_config": None}, [2, 2, 2], None),
        ({"pipeline_parallel_size": 3, "speculative_config": DRAFTING}, [2, 2, 2], 2),
        ({"pipeline_parallel_size": 2, "threads": 3, "speculative_config": DRAFTING}, [3, 3], 3),
        ({"cluster": "demo", "speculative_config": DRAFTING}, [1, 1, 1, 1], 1),  # emulated
        ({"cluster": "STATED", "speculative_config": DRAFTING}, [4, 2], 2),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], stages: list[int], drafter: int | None
) -> None:
    monkeypatch.setattr("penstock.engine.resolve.usable_cores", lambda: 8)
    if options.get("cluster") == "STATED":
        local = load_cluster("local-2")
        devices = (replace(local.devices[0], threads=4), local.devices[1])
        options = options | {"cluster": replace(local, devices=devices)}
    setup = resolve_options(EngineOptions(**options))
    assert [plan.threads for plan in stage_plans(setup)] == stages
    if drafter is not None:
        assert drafting_plan(setup, str(DEMO / "draft"), 2).threads == drafter


def test_exclusive_links_are_refused_where_nothing_models_them() -> None:
    cluster = load_cluster("spd-4", links={"exclusive": True})
    with pytest.raises(FieldError, match=r"cluster spd-4 has links.exclusive, which only penstock simulate models"):
        check_options(EngineOptions(cluster=cluster))
