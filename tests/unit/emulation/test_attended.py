"""The positions that a batch attends to, counted from its rows."""

from __future__ import annotations

from penstock.cluster.timing import NOTHING, Attended, chunk
from penstock.drafters.base import DraftRequest
from penstock.emulation.cluster import attended_by_asks
from penstock.emulation.device import attended_by
from penstock.messages import Rows
from tests.unit.drafters.test_drafters import make_request


def rows(*entries: tuple[int, int]) -> Rows:
    """Rows given as (request, position)."""
    found = Rows()
    for node, (request, position) in enumerate(entries):
        found.append(request, node, node, node - 1, position, 0)
    return found


def test_a_chunk_of_a_prompt_sees_all_before_it_and_itself() -> None:
    assert attended_by(rows(*((0, p) for p in range(100, 130))), range(30)) == chunk(30, cached=100)
    assert chunk(3) == Attended(1 + 2 + 3, 3)
    assert chunk(2, cached=10) == Attended(11 + 12, 12)


def test_requests_share_no_tokens_and_branches_share_their_text() -> None:
    two_leaves = rows((0, 9), (0, 9), (1, 4))
    assert attended_by(two_leaves, [0, 1, 2]) == Attended(10 + 10 + 5, 10 + 5)


def test_dead_rows_attend_to_nothing() -> None:
    both = rows((0, 99), (1, 4))
    assert attended_by(both, [1]) == Attended(5, 5)
    assert attended_by(both, []) == NOTHING


def test_a_drafters_first_pass_reads_the_text_that_it_lacks() -> None:
    request = make_request([7] * 11)
    ask = DraftRequest(request, [request.tree.root], 2)
    assert request.tree.root.position == 10
    assert attended_by_asks([ask], 1) == Attended(11, 11)
    assert attended_by_asks([ask], 11) == Attended(11 + 10 * 11 / 2, 11)
