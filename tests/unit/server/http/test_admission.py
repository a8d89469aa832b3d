"""Who makes room when there are too many connections."""

from __future__ import annotations

import pytest

from penstock.server.http.serving import HEALTH_CHECKS, Admission, key_of

A, B, C = "10.0.0.1", "10.0.0.2", "2001:db8::1"


class Fake:
    def __init__(self, address: str, busy: bool = False) -> None:
        self.address = address
        self.busy = busy
        self.closed = False

    def turn_away(self) -> None:
        self.closed = True


def filled(admission: Admission, count: int, address: str, busy: bool = False) -> list[Fake]:
    found = [Fake(address, busy) for _ in range(count)]
    for one in found:
        admission.admit(one)
    return found


def test_the_oldest_that_has_asked_for_nothing_makes_room() -> None:
    admission = Admission(3, 3)
    busy, *idle = filled(admission, 1, A, busy=True) + filled(admission, 2, A)
    (new,) = filled(admission, 1, B)
    assert [one.closed for one in (busy, *idle, new)] == [False, True, False, False]
    assert not admission.is_for_health(new)


def test_it_is_one_of_the_address_that_has_the_most() -> None:
    admission = Admission(4, 4)
    (guest,), crowd = filled(admission, 1, A), filled(admission, 3, B)
    filled(admission, 2, C)
    assert not guest.closed
    assert [one.closed for one in crowd] == [True, True, False]


def test_an_address_has_its_own_limit_and_the_others_their_room() -> None:
    admission = Admission(8, 2)
    crowd = filled(admission, 3, A)
    assert [one.closed for one in crowd] == [True, False, False]
    other = filled(admission, 2, B, busy=True)
    assert not any(one.closed or admission.is_for_health(one) for one in other)


def test_where_all_are_busy_some_may_ask_for_health() -> None:
    admission = Admission(2, 2)
    busy = filled(admission, 2, A, busy=True)
    checks = filled(admission, HEALTH_CHECKS + 1, A, busy=True)
    assert [admission.is_for_health(one) for one in checks] == [True] * HEALTH_CHECKS + [False]
    assert [one.closed for one in checks] == [False] * HEALTH_CHECKS + [True]
    admission.leave(checks[0])
    (later,) = filled(admission, 1, A)
    assert admission.is_for_health(later)
    for one in (*busy, *checks, later):
        admission.leave(one)
    assert not admission.is_for_health(filled(admission, 1, A)[0])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (key_of(one) == key_of(other)) is same
