"""Variants by name: each is found where its registry says, and loaded no sooner than it is asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

from penstock.config import Registry
from penstock.drafters.base import DRAFTERS, DrafterOptions
from penstock.strategies.base import STRATEGIES, StrategyOptions


def test_a_name_that_is_none_is_a_key_error() -> None:
    registry: Registry[object] = Registry("collections", {"ordered": "abc:Sequence"})
    assert list(registry) == ["ordered"]
    assert registry["ordered"].__name__ == "Sequence"
    with pytest.raises(KeyError):
        registry["unordered"]


def test_to_go_through_the_names_loads_none_of_them() -> None:
    """Help texts go through all names, and have to stay quick."""
    code = (
        "import sys\n"
        "from penstock.drafters.base import DRAFTERS\n"
        "from penstock.strategies.base import STRATEGIES\n"
        "assert len([*DRAFTERS, *STRATEGIES]) >= 14\n"
        "sys.exit('penstock.drafters.merged' in sys.modules or 'penstock.strategies.pipedec' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategys_file_declares_its_options_with_defaults(name: str) -> None:
    options = STRATEGIES[name]
    assert issubclass(options, StrategyOptions)
    assert is_dataclass(options)
    made, again = (options().make(stages=3) for _ in range(2))
    assert made is not again, "every request has one of its own"
    assert (made.candidates > 0) is options.drafts is (options().most_rows > 0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_file_declares_its_options(name: str) -> None:
    options = DRAFTERS[name]
    assert issubclass(options, DrafterOptions)
    assert is_dataclass(options)
    has_model = "model" in {field.name for field in fields(options)}
    assert has_model is (options.weights is not options.weights.NONE)
