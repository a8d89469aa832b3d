"""Reasons for which tests may be skipped; a run ends with a table of its skips and fails on an unlisted reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

LISTED: Final = {
    "needs a CUDA device": "The samplers' arithmetic on a GPU is compared where there is one; CI has none.",
    "oneDNN computes no packed bfloat16": "Older processors have no bfloat16 kernels; there the product packs nothing.",
    "this processor has no": "The same products are tested with each instruction that it has, and with none of them.",
    "this processor lacks what compiled products need": "There whole numbers are refused, which is tested everywhere.",
    "Linux's scheduling policies": "Other systems have none to ask for, and the product asks for none there.",
    "another C library than glibc": "Only glibc keeps what is freed, and only there the product asks it not to.",
    "this system allows too few open files": "A hard limit that only root raises; more than 1024 files are one test's.",
    "the paper's module has one timing": "Early exit has no such option: there is nothing to compare.",
    "the package registry cannot be reached": "The real model comes as a package; without a network there is none.",
    "network namespaces": "Only root has them. Hosts are also tested on addresses of one host; CI runs as root.",
    "Ray is not installed": "The dev extra has it, but not for every Python and system that Penstock runs on.",
    "zeroconf is not installed": "The dev extra has it; who has not installed that has no worker announced.",
    "the clients are tested by `make test-clients`": "They need environments of their own, which CI makes.",
    "the image is tested by `make test-image`": "It takes minutes, root and a gigabyte of packages.",
    "the image is made by root alone": "Nobody else may mount a stage's files; its structure is tested everywhere.",
    "OpenSSH's server is not installed": "It is no dependency; what would be sent is tested without it.",
    "ARM is tested by `make test-arm`": "It takes an emulator and a root file system, which CI has not.",
    "llama.cpp is not installed": "The dev extra has it, but not for every Python and system that Penstock runs on.",
    "no llama.cpp for this processor is built": "`make peers` compiles it for minutes; its wheel is tested.",
    "llama.cpp-native is not installed": "As above: both are one peer's code, of which the wheel's is always tested.",
    "needs two cores": "A pipeline's stages have cores of their own there; the parts are tested on one core, too.",
    "nginx is not installed": "It is no dependency; CI installs it where it may.",
    "the page is tested by `make test-page`": "It needs Chromium, which CI installs where it may.",
}
"""How a reason begins, and why it is good enough."""


class Skips:
    """Counts a run's skips by their reasons, those of xdist's workers too. ``file``, if any, has the table appended."""

    def __init__(self, file: str | None = None) -> None:
        self._file = file
        self._reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._count(report)

    def _count(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        unlisted = [reason for reason in self._reasons if not sentence(reason)]
        if unlisted and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = table(self._reasons)
        if lines:
            terminalreporter.section("skipped", "-")
            terminalreporter.write_line("\n".join(lines))
        if lines and self._file is not None:
            with Path(self._file).open("a") as file:
                file.write("\n".join(lines) + "\n")


def sentence(reason: str) -> str:
    """Why tests may be skipped for this reason; nothing if they may not."""
    return next((why for start, why in LISTED.items() if reason.startswith(start)), "")


def table(reasons: Counter[str]) -> list[str]:
    """A line for each reason: how many tests, the reason, and why that may be."""
    return [
        f"{count:5} skipped: {reason}. {sentence(reason) or 'NOT LISTED in tests/skips.py: the run fails.'}"
        for reason, count in reasons.most_common()
    ]
