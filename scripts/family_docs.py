"""Write docs/reference/families.md: every family of decoders that transformers has, and what Penstock makes of it.

python -m scripts.family_docs
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.shared.measured import kept_figures
from benchmarks.strategies.families import NAME
from penstock.checkpoint.architectures import check_supported, reason_of, text_config
from penstock.core import ConfigError
from tests.checkpoints import WRAPPERS

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "families.md"
TESTED: Final = frozenset({*WRAPPERS, *(one["family"] for one in kept_figures(NAME).values())})
RUNS: Final = "runs"
UNTESTED: Final = "runs, untested"
HEAD: Final = """\
# Families of models

`python -m scripts.family_docs` writes this page from transformers {version} and from what Penstock asks of a model;
change those, not this. A family is the `model_type` of a checkpoint's `config.json`. Each is judged by its default
configuration.

- *Runs*: its token ids have been compared with those of transformers' `generate`, on small random checkpoints and with
  every strategy ([figures](../background/results/models.md#families-of-models)); those of multimodal ones plainly.
- *Runs, untested*: it has what a pipeline needs, and nobody has compared its ids. A row is tried whenever a stage is
  loaded, and a model that does more than its configuration tells is refused then.
- Everything else is refused by its name, before anything is loaded.

| | families |
| --- | --- |
"""


def page() -> str:
    """The whole of docs/reference/families.md."""
    found: dict[str, list[str]] = {RUNS: [], UNTESTED: []}
    for family in families():
        found.setdefault(verdict(family), []).append(family)
    first = [row(kind, found.pop(kind)) for kind in (RUNS, UNTESTED)]
    refused = [row(f"refused: {reason}", found[reason]) for reason in sorted(found)]
    return HEAD.format(version=transformers.__version__) + "\n".join([*first, *refused]) + "\n"


def families() -> Iterable[str]:
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TESTED})


def verdict(family: str) -> str:
    """``RUNS``, ``UNTESTED``, or why it is refused."""
    if family in TESTED:
        return RUNS
    try:
        check_supported(text_config(AutoConfig.for_model(family)))
    except ConfigError as error:
        return reason_of(error)
    except Exception:  # whatever a configuration's own class says of its defaults
        return "its default configuration is none"
    return UNTESTED


def row(kind: str, names: Iterable[str]) -> str:
    return f"| {kind} | {', '.join(f'`{name}`' for name in sorted(names))} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
