"""All options whose values are paths, by command."""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.engine.options import DEMO
from scripts.cli_docs import commands

SAID: Final = re.compile(r"GGUF file|ending in \.toml|preset, random-SEED|Small model that drafts")
"""Words in the help of options whose text may be a path, though their metavar does not say so."""
METAVARS: Final = re.compile(r"FILE|FOLDER|DIR|^PATH|\.json")
ENDINGS: Final = {"cluster": ".toml", "clusters": ".toml", "dataset": ".jsonl", "model": ".gguf"}
BESIDE: Final[dict[str, tuple[str, ...]]] = {
    "bench quality": ("--prompts", str(DEMO / "prompts.jsonl")),
    "bench serve": ("--url", "http://127.0.0.1:1"),
    "generate": ("x",),
    "hosts setup": ("b",),
    "keys add": ("second", "--listen", "127.0.0.1"),
    "plan": ("--cluster", "demo"),
    "simulate": ("--cluster", "demo"),
    "train": ("eagle", "--output", "nowhere", "--data", __file__),
    "worker": ("--listen", "127.0.0.1:0"),
}
"""Further words that a command has to be given before it looks at its paths."""


def takes_a_path(option: Any) -> bool:
    return bool(METAVARS.search(str(option.metavar)) or SAID.search(option.help))


OPTIONS: Final = [
    (name.removeprefix("penstock "), option)
    for name, command in commands()
    for option in command.params
    if takes_a_path(option)
]
