"""Draws the figures of the README and the docs from real runs: ``python benchmarks/figures.py`` (half a minute).

docs/pipeline.png: what every stage of the emulated cluster ``demo`` does over two and a half seconds, decoding plainly
and with PipeDec.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from penstock import LLM, SamplingParams
from penstock.bench.command import DEFAULT_PROMPTS
from penstock.bench.meter import Meter
from penstock.bench.prompts import read_prompts
from penstock.config import SpeculativeConfig
from penstock.core import RequestOutput

DOCS = Path(__file__).resolve().parent.parent / "docs"
WINDOW = 2.6
"""Seconds of decoding that are shown."""
SAMPLING = SamplingParams(temperature=1.0, seed=4, max_tokens=40)
PLAIN_COLOUR, CERTAIN_COLOUR, DEAD_COLOUR, DRAFT_COLOUR = "#7f8c9b", "#1b7f5c", "#e0b0a5", "#9fd3bd"


def run(llm: LLM, prompt: str, config: SpeculativeConfig | None) -> tuple[Meter, RequestOutput]:
    """One request alone, watched from its beginning until nothing is in flight."""
    meter = Meter(llm.setup.stages, llm.drafter)
    llm.observe(meter)
    (output,) = llm.run([prompt], [SAMPLING], config)
    llm.loop.drain()
    llm.loop.observers.remove(meter)
    return meter, output


def draw(axes: Axes, meter: Meter, output: RequestOutput, title: str, speculating: bool) -> None:
    """One bar per batch and stage. Its colour: the share of its rows that the last stage was still to answer for."""
    completion = output.outputs[0]
    start = (meter.first_submit or 0.0) + (completion.first_token_seconds or 0.0)
    for result, _ in meter.results:
        for span in result.spans:
            if span.start > start + WINDOW or span.end < start or not span.rows:
                continue
            dead = not result.picks
            colour = PLAIN_COLOUR if not speculating else DEAD_COLOUR if dead else CERTAIN_COLOUR
            left = max(span.start - start, 0.0)
            width = min(span.end - start, WINDOW) - left
            axes.barh(span.stage, width, left=left, height=0.72, color=colour, edgecolor="white", linewidth=0.6)
            if width > 0.04:
                axes.text(
                    left + width / 2, span.stage, span.rows, ha="center", va="center", fontsize=6.5, color="white"
                )
    shown = tokens_until(meter, start + WINDOW)
    axes.set_title(f"{title}: {shown} tokens in {WINDOW:g} s", loc="left", fontsize=10)
    axes.set_yticks(range(meter.stages), [f"board {i + 1}" for i in range(meter.stages)], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, WINDOW)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def tokens_until(meter: Meter, moment: float) -> int:
    return sum(count for at, count in meter.commits if at <= moment) - 1


def main() -> None:
    prompt = read_prompts(DEFAULT_PROMPTS, 6)[5]
    pipedec = SpeculativeConfig(method="draft_model", model="demo", strategy="pipedec")
    with LLM("demo", cluster="demo", speculative_config=pipedec) as llm:
        run(llm, prompt, None)
        plain = run(llm, prompt, None)
        fed = run(llm, prompt, pipedec)
    assert plain[1].outputs[0].token_ids == fed[1].outputs[0].token_ids
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    draw(above, *plain, "plain pipeline", speculating=False)
    draw(below, *fed, "Penstock, same tokens", speculating=True)
    below.set_xlabel("seconds of decoding (emulated edge boards; numbers are rows in the batch)", fontsize=8)
    handles = [
        Patch(color=CERTAIN_COLOUR, label="drafted rows, still of use when they came out"),
        Patch(color=DEAD_COLOUR, label="pruned on the way"),
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(DOCS / "pipeline.png", dpi=150)
    print(DOCS / "pipeline.png")


if __name__ == "__main__":
    main()
