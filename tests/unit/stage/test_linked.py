"""Rows gathered over connections: every rank gets all columns, and nobody else is heard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
import pytest

from penstock.stage.linked import Leader, LinkedExchange, Loaded, StageRankLost, say_loaded
from penstock.transport.outbox import Sockets
from tests.proxies import Proxy

SECRET = "a secret of these ranks"


@contextmanager
def linked(ranks: int) -> Iterator[list[LinkedExchange]]:
    """The ends of an exchange on loopback, which know nobody but the first."""
    with ExitStack() as stack:
        ends = [end_of(stack, rank, ranks) for rank in range(ranks)]
        for end in ends[1:]:
            end.connect({0: ends[0].address})
        yield ends


def end_of(stack: ExitStack, rank: int, ranks: int, secret: str = SECRET) -> LinkedExchange:
    sockets = stack.enter_context(Sockets())
    return LinkedExchange(rank, ranks, secret, stack.enter_context(sockets.inbox("tcp://127.0.0.1:*")), sockets)


def meet(ends: list[LinkedExchange]) -> list[Loaded]:
    """Have all ranks know each other, as when they have loaded."""
    others = [threading.Thread(target=say_loaded, args=(end, Loaded(weight_bytes=end.rank))) for end in ends[1:]]
    for thread in others:
        thread.start()
    told = Leader(ends[0]).loaded()
    for thread in others:
        thread.join()
    return told


@pytest.mark.parametrize("bounds", [(0, 3, 8), (0, 8, 8, 8), (0, 2, 5, 8)])
def test_every_rank_gets_all_columns(bounds: tuple[int, ...]) -> None:
    """Also where only the first has any, as when it gives the others its rows, and where one is a gather ahead."""
    whole = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
    with linked(len(bounds) - 1) as ends:
        assert [one.weight_bytes for one in meet(ends)] == list(range(1, len(ends)))
        found: list[list[np.ndarray]] = [[] for _ in ends]

        def work(rank: int, first: int, last: int) -> None:
            for number in range(20):
                rows = np.zeros_like(whole)
                rows[:, first:last] = whole[:, first:last] + number
                ends[rank].gather(rows, bounds)
                found[rank].append(rows)

        threads = [threading.Thread(target=work, args=(rank, *own)) for rank, own in enumerate(pairwise(bounds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rows in found:
        assert all(np.array_equal(one, whole + number) for number, one in enumerate(rows))
        assert len(rows) == 20


def test_who_has_another_secret_is_not_heard() -> None:
    with ExitStack() as stack:
        leader, stranger = end_of(stack, 0, 2), end_of(stack, 1, 2, "another secret")
        stranger.connect({0: leader.address})
        stranger.send(0, b"rows")
        rank = end_of(stack, 1, 2)
        rank.connect({0: leader.address})
        rank.send(0, b"mine")
        assert leader.receive(1) == b"mine"
        leader.check()


def test_a_frame_of_no_rank_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with linked(2) as (leader, rank):
        rank._outboxes[0].send(rank._opening + b"\x07", b"rows")  # the number of a rank that there is not
        rank._outboxes[0].send(b"", b"rows")
        rank.send(0, b"mine")
        assert leader.receive(1) == b"mine"
    assert caplog.text.count("no rank of its stage has sent") == 2


def test_the_end_of_a_rank_is_noticed_behind_what_it_has_sent() -> None:
    with ExitStack() as stack:
        leader = end_of(stack, 0, 2)
        with ExitStack() as its:
            rank = end_of(its, 1, 2)
            rank.connect({0: leader.address})
            rank.send(0, b"last words")
            assert leader.receive(1) == b"last words"
        with pytest.raises(StageRankLost, match="has ended"):
            leader.receive(1)
        with pytest.raises(StageRankLost, match="has ended"):
            leader.check()


def test_columns_of_another_size_are_no_columns() -> None:
    with linked(2) as ends:
        meet(ends)
        ends[1].send(0, b"\0" * 4)
        with pytest.raises(StageRankLost, match="rank 1 of the stage has sent 4 bytes of 40"):
            ends[0].gather(np.zeros((5, 4), np.float32), (0, 2, 4))


def test_a_connection_that_is_cut_between_living_ranks_is_noticed() -> None:
    """The first rank hears no more of the other one, though that lives."""
    with ExitStack() as stack:
        leader, rank = (end_of(stack, number, 2) for number in range(2))
        proxy = Proxy(leader.address)
        rank.connect({0: proxy.address})
        meet([leader, rank])
        rank.send(0, b"rows")
        assert leader.receive(1) == b"rows"
        proxy.cut()
        with pytest.raises(StageRankLost, match="another rank of the stage has ended"):
            leader.receive(1)
