"""Make a folder in which Penstock runs as on 64-bit ARM under qemu: ``python scripts/arm_root.py FOLDER``.

``root`` in it is Debian with its Python for aarch64, unpacked and not installed, and ``site`` holds the aarch64 wheels
of all that Penstock depends on, in the versions of the environment that this runs in. It is made once. Needs root,
because debootstrap does, and the packages debootstrap and qemu-user-static.

``python scripts/arm_root.py --wheels`` only asks for the wheels: a line for each package of every extra, without
loading any.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SUITE: Final = "bookworm"
PYTHON: Final = "3.11"
"""The version of the suite's Python."""
INCLUDED: Final = "python3,libstdc++6"
EMULATOR: Final = "qemu-aarch64-static"
MACHINE: Final = {"platform_machine": "aarch64", "python_version": PYTHON}
"""The environment markers in which the board differs from this machine."""
GLIBC: Final = range(17, 37)
"""The minor versions of glibc 2 whose wheels run there: Debian 12 has 2.36."""
TORCH: Final = "2.10.0"
"""The last version whose wheel for aarch64 is for CPUs alone. Later ones load CUDA's libraries, of some gigabytes."""
FIRST_PINNED: Final = {"torch": TORCH}


def needs(names: Iterable[str], extras: Iterable[str] = ()) -> dict[str, str]:
    """The versions by package of all that ``names`` depend on where Penstock runs on ARM, as they are installed here.

    Packages that are not installed here, because only other systems need them, are left out.
    """
    found: dict[str, str] = {}
    waiting = [(name, frozenset(extras)) for name in names]
    seen = set(waiting)
    while waiting:
        name, wanted = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = FIRST_PINNED.get(name, package.version.partition("+")[0])
        for requirement in map(Requirement, package.requires or ()):
            if applies(requirement, wanted):
                next_ = canonicalize_name(requirement.name), frozenset(requirement.extras)
                if next_ not in seen:
                    seen.add(next_)
                    waiting.append(next_)
    return found


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**MACHINE, "extra": extra}) for extra in ("", *extras))


def pip(*arguments: str) -> list[str]:
    """A command of pip that takes wheels for aarch64 alone."""
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in reversed(GLIBC)] + ["manylinux2014_aarch64"]
    chosen = [part for name in platforms for part in ("--platform", name)]
    versions = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    return [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", *versions, *chosen]


def ask_for_wheels() -> Iterator[str]:
    """A line for each package of every extra: its version, and whether there is a wheel."""
    extras = [extra for extra in distribution("penstock").metadata.get_all("Provides-Extra", ()) if extra != "dev"]
    packages = needs(["penstock"], extras)
    del packages["penstock"]
    for name, version in sorted(packages.items()):
        with TemporaryDirectory() as folder:
            command = [*pip("install", "--dry-run", "--ignore-installed"), "--target", folder, f"{name}=={version}"]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
        yield f"{name} {version}: {'yes' if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]}"


def make_site(site: Path) -> None:
    packages = needs(["penstock"])
    del packages["penstock"]
    with TemporaryDirectory(dir=site.parent) as folder:
        pinned = [f"{name}=={version}" for name, version in sorted(packages.items())]
        subprocess.run([*pip("download"), "--dest", folder, *pinned], check=True)
        # pip would compile them for its own Python; they are archives.
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def make_root(root: Path) -> None:
    """Debian's packages unpacked. No script of theirs runs, and no program of another architecture is started."""
    with TemporaryDirectory(dir=root.parent) as folder:
        command = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", f"--include={INCLUDED}"]
        subprocess.run([*command, SUITE, folder], check=True, stdout=subprocess.DEVNULL)
        for package in sorted(Path(folder, "var/cache/apt/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)


def missing() -> str | None:
    """A message that says what to install or who to be before anything can be made; None where all is there."""
    programs = {"debootstrap": "debootstrap", EMULATOR: "qemu-user-static"}
    packages = [package for program, package in programs.items() if shutil.which(program) is None]
    if packages:
        return f"needs {' and '.join(packages)}: apt-get install {' '.join(packages)}"
    return None if os.getuid() == 0 else "debootstrap takes root's rights: sudo"


def main(arguments: list[str]) -> None:
    if arguments == ["--wheels"]:
        for line in ask_for_wheels():
            print(line, flush=True)
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(re.split(r"\n\n", __doc__ or "")[0])
    if problem := missing():
        raise SystemExit(problem)
    folder = Path(arguments[0]).resolve()
    for name, make in {"root": make_root, "site": make_site}.items():
        if not (folder / name).is_dir():
            # Under its name once it is whole.
            unfinished = folder / f"{name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(folder / name)


if __name__ == "__main__":
    main(sys.argv[1:])
