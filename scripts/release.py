"""Make a release, in one command that sends nothing anywhere: ``make release VERSION=0.1.0``.

The version is in ``penstock/__init__.py`` alone. The first heading of the changelog, "## 0.1.0 (unreleased)", gets it
and the day. Wheel and sdist are built from the files under version control, checked, and the wheel is tried in a clean
environment with the shipped models. Then comes a commit with a tag. Whatever fails leaves the checkout as it was.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
MODULE: Final = "penstock/core.py"
CHANGELOG: Final = "CHANGELOG.md"
MANUAL: Final = "docs/reference/penstock.1"
WRITTEN: Final = (MODULE, CHANGELOG, MANUAL)
"""The files that a release writes."""
VERSION: Final = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
NUMBER: Final = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
UNRELEASED: Final = re.compile(r"^## (\S+) \(unreleased\)$", re.MULTILINE)
WAITING: Final = "no release yet"
"""Words of the documentation's sentences that end with the first release."""
TRIED: Final = ("generate", "def fibonacci(n):", "--model", "demo", "--max-tokens", "24", "--temperature", "0")


class ReleaseError(Exception):
    """A line that says why there is no release."""


def run(*words: str | Path, where: Path) -> str:
    """A command's output. Raises ReleaseError with its last line."""
    done = subprocess.run(words, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ReleaseError(f"{shlex.join(map(str, words))}: {(done.stdout.strip() or 'failed').splitlines()[-1]}")
    return done.stdout


def check_clean(root: Path) -> None:
    """Raise ReleaseError if anything differs from the last commit: it would be released, and be in no commit."""
    if changed := run("git", "status", "--porcelain", where=root).splitlines():
        raise ReleaseError(f"the checkout has {len(changed)} changes that are not committed, such as {changed[0][3:]}")


def check_new(root: Path, version: str) -> None:
    """Raise ReleaseError unless this is a version, later than or the same as the one in the code, without a tag."""
    if not NUMBER.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version: VERSION=1.2.3, or 1.2.3rc1")
    now = stated(root)
    if numbers(version) < numbers(now):
        raise ReleaseError(f"{version} comes before {now}, which {MODULE} has")
    if run("git", "tag", "--list", tag_of(version), where=root).strip():
        raise ReleaseError(f"{tag_of(version)} is a tag already")


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def tag_of(version: str) -> str:
    return f"v{version}"


def stated(root: Path) -> str:
    """The version that the code states."""
    found = VERSION.search((root / MODULE).read_text(encoding="utf-8"))
    if found is None:
        raise ReleaseError(f"{MODULE} states no version")
    return found[1]


def write_version(root: Path, version: str, day: str) -> None:
    """Write the version into the code and the manual page, and with the day over the changelog's first section."""
    module, changelog, manual = (root / name for name in WRITTEN)
    text, count = UNRELEASED.subn(f"## {version} ({day})", changelog.read_text(encoding="utf-8"), count=1)
    if not count:
        raise ReleaseError(f'{CHANGELOG} has no heading "## {version} (unreleased)", so nothing has changed')
    old = stated(root)
    changelog.write_text(text, encoding="utf-8")
    module.write_text(VERSION.sub(f'__version__ = "{version}"', module.read_text(encoding="utf-8")), encoding="utf-8")
    page = manual.read_text(encoding="utf-8")
    manual.write_text(page.replace(f'"penstock {old}"', f'"penstock {version}"', 1), encoding="utf-8")


@contextmanager
def undone_on_error(root: Path) -> Iterator[None]:
    """Put the files that a release writes back where the block fails."""
    try:
        yield
    except BaseException:
        run("git", "checkout", "--quiet", "--", *WRITTEN, where=root)
        raise


def copied(root: Path, to: Path) -> Path:
    """A copy of the files under version control, as they are now: nothing else gets into a wheel."""
    names = run("git", "ls-files", "-z", where=root).split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)
    return to


def build(root: Path, *kinds: str) -> list[Path]:
    """Build into ``dist``: by default an sdist, and the wheel from that."""
    out = root / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", *kinds, "--outdir", out, copied(root, Path(folder)), where=root)
    return sorted(out.iterdir())


def try_wheel(root: Path, wheel: Path) -> str:
    """Text of the shipped models, by the wheel in an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        bin_folder = Path(folder) / "bin"
        constraint = ("--constraint", root / "constraints.txt")
        run(bin_folder / "pip", "install", "--quiet", *constraint, wheel, where=Path(folder))
        return run(bin_folder / "penstock", *TRIED, where=Path(folder))


def missing_in(sdist: bytes) -> list[str]:
    """The files without which nobody can build from an sdist or read what it is, as far as it lacks them."""
    with tarfile.open(fileobj=BytesIO(sdist)) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    return [name for name in ("pyproject.toml", "README.md", "LICENSE", MODULE, MANUAL) if name not in names]


def waiting(root: Path) -> list[str]:
    """The lines of the documentation that say that there is no release yet, as FILE:LINE."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        f"{page.relative_to(root)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if WAITING in line
    ]


def next_commands(root: Path, version: str) -> str:
    """The commands that are left to a person who may publish."""
    lines = [f"git push origin HEAD {tag_of(version)}", "python -m twine upload dist/*"]
    if pages := waiting(root):
        lines.append(f"# then the pages that say that there is {WAITING}: {', '.join(pages)}")
    return "\n".join(f"    {line}" for line in lines)


def release(root: Path, version: str, day: str) -> None:
    """Make the release in the checkout ``root``. Raises ReleaseError, and then nothing has changed."""
    check_new(root, version)
    check_clean(root)
    with undone_on_error(root):
        write_version(root, version, day)
        print(f"building penstock {version}", flush=True)
        files = build(root)
        run(sys.executable, "-m", "twine", "check", "--strict", *files, where=root)
        sdist, wheel = (next(file for file in files if file.name.endswith(end)) for end in (".tar.gz", ".whl"))
        if lacking := missing_in(sdist.read_bytes()):
            raise ReleaseError(f"{sdist.name} lacks {', '.join(lacking)}")
        print("trying the wheel in a clean environment", flush=True)
        print(try_wheel(root, wheel))
        run("git", "commit", "--quiet", "--message", f"Penstock {version}", "--", *WRITTEN, where=root)
    run("git", "tag", "--annotate", tag_of(version), "--message", f"Penstock {version}", where=root)
    print(f"Penstock {version} is committed and tagged here, and in dist. To publish it:\n")
    print(next_commands(root, version))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="make release", description=str(__doc__).splitlines()[0])
    parser.add_argument("version", nargs="?", help="the release's version, such as 0.1.0")
    parser.add_argument("--wheel", action="store_true", help="only build a wheel into dist, as the checkout is now")
    given = parser.parse_args(arguments)
    try:
        if given.wheel:
            print(*build(root, "--wheel"))
        elif given.version is None:
            raise ReleaseError(f"which version? The code has {stated(root)}: make release VERSION={stated(root)}")
        else:
            release(root, given.version, f"{datetime.now(UTC):%Y-%m-%d}")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
