"""Bytes of a token under tensor parallelism: Jupiter's published seconds, and what ranks really send each other.

    python -m benchmarks.papers.exchanged

Jupiter's Table IV has seconds at three rates. Seconds that depend on the rate by nothing but bytes lie on a line over
1 / rate: its slope is all bytes that were exchanged, its end the seconds of all else. Less the prompt's bytes by the
paper's own Table I, they are those of the new tokens.

Beside it, bytes that are counted: real ranks, as threads of this process, decode a row of a small model of llama's
form, and what each gives to the others through the engine's own exchange is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypedDict

import numpy as np

from benchmarks.papers.jupiter import MODELS, PROMPT, RATES, TOKENS
from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.published import published
from penstock.cluster.spec import PRICES, ModelPrice, llama
from penstock.cluster.timing import exchange_of
from penstock.lab.plan import METHODS
from penstock.models.shares import Exchange, Ranks
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.linked import exchanges
from penstock.stage.visibility import view_of
from tests.checkpoints import make_checkpoint

NAME, HOW = "exchanged", "Computed from the paper's Table IV, and counted between real ranks"
MBIT: Final = {rate: float(rate.split()[0]) * (1e3 if "Gbps" in rate else 1.0) for rate in RATES}
"""Rates as the paper names them, in 1e6 bits/s."""
RANKS: Final = (2, 4)


class Sizes(TypedDict):
    """A Llama-shaped model's sizes, as ``llama`` names them."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int
    key_value_heads: int


SIZES: Final[Mapping[str, Sizes]] = {
    "4 layers of 128": {"layers": 4, "hidden": 128, "intermediate": 384, "key_value": 64, "key_value_heads": 4},
    "2 layers of 256": {"layers": 2, "hidden": 256, "intermediate": 512, "key_value": 256, "key_value_heads": 8},
}
BOARDS: Final = 4
"""Devices of either of the paper's environments."""
REDUCED: Final[Mapping[str, float]] = {
    "Table I": METHODS["M-LM"].elements,
    "rings, a board": METHODS["M-LM"].elements * (BOARDS - 1) / BOARDS,
    "rings, all boards": METHODS["M-LM"].elements * (BOARDS - 1),
    "whole sums to each other, a board": METHODS["M-LM"].elements / 2 * (BOARDS - 1),
    "whole sums to each other, all boards": METHODS["M-LM"].elements / 2 * (BOARDS - 1) * BOARDS,
}
"""Hidden states that a layer's two all-reduces move for a row, by the way to count them: as Table I does, as what
crosses links in rings, and as whole partial sums that every board gives to every other."""
WHOLE: Final = PROMPT + (TOKENS - 1) / 2
"""Rows of a token, in the mean, that is computed without a cache of keys and values: the whole sequence so far."""
VOCABULARY: Final = 512
CONTEXT: Final = 8
FLOAT: Final = 4
"""Bytes of a number that ranks gather, whatever weights and states are held as."""


def measured() -> dict[str, Any]:
    table = published("jupiter")["table_4"]
    fits = [fit(table, place, model, name) for place in table for model in table[place] for name in METHODS]
    counts = [counted(name, ranks) for name in SIZES for ranks in RANKS]
    made = [one for one in fits if one is not None]
    return {"fits": made, "counted": counts, "ours": [*ours()], "readings": [*readings()]}


def fit(table: Mapping[str, Any], place: str, model: str, name: str) -> dict[str, Any] | None:
    """The line through the seconds at the lowest and the highest rate; None where the model does not fit."""
    seconds = {rate: row[[*METHODS].index(name)] for rate, row in table[place][model].items()}
    if "OOM" in seconds.values():
        return None
    low, middle, high = RATES
    megabits = (seconds[low] - seconds[high]) / (1 / MBIT[low] - 1 / MBIT[high])
    rest_s = seconds[high] - megabits / MBIT[high]
    prompt = table_1_bytes(PRICES[MODELS[model]], METHODS[name].elements, PROMPT)
    return {
        "environment": place,
        "model": model,
        "method": name,
        "megabytes": megabits / 8,
        "prompt_megabytes": prompt / 1e6,
        "token_megabytes": (megabits / 8 - prompt / 1e6) / TOKENS,
        "table_1_token_megabytes": table_1_bytes(PRICES[MODELS[model]], METHODS[name].elements, 1) / 1e6,
        "middle_s": rest_s + megabits / MBIT[middle],
        "published_middle_s": seconds[middle],
    }


def table_1_bytes(model: ModelPrice, elements: float, rows: int) -> float:
    return elements * model.layers * model.row_bytes * rows


class Counted:
    """The engine's exchange, with the bytes that this rank has given to the others."""

    def __init__(self, exchange: Exchange, others: int) -> None:
        self._exchange, self._others = exchange, others
        self.rank = exchange.rank  # type: ignore[attr-defined]
        self.bytes = self.gathers = 0

    def gather(self, rows_NW: np.ndarray, bounds: Sequence[int]) -> None:
        own = bounds[self.rank + 1] - bounds[self.rank]
        self.bytes += len(rows_NW) * own * rows_NW.itemsize * self._others
        self.gathers += 1
        self._exchange.gather(rows_NW, bounds)


def counted(name: str, ranks: int) -> dict[str, Any]:
    """Bytes of one row, of the rank that gives most: counted, and as ``exchange_of`` prices them."""
    sizes = SIZES[name]
    price = llama(**sizes, vocabulary=VOCABULARY, bits=32)
    with TemporaryDirectory() as folder:
        make_checkpoint(
            Path(folder),
            "llama",
            num_hidden_layers=sizes["layers"],
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["intermediate"],
            num_attention_heads=8,
            num_key_value_heads=sizes["key_value_heads"],
            head_dim=sizes["hidden"] // 8,
            vocab_size=VOCABULARY,
        )
        stages = [
            load_stage(folder, 0, sizes["layers"], capacity=2 * CONTEXT, ranks=Ranks(rank, ranks))
            for rank in range(ranks)
        ]
        ends = [Counted(exchange, ranks - 1) for exchange in exchanges(ranks)]
        for stage, end in zip(stages, ends, strict=True):
            stage.ranks.exchange = end
        computed(stages, range(CONTEXT))
        before = [end.bytes for end in ends], ends[0].gathers
        computed(stages, range(CONTEXT, CONTEXT + 1))
    given = [end.bytes - was for end, was in zip(ends, before[0], strict=True)]
    messages, row_bytes = exchange_of(price, (1.0,) * ranks, sizes["layers"], head=True)
    return {
        "model": name,
        "ranks": ranks,
        "counted_bytes": given,
        "counted_gathers": ends[0].gathers - before[1],
        "priced_bytes": row_bytes,
        "priced_gathers": messages,
    }


def computed(stages: Sequence[StageModel], positions: range) -> None:
    """Have all ranks compute rows at these positions of a text, and their logits."""
    view = view_of([7 * position % VOCABULARY for position in range(2 * CONTEXT)], positions)
    followers = [threading.Thread(target=stage.follow, args=(view, len(view))) for stage in stages[1:]]
    for follower in followers:
        follower.start()
    stages[0].logits(stages[0].forward(view, None), range(len(view)))
    for follower in followers:
        follower.join()


def ours() -> Iterator[dict[str, Any]]:
    """Megabytes of a token of the paper's models, over its four boards: its all-reduces, and our gathers in floats."""
    for model, name in MODELS.items():
        price = PRICES[name]
        floats = llama_in_floats(name)
        _, row_bytes = exchange_of(floats, (1.0,) * BOARDS, floats.layers, head=True)
        whole = table_1_bytes(price, METHODS["M-LM"].elements, 1)
        yield {
            "model": model,
            "table_1_megabytes": whole / 1e6,
            "ring_megabytes": whole * (BOARDS - 1) / BOARDS / 1e6,
            "gathered_megabytes": row_bytes / 1e6,
        }


def llama_in_floats(name: str) -> ModelPrice:
    """The model as our ranks exchange its rows: every number in 32 bits."""
    return replace(PRICES[name], activation_bytes=float(FLOAT), gathered_bytes=float(FLOAT))


def readings() -> Iterator[dict[str, Any]]:
    """Megabytes of a row of M-LM by each way to count them, by model."""
    for bits in (16, 32):
        for name, elements in REDUCED.items():
            found = {model: table_1_bytes(PRICES[MODELS[model]], elements, 1) * bits / 16 / 1e6 for model in MODELS}
            yield {"counted": name, "bits": bits, **found}


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    benchmark.parser().parse_args()
    figures = measured()
    benchmark.keep(figures)
    show(figures)
