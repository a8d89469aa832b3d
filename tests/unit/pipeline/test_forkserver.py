"""Stages on GPUs as the fork server is told of them: what their interpreters begin with."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import conversion_mapping

from penstock.pipeline.forking import TRANSFORMERS, Server, preload_transformers
from penstock.pipeline.forkserver import VISIBLE, fresh_environment
from penstock.pipeline.worker import from_inside
from tests.agents import PLAN, spec

CUDA, HIP = VISIBLE


@pytest.mark.parametrize(
    ("device", "gpu", "set_by_user", "expected"),
    [
        ("cpu", "", {}, None),
        ("cpu", "", {CUDA: "1"}, None),
        ("cuda:1", "", {}, {CUDA: "1"}),
        ("cuda", "", {}, {CUDA: "0"}),
        ("cuda:1", "GPU-ab22", {}, {CUDA: "GPU-ab22"}),
        ("cuda:1", "", {CUDA: "3, 5,7"}, {CUDA: "5"}),
        ("cuda:0", "", {CUDA: "MIG-77,1"}, {CUDA: "MIG-77"}),
        ("cuda:1", "GPU-ab22", {CUDA: "3,5"}, {CUDA: "GPU-ab22"}),
        ("cuda:2", "", {CUDA: "3,5"}, {CUDA: ""}),
        ("cuda:1", "", {HIP: "2,3"}, {CUDA: "1", HIP: "3"}),
        ("cuda:0", "", {CUDA: "4", HIP: "2,3"}, {CUDA: "4", HIP: "2"}),
    ],
)
def test_a_stage_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gpu: str,
    set_by_user: dict[str, str],
    expected: dict[str, str] | None,
) -> None:
    """A number counts within the user's own list, and one that it does not have shows no GPU rather than another."""
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    assert fresh_environment(replace(PLAN, device=device, gpu=gpu)) == expected


@pytest.mark.parametrize(("device", "inside"), [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:3", "cuda:0")])
def test_a_stages_gpu_is_the_first_that_it_sees(device: str, inside: str) -> None:
    asked = spec("p")
    asked = replace(asked, plan=replace(asked.plan, device=device))
    assert from_inside(asked) == replace(asked, plan=replace(asked.plan, device=inside))


def test_an_interpreter_that_cannot_be_started_is_reported_as_the_stages_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_spawn", refuse)
    server = object.__new__(Server)
    server._engine, engine = socket.socketpair()
    server._lifeline, server._folder, server._children = -1, "", {}
    with server._engine, engine:
        server._spawn(spec("p"), {})
        told = json.loads(engine.recv(4096))
    cause = "no interpreter can be started for it: Cannot allocate memory"
    assert (told, server._children) == ({"process": "p", "cause": cause}, {})


def test_what_every_stage_would_make_anew_is_there_before_they_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    preload_transformers()
    made = conversion_mapping._checkpoint_conversion_mapping_cache
    assert made
    monkeypatch.setattr(conversion_mapping, "_build_checkpoint_conversion_mapping", dict)
    assert conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    assert {*TRANSFORMERS} <= sys.modules.keys()
