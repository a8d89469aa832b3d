"""Mutations are tried against tests that are there."""

from __future__ import annotations

import pytest

from tests.mutations import PARTS, ROOT


@pytest.mark.parametrize("name", PARTS)
def test_a_part_names_files_and_tests_that_are_there(name: str) -> None:
    part = PARTS[name]
    assert [file for file in part.files if not (ROOT / "penstock" / file).is_file()] == []
    assert [test for test in part.tests if not (ROOT / "tests" / "unit" / test).exists()] == []
