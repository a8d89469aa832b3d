"""The pages' templates: each page of docs/background/results is a file ``*.md.jinja`` here, a block a section.

A block begins with its heading and reads as the page does. It has the stored ``figures``, the ``script`` that measured
them (where one has the section's name), and what the section's ``values`` make of the figures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.shared.measured import Taken, folder_of_script, stored
from penstock.lab.report import markdown, times

FOLDER = Path(__file__).parent
SUFFIX = ".md.jinja"
HEADING = re.compile(r"\{% block (\w+) %\}\n## (.+)")
LINE, FEW = 116, 4
"""Columns of a command in the page, and most lines of commands that are not folded away."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """How a section is measured anew and what its block is given.

    ``take`` measures it, and ``how`` says in what way; ``take`` is None where that is done by hand or by a script's own
    command. ``values`` makes of the stored figures what the block cannot say itself.
    """

    how: str = ""
    take: Callable[[], Taken] | None = None
    values: Callable[[Any], Mapping[str, Any]] = lambda figures: {}


def by_script(script: ModuleType) -> Section:
    """A section whose figures are those of a script's ``measured()``."""
    name = script.__name__
    return Section(how=script.HOW, take=lambda: ([f"python -m {name}"], script.measured()))


def headings(page: str) -> dict[str, str]:
    """The titles of a page's sections by name, in order."""
    return dict(HEADING.findall((FOLDER / f"{page}{SUFFIX}").read_text(encoding="utf-8")))


def page_part(page: str, name: str, section: Section) -> str:
    """A section in its page: title, how and when it was measured, its figures, and the commands."""
    measured = stored(name)
    title, *body = rendered(page, name, section, measured.figures)
    found = f"*{measured.how}; {measured.date}.*"
    return paragraphs(title, found, *body, *measured.notes) + f"\n\n{block(measured.commands)}"


def rendered(page: str, name: str, section: Section, figures: Any) -> list[str]:
    """A section's block with these figures: its heading, paragraphs and tables."""
    folder = folder_of_script(name)
    script = {} if folder is None else {"script": import_module(f"benchmarks.{folder}.{name}")}
    template = TEMPLATES.get_template(f"{page}{SUFFIX}")
    context = template.new_context({"figures": figures, **script, **section.values(figures)})
    return parts_of("".join(template.blocks[name](context)))


def parts_of(text: str) -> list[str]:
    """Its paragraphs, lists and tables, which blank lines separate."""
    return re.split(r"\n{2,}", text.strip())


def paragraphs(*parts: str) -> str:
    """Parts with a blank line between them: prose in lines of at most 120 columns, tables unchanged."""
    return "\n\n".join(part if part.startswith("|") else prose(part) for part in parts)


def prose(text: str) -> str:
    """A paragraph, or the items of a list, in lines of at most 120 columns."""
    if text.startswith("- "):
        return "\n".join(folded(item, indent="  ") for item in re.split(r"\n(?=- )", text))
    return folded(text)


def folded(text: str, indent: str = "") -> str:
    return fill(" ".join(text.split()), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def figure(value: float | None, form: str) -> str:
    """The filter ``f``: a number in an f-string's form, ``-`` where there is none."""
    return "-" if value is None else format(value, form)


TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
)
TEMPLATES.filters |= {"f": figure, "times": times}
TEMPLATES.globals |= {"table": markdown}


def block(commands: Sequence[str]) -> str:
    """Commands as Markdown code, with long ones over several lines, folded away where they are many."""
    lines = [line for command in commands for line in wrapped(command)]
    code = "\n".join(["```", *lines, "```"])
    return code if len(lines) <= FEW else f"<details><summary>Commands</summary>\n\n{code}\n\n</details>"


def wrapped(command: str) -> list[str]:
    """A command in lines of at most LINE columns, unless a word is longer, that a shell reads as one."""
    first, *words = map(quote, shlex.split(command))
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > LINE:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def quote(word: str) -> str:
    """The word in double quotes where these suffice, because brackets of strategies read worse in single ones."""
    return f'"{word}"' if "[" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
