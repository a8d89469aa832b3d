"""A host whose stages never start is lost in time, whatever they say of their progress."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock import LLM
from penstock.core import PenstockError
from penstock.hosts.keys import link_security, make_cluster
from penstock.messages import Loading, encode
from penstock.transport.outbox import Sockets
from tests.agents import NotingServer, agent, name_of, soon


@pytest.mark.parametrize("total", [0, 1, 1 << 40], ids=["silent", "beyond its total", "of another total each time"])
def test_a_stage_that_never_starts_is_lost_in_time(
    server: NotingServer, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    monkeypatch.setattr("penstock.pipeline.processes.START_TIMEOUT", 0.5)
    make_cluster(tmp_path / "keys", "host")
    security = link_security(tmp_path / "keys")
    done = threading.Event()

    def talk() -> None:
        soon(lambda: bool(server.started) or done.is_set())
        if not total or done.is_set():
            return
        (spec,) = server.started
        with Sockets(security) as sockets:
            engine = sockets.connect(spec.engine, spec.session)
            number = 1
            while not done.wait(0.02):
                said = Loading(stage=0, read=number, total=min(number + 5, total))
                engine.send(encode(said, spec.session))
                number += 1

    with agent(security) as one:
        talking = threading.Thread(target=talk)
        talking.start()
        try:
            with pytest.raises(PenstockError, match="has not started in time"):
                LLM(wide, max_model_len=64, hosts=name_of(one), keys=str(tmp_path / "keys"), recovery_timeout=0.0)
        finally:
            done.set()
            talking.join()
    assert set(server.killed) == {one.process for one in server.started}
