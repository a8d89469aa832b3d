"""The report of skipped tests, with and without processes of xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.skips import LISTED

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.skips import Skips

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips("skipped.txt"))
"""
TESTS = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_on_a_gpu(n):
    pytest.skip("needs a CUDA device")

@pytest.mark.skip(reason={reason!r})
def test_other():
    pass

@pytest.mark.xfail
def test_broken():
    assert False

def test_fine():
    pass
"""
SIDE_BY_SIDE = pytest.mark.parametrize("options", [[], ["--numprocesses", "2"]])


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tests: str, options: list[str]) -> pytest.RunResult:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(tests)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others' plugins take seconds to be imported
    return pytester.runpytest_subprocess("-p", "xdist", *options)


@SIDE_BY_SIDE
def test_listed_reasons_are_counted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    reason = "the package registry cannot be reached for a-model: no network"
    result = run(pytester, monkeypatch, TESTS.format(reason=reason), options)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*3 skipped: needs a CUDA device. *CI has none.", f"*1 skipped: {reason}. *"])
    told = (pytester.path / "skipped.txt").read_text().splitlines()
    assert [line.split(":")[0].strip() for line in told] == ["3 skipped", "1 skipped"]


@SIDE_BY_SIDE
def test_a_reason_that_is_not_listed_fails_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    result = run(pytester, monkeypatch, TESTS.format(reason="it is Monday"), options)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*1 skipped: it is Monday. NOT LISTED*"])


def test_a_module_that_is_skipped_as_a_whole_counts(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, "import pytest\npytest.importorskip('no_such_module')\n", [])
    result.stdout.fnmatch_lines(["*1 skipped: could not import 'no_such_module'*NOT LISTED*"])


def test_every_reason_has_its_sentence() -> None:
    assert all(why.endswith(".") for why in LISTED.values())
