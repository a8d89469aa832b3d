"""A release is made in a throwaway clone; what takes minutes, building and trying, is replaced."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

import penstock
from scripts import man_page, release
from scripts.release import ROOT, WRITTEN, ReleaseError

DAY = "2026-12-01"


def git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=clone, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the files that a release reads, as they are here."""
    made = tmp_path / "clone"
    for name in (*WRITTEN, "README.md", "docs/start/install.md"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text((ROOT / name).read_text())
    (made / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "--quiet", str(made))
    for name, value in (
        ("user.name", "a"),
        ("user.email", "a@b"),
        ("commit.gpgsign", "false"),
        ("tag.gpgsign", "false"),
    ):
        git(made, "config", name, value)
    git(made, "add", "--all")
    git(made, "commit", "--quiet", "--message", "first")
    return made


@pytest.fixture
def quick(clone: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is built or tried; returns the versions that would have been."""
    built: list[str] = []

    def build(root: Path, *kinds: str) -> list[Path]:
        built.append(release.stated(root))
        (out := root / "dist").mkdir(exist_ok=True)
        (out / "penstock.whl").write_bytes(b"")
        (out / "penstock.tar.gz").write_bytes(sdist(*release.WRITTEN, "pyproject.toml", "README.md", "LICENSE"))
        return sorted(out.iterdir())

    real = release.run
    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "try_wheel", lambda root, wheel: "text")
    monkeypatch.setattr(release, "run", lambda *words, where: "" if "twine" in words else real(*words, where=where))
    return built


def sdist(*names: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as opened:
        for name in names:
            opened.addfile(tarfile.TarInfo(f"penstock-1.0.0/{name}"))
    return content.getvalue()


def test_a_release_is_a_commit_and_a_tag_and_goes_nowhere(
    clone: Path, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    release.release(clone, "3.2.1", DAY)
    assert quick == ["3.2.1"]
    assert '__version__ = "3.2.1"' in (clone / release.MODULE).read_text()
    assert (clone / release.CHANGELOG).read_text().startswith(f"# Changelog\n\n## 3.2.1 ({DAY})\n")
    assert '"penstock 3.2.1"' in (clone / release.MANUAL).read_text()
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "describe").strip() == "v3.2.1"
    assert git(clone, "log", "-1", "--format=%s").strip() == "Penstock 3.2.1"
    told = capsys.readouterr().out
    assert "git push origin HEAD v3.2.1" in told
    assert "README.md:" in told, "pages that say that there is no release yet are named"


def test_the_manual_page_has_the_version_where_a_release_writes_it() -> None:
    assert f'"penstock {penstock.__version__}"' in man_page.page().splitlines()[0]


def test_the_changelog_can_be_released() -> None:
    assert release.UNRELEASED.search((ROOT / release.CHANGELOG).read_text()), "## 1.2.3 (unreleased)"


@pytest.mark.parametrize(
    ("version", "error"),
    [("1", "no version"), ("v1.2.3", "no version"), ("1.2.3 ", "no version"), ("0.0.9", "comes before")],
)
def test_what_is_no_next_version(clone: Path, version: str, error: str) -> None:
    with pytest.raises(ReleaseError, match=error):
        release.release(clone, version, DAY)


def test_a_version_is_released_once(clone: Path, quick: list[str]) -> None:
    release.release(clone, "3.2.1", DAY)
    with pytest.raises(ReleaseError, match=r"v3\.2\.1 is a tag already"):
        release.release(clone, "3.2.1", DAY)
    with pytest.raises(ReleaseError, match="nothing has changed"):
        release.release(clone, "3.2.2", DAY)


def test_what_is_in_no_commit_is_not_released(clone: Path) -> None:
    (clone / "new.py").write_text("")
    with pytest.raises(ReleaseError, match=r"1 changes that are not committed, such as new\.py"):
        release.release(clone, "3.2.1", DAY)


@pytest.mark.parametrize("failing", ["build", "try_wheel"])
def test_what_fails_leaves_the_checkout_as_it_was(
    clone: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*given: object) -> None:
        raise ReleaseError("it fails")

    monkeypatch.setattr(release, failing, fail)
    with pytest.raises(ReleaseError, match="it fails"):
        release.release(clone, "3.2.1", DAY)
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "tag") == ""
    assert release.stated(clone) == penstock.__version__


def test_an_sdist_that_lacks_something_is_refused(
    clone: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert release.missing_in(sdist("LICENSE"))[:2] == ["pyproject.toml", "README.md"]
    monkeypatch.setattr(release, "missing_in", lambda content: ["LICENSE"])
    with pytest.raises(ReleaseError, match="lacks LICENSE"):
        release.release(clone, "3.2.1", DAY)


def test_what_is_built_is_what_is_tracked(clone: Path, tmp_path: Path) -> None:
    (clone / "untracked.py").write_text("")
    (clone / release.MODULE).write_text("changed")
    copy = release.copied(clone, tmp_path / "copy")
    assert (copy / release.MODULE).read_text() == "changed"
    assert not (copy / "untracked.py").exists()


def test_the_command_says_in_a_line_what_is_wrong(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([], clone) == 1
    assert capsys.readouterr().err.startswith("release: which version? The code has ")
    with pytest.raises(ReleaseError, match=r"^git nothing: .+"):
        release.run("git", "nothing", where=clone)
