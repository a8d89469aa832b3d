"""PipeDec's fourteen cards alone and as seven tensor parallel groups of two: emulated in processes, beside simulated.

    python -m benchmarks.papers.emulated_groups [--prompts 6] [--time-scale 2]

The clusters are those of ``tensor_groups``, and so is what is simulated. In processes each decodes plainly and with
`pipedec` and the synthetic drafter, whose tokens have to be those of plain decoding (``pipedec_setting``); a group is
one process that takes its two cards' time. A host that does other things makes emulated figures worse than they are.

The figures are stored in benchmarks/measured/papers/emulated_groups.json. The exit code is 1 where tokens differ.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from benchmarks.papers import pipedec_setting
from benchmarks.papers.tensor_groups import ALONE, TENSORS, cards, decoding
from benchmarks.shared.benchmark import Benchmark, show
from penstock.lab.grid import PLAIN

NAME, HOW = "emulated_groups", "Emulated and simulated, with synthetic drafters"
CLUSTERS: Final = (ALONE, TENSORS)


def measured(prompts: int, time_scale: float) -> list[dict[str, Any]]:
    """A row by cluster, in milliseconds per token."""
    return [row(name, pipedec_setting.measured(prompts, time_scale, cards(name))) for name in CLUSTERS]


def row(name: str, emulated: dict[str, Any]) -> dict[str, Any]:
    simulated = decoding(name, "profile")["ms"]
    return {
        "cluster": name,
        "simulated_ms": {"plain": simulated[PLAIN], "pipedec": simulated["pipedec"]},
        "emulated_ms": {"plain": 1e3 * emulated["plain_seconds"], "pipedec": 1e3 * emulated["seconds"]},
        "error_ms": 1e3 * emulated["standard_error"],
        "tokens": emulated["tokens"],
        "time_scale": emulated["time_scale"],
        "identical": emulated["identical"],
    }


def main() -> int:
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(prompts=6, time_scale=2.0).parse_args()
    with benchmark.refusing():
        figures = measured(options.prompts, options.time_scale)
    benchmark.keep(figures, f"--prompts {options.prompts} --time-scale {options.time_scale:g}")
    show(figures)
    return 0 if all(one["identical"] for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
