"""Write docs/reference/api.md, the page for those who use Penstock from Python, from the docstrings.

    python scripts/api_docs.py

A class's fields are listed with what stands below each: a docstring, or the help of its command line option.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_type_hints

from penstock import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    ConfigError,
    FinishReason,
    OutlineOutput,
    PenstockError,
    PipelineError,
    QueueFull,
    Replicas,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.config import FieldError, Option, Registry
from penstock.core import Logprob, SpeculationMetrics
from penstock.drafters.base import DRAFTERS
from penstock.engine.completion import CompletionDelta
from penstock.engine.options import EngineOptions
from penstock.engine.stats import EngineStats
from penstock.engine.stream import RequestDelta, RequestStream
from penstock.speculation import SpeculativeConfig
from penstock.strategies.base import STRATEGIES

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "api.md"
WIDTH: Final = 120
MODULES: Final = re.compile(r"\b[a-z_.]+\.(?=[A-Z])")
"""The prefix of a class's name where Python prints it."""

HEAD: Final = """\
# Penstock from Python

`python scripts/api_docs.py` writes this page from the docstrings; change those, not this. Names and shapes are vLLM's
where it has them. `import penstock` does not import torch: `LLM` and `AsyncLLM` do, when they are first used.
[sampling.md](sampling.md) says more of sampling parameters and structured outputs, [drafters.md](drafters.md) and
[strategies.md](../background/strategies.md) of speculation, [clusters.md](clusters.md) of clusters.
"""


@dataclass(frozen=True)
class Entry:
    """One class on the page, with what of it is for users: methods and properties, fields, the constructor."""

    kind: type
    methods: Sequence[str] = ()
    fields: bool = False
    constructor: bool = False


@dataclass(frozen=True)
class Chapter:
    heading: str
    entries: Sequence[Entry]


CHAPTERS: Final = (
    Chapter(
        "Generating",
        (
            Entry(
                LLM,
                ("generate", "chat", "stream", "get_tokenizer", "get_default_sampling_params", "close"),
                constructor=True,
            ),
            Entry(EngineOptions, fields=True),
        ),
    ),
    Chapter("Speculation", (Entry(SpeculativeConfig, constructor=True, fields=True),)),
    Chapter(
        "Serving from asyncio",
        (
            Entry(
                AsyncLLM,
                (
                    "generate",
                    "chat",
                    "submit",
                    "resume",
                    "prepare",
                    "abort",
                    "stats",
                    "check_health",
                    "drained",
                    "get_tokenizer",
                    "get_default_sampling_params",
                    "close",
                ),
                constructor=True,
            ),
            Entry(Replicas, ("replicas", "drain", "restart", "roll"), constructor=True),
            Entry(RequestStream, ("__anext__", "output", "ended", "abort", "finished")),
            Entry(RequestDelta, fields=True),
            Entry(CompletionDelta, fields=True),
            Entry(EngineStats, fields=True),
        ),
    ),
    Chapter("Sampling", (Entry(SamplingParams, fields=True), Entry(StructuredOutputsParams, fields=True))),
    Chapter(
        "Outputs",
        (
            Entry(RequestOutput, fields=True),
            Entry(CompletionOutput, fields=True),
            Entry(OutlineOutput, fields=True),
            Entry(FinishReason, fields=True),
            Entry(Logprob, fields=True),
            Entry(SpeculationMetrics, ("mean_acceptance_length", "hit_rate"), fields=True),
        ),
    ),
    Chapter(
        "Errors",
        tuple(Entry(kind) for kind in (PenstockError, ConfigError, FieldError, RequestError, QueueFull, PipelineError)),
    ),
)


def page() -> str:
    """The whole of docs/reference/api.md."""
    parts = [HEAD]
    for chapter in CHAPTERS:
        parts.append(f"## {chapter.heading}\n")
        parts += [part for entry in chapter.entries for part in described(entry)]
        if chapter.heading == "Speculation":
            parts += [*options_of("method", DRAFTERS), *options_of("strategy", STRATEGIES)]
    return "\n".join(parts)


def described(entry: Entry) -> Iterator[str]:
    yield f"### `{entry.kind.__name__}`\n"
    yield f"{imported(entry.kind)}\n"
    if entry.constructor:
        yield f"```\n{signature(entry.kind.__init__, entry.kind.__name__)}\n```\n"  # type: ignore[misc]
    yield markdown(inspect.getdoc(entry.kind) or "")
    if entry.fields:
        yield "\n".join(fields(entry.kind)) + "\n"
    for name in entry.methods:
        yield from method(entry.kind, name)


def options_of(kind: str, registry: Registry[Any]) -> Iterator[str]:
    """The options of everything that a registry names."""
    for name, options in registry.items():
        yield f"#### Options of {kind} `{name}`\n"
        yield ("\n".join(fields(options)) or "None.") + "\n"


def imported(kind: type) -> str:
    """Where it is imported from, and what errors derive from."""
    import penstock

    module = "penstock" if kind.__name__ in penstock.__all__ else kind.__module__
    line = f"`from {module} import {kind.__name__}`"
    if issubclass(kind, Exception):
        line += f"; derives from {' and '.join(f'`{base.__name__}`' for base in kind.__bases__)}"
    return line


def markdown(docstring: str) -> str:
    """A docstring as Markdown: its double backticks become single ones, its examples stay as they are."""
    return re.sub(r"(?<!`)``(?!`)", "`", docstring).strip() + "\n"


def method(kind: type, name: str) -> Iterator[str]:
    """A method with its signature, or a property with its type, and what it says of itself."""
    found = inspect.getattr_static(kind, name)
    if isinstance(found, property):
        returned = inspect.signature(found.fget).return_annotation  # type: ignore[arg-type]
        yield f"#### `{kind.__name__}.{name}: {returned}`\n"
    else:
        yield f"#### `{kind.__name__}.{name}`\n"
        yield f"```\n{signature(found, name)}\n```\n"
    yield markdown(inspect.getdoc(found) or "")


def signature(function: Any, name: str) -> str:
    """The signature as in the source, without ``self``; with a line for each parameter if it is too long for one."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    head = f"async {name}" if inspect.iscoroutinefunction(function) else name
    returned = ast.unparse(definition.returns) if definition.returns else "None"
    tail = "" if function.__name__ == "__init__" else f" -> {returned}"
    taken = list(parameters(definition.args))
    line = f"{head}({', '.join(taken)}){tail}"
    return line if len(line) <= WIDTH else "\n    ".join([f"{head}(", *(f"{one}," for one in taken)]) + f"\n){tail}"


def parameters(taken: ast.arguments) -> Iterator[str]:
    """The parameters as they stand between the parentheses, without the first one."""
    assert not taken.posonlyargs
    assert taken.vararg is None
    first = len(taken.args) - len(taken.defaults)
    for i, one in enumerate(taken.args[1:], 1):
        yield parameter(one, taken.defaults[i - first] if i >= first else None)
    if taken.kwonlyargs:
        yield "*"
    yield from (parameter(*pair) for pair in zip(taken.kwonlyargs, taken.kw_defaults, strict=True))
    if taken.kwarg is not None:
        yield f"**{ast.unparse(taken.kwarg)}"


def parameter(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) if default is None else f"{ast.unparse(one)} = {ast.unparse(default)}"


def fields(kind: type) -> Iterator[str]:
    """A list of a dataclass's or an enumeration's fields: type, default and meaning."""
    said = {name: text for base in reversed(kind.__mro__) for name, text in documented(base).items()}
    if issubclass(kind, Enum):
        for member in kind:
            yield item(f"{member.name} = {member.value!r}", said[member.name])
        return
    for field in dataclasses.fields(kind):
        of_type, option = field_type(kind, field)
        head = f"{field.name}: {of_type}"
        if field.default is not dataclasses.MISSING:
            head += f" = {field.default!r}"
        texts = [option.help] if option else []
        texts += [f"Default: {option.default}."] if option and option.default else []
        texts += [said[field.name]] if field.name in said else []
        yield item(head, " ".join(texts))


def documented(kind: type) -> dict[str, str]:
    """The docstring below each field of a class, by the field's name."""
    if kind.__module__ in ("builtins", "enum"):
        return {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = definition.body  # type: ignore[attr-defined]
    found = {}
    for field, text in pairwise(body):
        target = field.target if isinstance(field, ast.AnnAssign) else getattr(field, "targets", [None])[0]
        if isinstance(target, ast.Name) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[target.id] = " ".join(str(text.value.value).split())
    return found


def field_type(kind: type, field: dataclasses.Field[Any]) -> tuple[str, Option | None]:
    """A field's type as text, and what the command line says of it."""
    hint = get_type_hints(kind, include_extras=True)[field.name]
    options = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Option)]
    bare = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    return MODULES.sub("", inspect.formatannotation(bare)), options[0] if options else None


def item(head: str, text: str) -> str:
    lines = textwrap.wrap(text.replace("``", "`"), WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "\n  ".join([f"- `{head}`", *lines])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
