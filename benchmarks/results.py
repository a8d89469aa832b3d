"""Writes the pages of docs/background with figures from those in benchmarks/measured: results.md, results/,
papers.md, and the few in README.md and comparison.md.

    python -m benchmarks.results                        # only writes the pages
    python -m benchmarks.results --measure NAME ...     # measures these sections anew first
    python -m benchmarks.results --list                 # their names

A page is a template in benchmarks/sections, with a block a section; a module beside it makes of the stored figures what
the template cannot say itself, and measures anew what can be. Figures are stored with their commands, day and versions.
Simulations draw on recordings of the demo pair, which are made where benchmarks/recordings lacks them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sections import (
    engine,
    faults,
    flowspec,
    jupiter,
    models,
    papers,
    pipedec,
    reaches,
    real_models,
    serving,
    spd,
    strategies,
    vllm,
)
from benchmarks.sections.base import TEMPLATES, Section, block, headings, page_part, paragraphs, parts_of
from benchmarks.sections.findings import findings
from benchmarks.sections.findings.verdicts import VERDICTS
from benchmarks.sections.headlines import NAMES
from benchmarks.shared.commands import command_line
from benchmarks.shared.measured import folder_of_script, path_of, store, stored
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import SAMPLINGS, recording_arguments
from penstock.config import nearest
from penstock.core import ConfigError

FIRST = ROOT / "docs" / "background" / "results.md"
FOLDER = FIRST.with_suffix("")
PAPERS = FIRST.with_name("papers.md")
FINDINGS = FOLDER / "findings.md"
WITH_FIGURES = {ROOT / "README.md": "reaches", FIRST.with_name("comparison.md"): "beside_llama_cpp"}
"""Pages written by hand with a few figures between two comments, and the templates of these."""


@dataclass(frozen=True)
class Page:
    """One page. ``name`` is the stem of its file and its template, ``about`` its description on the first page."""

    name: str
    title: str
    about: str
    measured: dict[str, Section]

    @property
    def link(self) -> str:
        """A link to the page from the first page."""
        return f"{FOLDER.name}/{self.name}.md"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.md"


PAGES = (
    Page(
        "engine",
        "the engine itself",
        "exactness, overhead, decisions, links, the simulator beside the emulator",
        engine.SECTIONS,
    ),
    Page(
        "real-models",
        "real models",
        "nothing emulated: formats of weights, where a step goes, other engines, trained drafters, shared hosts",
        real_models.SECTIONS,
    ),
    Page(
        "models",
        "models of many kinds",
        "families beside transformers, layers that carry a state, latents, windows, an MTP head",
        models.SECTIONS,
    ),
    Page(
        "strategies",
        "strategies and drafters",
        "`auto` beside all others, what its parts are worth, what a wrong drafter costs, what drafters take",
        strategies.SECTIONS,
    ),
    Page(
        "pipedec",
        "beside PipeDec's paper",
        "trees, stages, sampling, throughput; simulated and in processes",
        pipedec.SECTIONS,
    ),
    Page("flowspec", "beside FlowSpec's paper", "its tables, with the demo pair and with EAGLE", flowspec.SECTIONS),
    Page("spd", "beside SPD's paper", "its tables, its steps in processes, corrections in flight", spd.SECTIONS),
    Page(
        "jupiter",
        "beside Jupiter's paper",
        "its tables and baselines, its plans and ours, prompts and answers in pieces, what they are worth",
        jupiter.SECTIONS,
    ),
    Page(
        "vllm",
        "beside pipelines and EAGLE in vLLM",
        "the report's tables; tensor parallel stages, predicted",
        vllm.SECTIONS,
    ),
    Page(
        "serving",
        "many requests at once",
        "throughput and latency by concurrency, simulated and over HTTP; long prompts amid others",
        serving.SECTIONS,
    ),
    Page(
        "faults",
        "faults and attacks",
        "ten thousand requests of all kinds, processes killed, hosts lost or without weights, hostile input",
        faults.SECTIONS,
    ),
)
TITLES = {page.name: headings(page.name) for page in PAGES}
"""Titles by section, by page, in order."""
PAGE_OF = {name: page for page in PAGES for name in TITLES[page.name]}
SECTIONS = {name: page.measured.get(name, Section()) for name, page in PAGE_OF.items()}
AWAITED = (
    *(
        "step",
        "real_ids",
        "beside_peers",
        "two_stages",
        "never_slower",
        "auto_chats",
        "learning",
        "drafter_acceptance",
        "trained",
    ),
    "flowspec_eagle",
    "layer_kinds",
    *("megatron_links", "emulated_groups", "drafter_places"),
    "spd_tables",
    "spd_chats",
    "spd_hybrid",
    "spd_rejection",
    "spd_overhead",
    "spd_correction",
    "drafter_time",
    *("six_sets", "many_beside_peers"),
    "pp_eagle_table",
    *("shared_host", "serving", "serve_http", "attack", "mtp"),
)
"""Sections left out of the pages until they are measured: they need trained drafters first, or take long."""
KIND = re.compile(r"^(Simulated|In virtual time|Emulated|Measured|Computed)")
"""The words with which a section's ``how`` begins."""
WRITTEN = "*Written by `python -m benchmarks.results` from `benchmarks/measured/`; do not edit.*"


def pages() -> dict[Path, str]:
    """Every page by its file. Raises ConfigError for a section whose figures are missing."""
    of_papers = {PAPERS: whole("papers", **papers.values()), FINDINGS: findings_page()}
    by_hand = {path: with_figures(path, template) for path, template in WITH_FIGURES.items()}
    return {FIRST: first_page(), **of_papers, **by_hand, **{page.path: page_of(page) for page in PAGES}}


def with_figures(path: Path, template: str) -> str:
    return reaches.between(path.read_text(encoding="utf-8"), whole(template, **reaches.values()).strip())


def whole(template: str, **values: Any) -> str:
    """A page that is one template."""
    text = TEMPLATES.get_template(f"{template}.md.jinja").render(written=WRITTEN, **values)
    return f"{paragraphs(*parts_of(text))}\n"


def findings_page() -> str:
    found = findings()
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}
    return whole("findings", found=found, tables=papers.by_verdict(found), counts=counts, meaning=VERDICTS)


def first_page() -> str:
    """The first page: the main figures, links to the other pages, and the kinds of figures."""
    template = TEMPLATES.get_template("results.md.jinja")
    text = template.render(
        **NAMES, written=WRITTEN, pages=PAGES, shown=shown(), how=how, figures_of=lambda name: stored(name).figures
    )
    recordings = block([command_line(recording_arguments(name)) for name in SAMPLINGS])
    return f"{paragraphs(*parts_of(text))}\n\n{recordings}\n"


def how(name: str) -> str:
    """A link to a section, named like its kind of figures."""
    (kind,) = KIND.findall(stored(name).how)
    return f"[{kind.lower()}]({PAGE_OF[name].link}#{anchor(title_of(name))})"


def page_of(page: Page) -> str:
    names = [name for name in TITLES[page.name] if name in shown()]
    contents = "\n".join(f"- [{title_of(name)}](#{anchor(title_of(name))})" for name in names)
    link = f"../{FIRST.name}#how-figures-are-taken"
    back = f"[How figures are taken]({link}) explains *simulated*, *in virtual time*, *emulated* and *measured*."
    sections = (page_part(page.name, name, SECTIONS[name]) for name in names)
    return "\n\n".join([f"# Results: {page.title}", WRITTEN, back, contents, *sections]) + "\n"


def title_of(name: str) -> str:
    return TITLES[PAGE_OF[name].name][name]


def shown() -> list[str]:
    """The sections that are in the pages."""
    return [name for name in PAGE_OF if name not in AWAITED or path_of(name).exists()]


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
        print("\n".join(f"{name:20} {title_of(name)}" for name in PAGE_OF))
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
