"""Writes docs/background/results.md from the figures in benchmarks/measured.

    python -m benchmarks.results                        # only writes the page
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

from benchmarks.sections import (
    comparisons,
    engine,
    flowspec,
    links,
    pipedec,
    pipedec_processes,
    real_model,
    serving,
    spd,
    vllm,
    weights,
)
from benchmarks.sections.base import Section, block, page_part
from benchmarks.shared.commands import command_line
from benchmarks.shared.measured import folder_of_script, path_of, store, stored
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import SAMPLINGS, recording_arguments
from penstock.config import nearest
from penstock.core import ConfigError

PAGE = ROOT / "docs" / "background" / "results.md"
ORDER = (
    *("exactness", "overhead", "decisions", "quantized", "demo"),
    *("acceptance", "pipedec_tree", "pipedec_stages", "pipedec_demo_pair", "same_texts"),
    *("pipedec_emulated", "pipedec_processes"),
    *("flowspec", "flowspec_eagle", "spd_tables", "spd_overhead", "hop_floor", "links", "spd_correction"),
    *("drafter_time", "pp_eagle_table"),
    *("step", "real_ids", "beside_peers", "trained"),
    *("auto_against", "parts", "always_wrong", "shared_host", "simulator", "two_processes", "centralised"),
    *("serving", "serve_http", "interference", "soak", "chaos", "attack"),
)
AWAITED = (
    *("step", "real_ids", "beside_peers", "trained"),
    "flowspec_eagle",
    "spd_tables",
    "spd_overhead",
    "spd_correction",
    "drafter_time",
    "pp_eagle_table",
    *("shared_host", "serving", "serve_http", "attack"),
)
"""Left out of the page until they are measured: their drafters have to be trained first, or they take long."""
MODULES = (engine, weights, real_model, comparisons, pipedec, pipedec_processes, flowspec, spd, links, vllm, serving)
SECTIONS: dict[str, Section] = {section.name: section for module in MODULES for section in module.SECTIONS}

HEAD = """# Results

*Written by `python -m benchmarks.results` from `benchmarks/measured/`; do not edit.*

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

Everything ran on two cores of a shared x86-64 machine in float32; versions and days are in the stored files."""

RECORDINGS = """## Recordings

Simulations "from a recording" draw on these, made in processes without emulation, 40 prompts of up to 64 tokens each.
Off the target's path a draft is taken to be any of those on it."""


def page() -> str:
    """The whole page. Raises ConfigError for a section whose figures are missing."""
    sections = [SECTIONS[name] for name in shown()]
    titles = [*(section.title for section in sections), "Recordings"]
    contents = "\n".join(f"- [{title}](#{anchor(title)})" for title in titles)
    recordings = f"{RECORDINGS}\n\n{block([command_line(recording_arguments(name)) for name in SAMPLINGS])}"
    return "\n\n".join([HEAD, contents, *map(page_part, sections), recordings]) + "\n"


def shown() -> list[str]:
    """The sections that are in the page."""
    return [name for name in ORDER if name not in AWAITED or path_of(name).exists()]


def anchor(title: str) -> str:
    """What GitHub makes of a heading for links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def measure(names: Sequence[str]) -> None:
    """Measure sections and store them. Raises ConfigError, before any starts, for one that cannot be from here."""
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
    parser = argparse.ArgumentParser(description=f"Write {PAGE.name} from what is stored in benchmarks/measured.")
    parser.add_argument("--measure", nargs="+", metavar="NAME", default=[], help="measure these sections anew first")
    parser.add_argument("--list", action="store_true", help="print the sections' names and titles")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:20} {SECTIONS[name].title}" for name in ORDER))
        return
    try:
        measure(options.measure)
        PAGE.write_text(page(), encoding="utf-8")
    except ConfigError as error:
        sys.exit(f"results: error: {error}")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
