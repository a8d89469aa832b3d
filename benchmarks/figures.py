"""Draws the figures of the README and the docs from real runs: ``python -m benchmarks.figures`` (half a minute).

docs/images/pipeline.png: what every stage of the emulated cluster ``demo`` does over two and a half seconds, decoding
plainly and with PipeDec.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from penstock import LLM, SamplingParams
from penstock.core import RequestOutput
from penstock.lab.bench.comparison import decode
from penstock.lab.bench.meter import Meter, Timeline, timeline_of
from penstock.lab.bench.report import draw_timeline
from penstock.lab.grid import DEFAULT_PROMPTS, read_prompts
from penstock.speculation import SpeculativeConfig

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WINDOW = 2.6
"""Seconds of decoding that are shown."""
SAMPLING = SamplingParams(temperature=1.0, seed=4, max_tokens=40)
PLAIN_COLOUR, CERTAIN_COLOUR = "#7f8c9b", "#1b7f5c"


def run(llm: LLM, prompt: str, config: SpeculativeConfig | None) -> tuple[Timeline, RequestOutput]:
    """One request alone, watched from its beginning until nothing is in flight."""
    meter = Meter(llm.setup.stages, llm.drafter)
    with llm.observing(meter):
        (output,) = decode(llm, [prompt], [SAMPLING], config)
        llm.loop.drain()
    return timeline_of(meter), output


def draw(axes: Axes, timeline: Timeline, title: str, colour: str) -> None:
    draw_timeline(axes, timeline, WINDOW, colour)
    axes.set_title(f"{title}: {timeline.tokens_until(WINDOW)} tokens in {WINDOW:g} s", loc="left", fontsize=10)
    axes.set_yticks(range(timeline.stages), [f"board {i + 1}" for i in range(timeline.stages)], fontsize=8)
    axes.spines["left"].set_visible(False)


def main() -> None:
    prompt = read_prompts(DEFAULT_PROMPTS, 6)[5]
    speculation = SpeculativeConfig(method="draft_model", model="demo")
    with LLM("demo", cluster="demo", speculative_config=speculation, enable_prefix_caching=False) as llm:
        run(llm, prompt, None)
        plain, plain_output = run(llm, prompt, None)
        fed, fed_output = run(llm, prompt, speculation)
    assert plain_output.outputs[0].token_ids == fed_output.outputs[0].token_ids
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    draw(above, plain, "plain pipeline", PLAIN_COLOUR)
    draw(below, fed, "Penstock, same tokens", CERTAIN_COLOUR)
    below.set_xlabel("seconds of decoding (emulated edge boards; numbers are rows in the batch)", fontsize=8)
    handles = [
        Patch(color=CERTAIN_COLOUR, label="drafted rows, still of use when they came out"),
        Patch(facecolor="white", edgecolor=CERTAIN_COLOUR, label="pruned on the way"),
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(IMAGES / "pipeline.png", dpi=150)
    print(IMAGES / "pipeline.png")


if __name__ == "__main__":
    main()
