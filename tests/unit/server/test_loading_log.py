"""A server's log says how far loading is, now and then."""

from __future__ import annotations

import json
import logging

import pytest

from penstock.messages import Loading
from penstock.pipeline.stage_process import FETCH
from penstock.server import command
from penstock.server.command import LoadingLog
from penstock.server.http.middleware import JsonFormatter


def test_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, logger="penstock.server"), LoadingLog() as loading:
        for second in range(25):
            now[0] = float(second)
            loading("", "stage", Loading(stage=0, read=4 * second, total=100))
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [(line["event"], line["percent"]) for line in lines] == [("loading weights", 40), ("loading weights", 80)]


def test_a_line_names_the_host_and_what_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "LINE_EVERY", 0.0)
    with caplog.at_level(logging.INFO, logger="penstock.server"), LoadingLog() as loading:
        loading("b:7700", FETCH, Loading(stage=0, read=1, total=4))
    (line,) = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert (line["event"], line["host"], line["percent"]) == ("fetching weights", "b:7700", 25)
