"""Writes docs/reference/hardware.md: which models fit on which devices, what links carry, and the speed to expect.

    python -m benchmarks.costs.hardware             # only writes the page, with the simulations that are stored
    python -m benchmarks.costs.hardware --measure   # simulates anew first (some minutes)

Rates are 80% of a data sheet's memory bandwidth and 50% of its arithmetic, as in penstock/cluster/presets.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import ceil
from textwrap import fill
from typing import Any, Final

from benchmarks.shared.measured import Taken, store, stored
from benchmarks.shared.root import ROOT
from penstock.cluster.load import ClusterFile, resolve
from penstock.cluster.spec import Cluster, ModelPrice, eagle, llama
from penstock.cluster.timing import held_by
from penstock.config import parse
from penstock.lab.report import markdown
from penstock.lab.script import DEMO_ACCURACY, profile_script
from penstock.lab.simulator import Simulated, simulate
from penstock.speculation import SpeculativeConfig

NAME: Final = "hardware"
PAGE: Final = ROOT / "docs" / "reference" / "hardware.md"
HOW: Final = "Simulated, an EAGLE head on a device of its own, strategy auto"
COMMAND: Final = "python -m benchmarks.costs.hardware --measure"
REQUESTS, TOKENS, SEED, WARM_UP = 10, 100, 1, 4
CONTEXT: Final = 4096
"""Tokens for whose keys and values there has to be room."""
USABLE: Final = 0.9
"""Fraction of a device's memory that weights and KV cache may take."""
GOOD: Final = DEMO_ACCURACY
WEAK: Final = (0.5, 0.6, 0.65, 0.7)
"""Chance that the target's token is among the first 1, 2, 3 and 4 candidates of a weak drafter."""

BOARDS: Final[dict[str, dict[str, float]]] = {
    # LPDDR4X-4267 on 32 bits, 17.1 GB/s; four Cortex-A76 at 2.4 GHz with two NEON pipes each, 154 GFLOPS in fp32.
    "Raspberry Pi 5, 8 GB": {
        "memory_gb": 8,
        "weight_bandwidth_gb_s": 13.7,
        "compute_tflops": 0.077,
        "overhead_ms": 2,
    },
    "Jetson Orin Nano, 8 GB": {
        "memory_gb": 8,
        "weight_bandwidth_gb_s": 54.4,
        "compute_tflops": 5,
        "overhead_ms": 2,
    },
    "RTX 3090, 24 GB": {
        "memory_gb": 24,
        "weight_bandwidth_gb_s": 749,
        "compute_tflops": 35.6,  # 50% of 71 in fp16 with fp32 sums
        "overhead_ms": 1,
    },
    "H100, 80 GB": {"memory_gb": 80, "weight_bandwidth_gb_s": 2680, "compute_tflops": 495, "overhead_ms": 2},
}


@dataclass(frozen=True)
class Model:
    """A Llama-shaped model's sizes, from its config.json."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int

    def price(self, bits: int) -> ModelPrice:
        return llama(
            layers=self.layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            key_value=self.key_value,
            vocabulary=self.vocabulary,
            bits=bits,
        )

    def weights_gb(self, bits: int) -> float:
        price = self.price(bits)
        return (price.weight_bytes(price.all_layers, head=True) + price.embedding_bytes) / 1e9

    def kv_gb(self) -> float:
        """Keys and values of CONTEXT tokens, in 16 bits."""
        price = self.price(16)
        return CONTEXT * price.slot_bytes(price.all_layers) / 1e9

    def devices(self, bits: int, memory_gb: float) -> int:
        """The fewest such devices, with layers split evenly: the first has the embedding, the last the head."""
        price = self.price(bits)
        for number in count(1):
            layers, alone = range(ceil(self.layers / number)), number == 1
            first = held_by(price, layers, CONTEXT, embedding=True, head=alone)
            last = held_by(price, layers, CONTEXT, embedding=alone, head=True)
            if max(first.total, last.total) <= USABLE * memory_gb * 1e9:
                return number
        raise AssertionError


MODELS: Final = {
    "TinyLlama-1.1B": Model(22, 2048, 5632, 256, 32000),
    "Llama-2-7B": Model(32, 4096, 11008, 4096, 32000),
    "Llama-3.1-8B": Model(32, 4096, 14336, 1024, 128256),
    "Llama-2-13B": Model(40, 5120, 13824, 5120, 32000),
    "Llama-3.1-70B": Model(80, 8192, 28672, 1024, 128256),
}


@dataclass(frozen=True)
class Setup:
    """A number of devices of a kind with a model, and the network's rate (1e9 bits/s of payload) between hosts."""

    devices: int
    board: str
    per_host: int
    model: str
    bits: int
    gbit_s: float

    def cluster(self) -> Cluster:
        names = [f"device-{i + 1}" for i in range(self.devices)]
        price = MODELS[self.model].price(self.bits)
        drafter = {"name": "drafter", "host": "host-0" if self.per_host > 1 else "draft-host", **BOARDS[self.board]}
        table: dict[str, Any] = {
            "name": self.label(),
            "as_model": price,
            "draft_as_model": eagle(price),
            "drafter": "drafter",
            "devices": [
                *(
                    {"name": name, "host": f"host-{i // self.per_host}", **BOARDS[self.board]}
                    for i, name in enumerate(names)
                ),
                drafter,
            ],
            "stages": [{"devices": [name]} for name in names],
            "links": {
                "local": {"bandwidth_gbit_s": 96, "latency_ms": 0.03},
                "network": {"bandwidth_gbit_s": self.gbit_s, "latency_ms": 0.2 if self.gbit_s < 5 else 0.1},
            },
        }
        return resolve(parse(ClusterFile, table))

    def label(self) -> str:
        return f"{self.devices} x {self.board.partition(',')[0]}"

    def precision(self) -> str:
        return {4: "4 bits", 16: "16 bits"}[self.bits]


PI, NANO, RTX, H100 = BOARDS
SETUPS: Final = (
    Setup(2, PI, 1, "Llama-3.1-8B", 4, 0.94),
    Setup(4, PI, 1, "Llama-3.1-8B", 4, 0.94),
    Setup(2, NANO, 1, "Llama-3.1-8B", 4, 0.94),
    Setup(4, NANO, 1, "Llama-3.1-8B", 16, 0.94),
    Setup(4, NANO, 1, "Llama-3.1-8B", 16, 0.094),
    Setup(4, NANO, 1, "Llama-2-13B", 4, 0.94),
    Setup(8, NANO, 1, "Llama-3.1-70B", 4, 0.94),
    Setup(2, RTX, 2, "Llama-3.1-70B", 4, 9.4),
    Setup(4, RTX, 4, "Llama-3.1-70B", 4, 9.4),
    Setup(8, RTX, 4, "Llama-3.1-70B", 16, 9.4),
    Setup(2, H100, 2, "Llama-3.1-70B", 16, 23.5),
    Setup(8, H100, 4, "Llama-3.1-70B", 16, 23.5),
)

HEAD: Final = """# Hardware

`python -m benchmarks.costs.hardware` writes this page. No figure comes from the devices it names: sizes follow from the
models' shapes, speeds are simulated. `penstock simulate --cluster FILE` does the same for a [cluster file](clusters.md)
of your own, and [several hosts](../how-to/hosts.md) says how to run it."""

DEVICES: Final = [
    [
        "x86 with AVX-512 or AVX2",
        "every test and every measured figure; each forced where the other is there, with the same bits",
        "",
    ],
    [
        "x86 without AVX2, FMA or F16C",
        "the compiler's processor forced to one of 2008: it computes with PyTorch, refuses `int8`, `int4` and `exact`",
        "an old processor itself",
    ],
    [
        "64-bit ARM",
        "parts of it under qemu: [ARM](arm.md)",
        "a board: any speed, stages in processes",
    ],
    [
        "NVIDIA GPU",
        "an H200: 22 families, every strategy, stages in processes, speeds: [GPUs](gpus.md); recorded answers of its "
        "driver; every family on a device without numbers",
        "consumer cards, several GPUs of one host, NVIDIA's Grace",
    ],
    [
        "Jetson, DGX Spark",
        "recorded answers of their drivers, which state no memory of the GPU, as it is the processor's",
        "all that the two rows above leave open",
    ],
    ["AMD GPU", "`HIP_VISIBLE_DEVICES` is narrowed with CUDA's, no more", "everything"],
    ["Intel GPU, Apple GPU", "`--device` refuses them", ""],
]
"""Kinds of devices: how they were tried, and what nobody has tried."""
BOARD: Final = """## On a Jetson or a DGX Spark

Nobody has typed these lines on one. PyTorch comes first, 2.7 or newer, from NVIDIA's index for the board's JetPack: the
one that pip finds may know nothing of its GPU. In the folder of a checkout:

    python3 -m venv .venv && . .venv/bin/activate
    pip install --editable .                          # without constraints.txt, which would replace that PyTorch
    python -c "import torch; print(torch.__version__, torch.cuda.is_available())"
    penstock doctor
    penstock generate "def fibonacci(n):" --model demo --device cpu --max-tokens 24
    penstock generate "def fibonacci(n):" --model demo --device cuda --dtype float32 --max-tokens 24
    python -m benchmarks.gpu --seconds 530 --out measured

- `penstock doctor` should show one GPU, the system's memory for it, and no error. A driver that cannot say something is
  shown as unknown; nothing ends for it.
- Both `generate` lines should print the same text: in float32 near ties alone may differ between a processor and a GPU.
- `benchmarks.gpu` writes what it could measure, and names what did not fit. The folder is what to attach to a report.
- Boards on a LAN come next: [several hosts](../how-to/hosts.md). `--device cuda` has each stage on its board's GPU.
"""


def take() -> Taken:
    """Tokens per second of every setup: plain, and with a good and a weak drafter."""
    return [COMMAND], [{"setup": repr(setup), **speeds(setup.cluster())} for setup in SETUPS]


def speeds(cluster: Cluster) -> dict[str, float]:
    config = SpeculativeConfig(strategy="auto")
    good, weak = (profile_script(accuracy, REQUESTS, TOKENS, SEED) for accuracy in (GOOD, WEAK))
    runs = {
        "plain": simulate(cluster, good, None, WARM_UP),
        "good": simulate(cluster, good, config, WARM_UP),
        "weak": simulate(cluster, weak, config, WARM_UP),
    }
    return {name: float(f"{per_second(found):.4g}") for name, found in runs.items()}


def per_second(runs: list[Simulated]) -> float:
    return sum(one.tokens - 1 for one in runs) / sum(one.seconds for one in runs)


def page() -> str:
    measured = stored(NAME)
    fits = (
        f"Weights, keys and values of {CONTEXT} tokens, and the fewest devices that hold both in {USABLE:.0%} of their "
        "memory with layers split evenly. A row is the hidden state of one token, which every link between two stages "
        "carries in 16 bits; 16 rows are a usual batch of guesses."
    )
    fast = (
        f"Simulated on {measured.date}: {REQUESTS} requests of {TOKENS} tokens, one at a time, with `auto` and an "
        "EAGLE head on one more device of the kind. Plain is the plain pipeline. A good drafter has the target's token "
        f"first in {GOOD[0]:.0%} of the steps and among its first four in {GOOD[3]:.0%} (the demo pair's at T = 1), a "
        f"weak one in {WEAK[0]:.0%} and {WEAK[3]:.0%}."
    )
    notes = (
        "- A device takes 80% of its data sheet's memory bandwidth and 50% of its arithmetic: assumed, not measured.",
        "- 4 bits means 4.5 bits a weight, read at the memory's full rate. Kernels that unpack slowly are far from "
        "that: those of FlowSpec's and Jupiter's papers reached a tenth and a sixth of it (`flowspec-13b`, "
        "`jupiter-homogeneous`).",
        "- A Raspberry Pi has little arithmetic beside its bandwidth, so that every guessed row costs time: it gains "
        "least.",
        "- More stages make the plain pipeline no faster. With guesses every stage that takes layers off the slowest "
        "one adds speed, less with each: a wrong guess is found out later.",
        "- The columns of the drafters are what the simulator's engine reaches. What Python and messages take beside "
        "it, `penstock simulate --overhead-per-hop-ms` adds.",
    )
    proved = markdown(["device", "tried with", "not tried"], DEVICES).replace("---:", "---")
    parts = [
        HEAD,
        "## What was proved, and how",
        proved,
        BOARD.rstrip("\n"),
        "## What fits",
        prose(fits),
        fit_table(),
        "## How fast",
        prose(fast),
        speed_table(measured.figures),
    ]
    return "\n\n".join([*parts, "\n".join(prose(note) for note in notes), f"    {COMMAND}"]) + "\n"


def prose(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fit_table() -> str:
    heads = [
        "model",
        "weights, GB",
        "KV, GB",
        "of 8 GB",
        "of 24 GB",
        "of 80 GB",
        "a row, KiB",
        "16 rows at 1 Gbit/s, ms",
    ]
    return markdown(heads, list(fit_rows()))


def fit_rows() -> Iterator[list[str]]:
    for name, model in MODELS.items():
        for bits in (16, 4):
            row_bytes = 2 * model.hidden
            devices = [f"{model.devices(bits, memory)}" for memory in (8, 24, 80)]
            link = [f"{row_bytes / 1024:g}", f"{16 * row_bytes * 8 / 0.94e6:.1f}"]
            yield [f"{name}, {bits} bits", f"{model.weights_gb(bits):.1f}", f"{model.kv_gb():.2f}", *devices, *link]


def speed_table(figures: list[dict[str, Any]]) -> str:
    heads = ["devices", "model", "network", "plain, tokens/s", "good drafter", "weak drafter"]
    rows = []
    for setup, found in zip(SETUPS, figures, strict=True):
        network = "one host" if setup.devices <= setup.per_host else f"{setup.gbit_s / 0.94:g} Gbit/s"
        gains = [f"{found[kind]:.3g} ({found[kind] / found['plain']:.1f}x)" for kind in ("good", "weak")]
        rows.append([setup.label(), f"{setup.model}, {setup.precision()}", network, f"{found['plain']:.3g}", *gains])
    return markdown(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Write {PAGE.name} from the models' shapes and stored simulations.")
    parser.add_argument("--measure", action="store_true", help="simulate anew first")
    if parser.parse_args().measure:
        store(NAME, HOW, take())
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
