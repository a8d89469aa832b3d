"""Writes docs/background/results.md and the pages in docs/background/results from the figures in benchmarks/measured.

    python -m benchmarks.results                        # only writes the pages
    python -m benchmarks.results --measure NAME ...     # measures these sections anew first
    python -m benchmarks.results --list                 # their names

A section is a pair of functions in benchmarks/sections: one takes the figures, which are stored with their commands,
day and versions, the other turns them into Markdown. Simulations draw on recordings of the demo pair, which are made
where benchmarks/recordings lacks them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sections import (
    comparisons,
    engine,
    flowspec,
    hosts,
    jupiter,
    links,
    models,
    outlined,
    parallel,
    pipedec,
    pipedec_processes,
    real_drafters,
    real_model,
    serving,
    spd,
    spd_chats,
    vllm,
)
from benchmarks.sections.base import Section, block, page_part, prose
from benchmarks.sections.headlines import HEADLINES
from benchmarks.sections.pages import PAGES, Page
from benchmarks.shared.commands import command_line
from benchmarks.shared.measured import folder_of_script, path_of, store, stored
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import SAMPLINGS, recording_arguments
from penstock.config import nearest
from penstock.core import ConfigError

FIRST = ROOT / "docs" / "background" / "results.md"
FOLDER = FIRST.with_suffix("")
ORDER = tuple(name for page in PAGES for name in page.sections)
AWAITED = (
    *("step", "real_ids", "beside_peers", "two_stages", "learning", "drafter_acceptance", "trained"),
    "flowspec_eagle",
    "spd_tables",
    "spd_chats",
    "spd_hybrid",
    "spd_rejection",
    "spd_overhead",
    "spd_correction",
    "drafter_time",
    "pp_eagle_table",
    *("shared_host", "serving", "serve_http", "attack", "mtp"),
)
"""Sections left out of the pages until they are measured: they need trained drafters first, or take long."""
MODULES = (
    engine,
    real_model,
    real_drafters,
    models,
    comparisons,
    pipedec,
    pipedec_processes,
    parallel,
    flowspec,
    jupiter,
    outlined,
    spd,
    spd_chats,
    links,
    vllm,
    serving,
    hosts,
)
SECTIONS: dict[str, Section] = {section.name: section for module in MODULES for section in module.SECTIONS}

KIND = re.compile(r"^(Simulated|In virtual time|Emulated|Measured|Computed)")
"""The words with which a section's ``how`` begins."""
WRITTEN = "*Written by `python -m benchmarks.results` from `benchmarks/measured/`; do not edit.*"

KINDS = """## How figures are taken

No figure here comes from the GPUs or boards that it speaks of: we do not have them. Every section says what it is:

- **Simulated**: the engine's own decisions in virtual time, on modelled devices and links. No model runs.
- **In virtual time**: real tokens and drafts of real models; stages, links and drafter take their modelled times only.
- **Emulated**: real tokens in real stage processes, each held back until its modelled device would have been done.
- **Measured**: on this machine, as it is.

Drafts come from the **demo pair**, the small models that come with the package, on Python code that they have not
seen; or from the **synthetic profile**: a drafter that has the target's token among its first 1, 2, 3 and 4 candidates
in 70, 80, 85 and 88% of the steps, rising linearly to 95% at 16. Figures with the profile measure the engine, not a
draft model. "x" is speed over that of the plain pipeline, or of what is named, on the same requests. Accuracy is
PipeDec's: the share of tokens that had been drafted as children of the token before, where it had any.

Everything ran on two cores of a shared x86-64 machine in float32 unless a section says otherwise; versions and days are
in the stored files."""

RECORDINGS = """## Recordings

Simulations "from a recording" draw on these, made in processes without emulation, 40 prompts of up to 64 tokens each.
Off the target's path a draft is taken to be any of those on it."""


def pages() -> dict[Path, str]:
    """Every page by its file. Raises ConfigError for a section whose figures are missing."""
    return {FIRST: first_page(), **{path_of_page(page): page_of(page) for page in PAGES}}


def first_page() -> str:
    """The first page: the main figures, links to the other pages, and the kinds of figures."""
    recordings = f"{RECORDINGS}\n\n{block([command_line(recording_arguments(name)) for name in SAMPLINGS])}"
    contents = "\n".join(
        prose(f"- [{page.title.removeprefix('Results: ')}]({link(page)}): {page.about}") for page in PAGES
    )
    return "\n\n".join(["# Results", WRITTEN, headlines(), "## The pages", contents, KINDS, recordings]) + "\n"


def headlines() -> str:
    """A table with a row per section that has a figure for the first page."""
    rows = []
    for page in PAGES:
        for name in page.sections:
            if name in HEADLINES and name in shown():
                found = stored(name)
                question, figure = HEADLINES[name](found.figures)
                (kind,) = KIND.findall(found.how)
                rows.append([question, figure, f"[{kind.lower()}]({link(page)}#{anchor(SECTIONS[name].title)})"])
    lines = [["", "figure", "how"], ["---"] * 3, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page_of(page: Page) -> str:
    sections = [SECTIONS[name] for name in page.sections if name in shown()]
    contents = "\n".join(f"- [{section.title}](#{anchor(section.title)})" for section in sections)
    back = f"What the kinds of figures are: [results](../{FIRST.name}#how-figures-are-taken)."
    return "\n\n".join([f"# Results: {page.title}", WRITTEN, back, contents, *map(page_part, sections)]) + "\n"


def path_of_page(page: Page) -> Path:
    return FOLDER / f"{page.name}.md"


def link(page: Page) -> str:
    """A link to the page from the first page."""
    return f"{FOLDER.name}/{page.name}.md"


def shown() -> list[str]:
    """The sections that are in the pages."""
    return [name for name in ORDER if name not in AWAITED or path_of(name).exists()]


def anchor(title: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def measure(names: Sequence[str]) -> None:
    """Measure sections and store them. Raises ConfigError, before any starts, for a section that has no ``take``."""
    for name in names:
        if name not in SECTIONS:
            raise ConfigError(f"--measure: {name!r} is no section; {nearest(name, SECTIONS)}")
        if SECTIONS[name].take is None:
            if name not in shown():
                raise ConfigError(f"--measure: {name} is not measured from here but by {script_of(name)}")
            commands = "\n".join(stored(name).commands)
            raise ConfigError(f"--measure: {name} is not measured from here but by:\n{commands}")
    for name in names:
        if (take := SECTIONS[name].take) is not None:
            store(name, SECTIONS[name].how, take())


def script_of(name: str) -> str:
    """The command of the script that measures a section part by part."""
    return f"python -m benchmarks.{folder_of_script(name)}.{name}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Write the pages of results from stored figures.")
    parser.add_argument("--measure", nargs="+", metavar="NAME", default=[], help="measure these sections anew first")
    parser.add_argument("--list", action="store_true", help="print the sections' names and titles")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:20} {SECTIONS[name].title}" for name in ORDER))
        return
    try:
        measure(options.measure)
        written = pages()
    except ConfigError as error:
        sys.exit(f"results: error: {error}")
    FOLDER.mkdir(exist_ok=True)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
