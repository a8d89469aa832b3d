"""Tiny checkpoints that many tests share, made when first asked for."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.transport.addresses import LinkSecurity
from tests.skips import Skips

# How long an example takes says how busy the machine is. `make test-all` tries twice as many examples (``whole``).
settings.register_profile("penstock", deadline=None, max_examples=50)
settings.register_profile("whole", deadline=None)
settings.load_profile("penstock")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a shell or CI may have set of this changes what is printed, or sends requests to this host through a proxy.
for foreign in (
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("GITHUB_ACTIONS", "PENSTOCK_API_KEY", "PENSTOCK_DEBUG"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
):
    os.environ.pop(foreign, None)

# No engine begins with what another test's has learned.
os.environ["PENSTOCK_FORGET"] = "1"

# A collection looks through every object of pytest, torch and transformers, which all stay. By default that takes a
# tenth of the tests' processor time.
gc.set_threshold(10_000, 10, 10)

# The models are so small that threads would wait for each other, several times as long where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# What is made of GGUF files is no part of the user's cache, and made anew by every run.
ASSETS = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["HF_ASSETS_CACHE"] = ASSETS.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", action="store_true", help="run the tests of the web page too: they need Chromium")
    parser.addoption(
        "--stacks", metavar="DIR", help="run the tests of other projects' clients, installed in this folder"
    )
    parser.addoption("--arm", metavar="DIR", help="run the tests under qemu too, in what scripts/arm_root.py has made")
    parser.addoption("--image", action="store_true", help="run the tests of the container image too: they need root")
    parser.addoption("--skips", metavar="FILE", help="append the table of what was skipped to this file")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # whoever has xdist's workers hears of theirs
        config.pluginmanager.register(Skips(config.getoption("--skips")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out that never name a marker which ``-m`` asks for: to import them takes longer than most tests."""
    asked = [part for part in config.option.markexpr.split(" and ") if part.isidentifier()]
    if collection_path.suffix != ".py" or not asked:
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if any(f"mark.{marker}" not in text for marker in asked) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of page, clients, image and ARM unless asked for, even where their programs are installed."""
    reasons = {
        "page": "the page is tested by `make test-page`; needs `apt-get install chromium`",
        "stacks": "the clients are tested by `make test-clients`; needs `apt-get install nodejs npm`",
        "image": "the image is tested by `make test-image`; needs root and a network",
        "arm": "ARM is tested by `make test-arm`; needs `apt-get install debootstrap qemu-user-static`",
    }
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker) and not config.getoption(f"--{marker}"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Keep what has been imported and collected out of the tests' garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def security(tmp_path_factory: pytest.TempPathFactory) -> LinkSecurity:
    """The certificates of a cluster's only host."""
    import trustme

    from tests.links import member

    return member(trustme.CA(), tmp_path_factory.mktemp("cluster") / "host")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of five layers with a byte-level tokenizer; its texts end at token 1."""
    from tests.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", seed=2, tokenizer=True)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like ``target``, with layers of some hundred kilobytes: those of a stage are only a part of the file."""
    from tests.checkpoints import make_checkpoint

    size = {"hidden_size": 256, "intermediate_size": 768}
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", seed=2, tokenizer=True, **size)


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights, so that its drafts are now right and now wrong."""
    return noisy_copy(target, tmp_path_factory.mktemp("draft") / "model", noise=0.1)


def noisy_copy(source: Path, folder: Path, noise: float) -> Path:
    """A copy of a checkpoint, each weight matrix changed by ``noise`` of its own standard deviation."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
