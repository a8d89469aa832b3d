"""Train the learned drafters that come with the embedded demo target: EAGLE-3, Medusa, SPD's module, an early exit and
a DSpark that is shown the tokens in flight.

    python scripts/train_demo_drafters.py --work build/demo-drafters              # resumes where it stopped
    python scripts/train_demo_drafters.py --work build/demo-drafters --install    # and puts them into the package

Each is what ``penstock train`` makes of a third of the files that the target was trained on (scripts/train_demo.py says
which these are; the held-out ones stay held out), in bfloat16 autocast.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sysconfig
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import torch
from train_demo import PACKAGE_DEMO, corpus_files, is_held_out, write_corpus_manifest

from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.run import run_train

DRAFTERS: Final = PACKAGE_DEMO / "drafters"
EVERY: Final = 3
"""Drafters are trained on one in so many of the training files, in the order of their names."""

COMMON: Final[dict[str, Any]] = {"max_length": 256, "dtype": "bfloat16", "save_every": 150}
RECIPES: Final[dict[str, dict[str, Any]]] = {
    "eagle3": {"batch_tokens": 4096, "learning_rate": 4e-3, "draft_vocab_size": 2048, "ttt_steps": 5},
    "medusa": {"batch_tokens": 4096, "learning_rate": 2e-3, "draft_vocab_size": 1536, "heads": 4},
    "spd": {"batch_tokens": 1024, "learning_rate": 1.5e-3, "draft_vocab_size": 3072, "spec_layers": 4},
    "early-exit": {"batch_tokens": 1024, "learning_rate": 1.5e-3, "draft_vocab_size": 1536},
    "dspark": {"batch_tokens": 1024, "learning_rate": 3e-3, "markov_rank": 64},
}
LIMIT_MB: Final = 16


def write_data(folder: Path, every: int = EVERY) -> Path:
    """The files to train on, one in ``every``, each under its path with slashes replaced."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix(): path for path in corpus_files()}
    training = {name.replace("/", "__"): path for name, path in files.items() if not is_held_out(name)}
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(training)[every - 1 :: every]:
        shutil.copy(training[name], folder / name)
    return folder


def check_corpus(work: Path) -> None:
    """Raise if the running interpreter's library is not the one that the shipped target was trained on."""
    write_corpus_manifest(work)
    shipped, here = ((folder / "corpus.sha256").read_text().splitlines()[1:] for folder in (PACKAGE_DEMO, work))
    if different := sorted(set(shipped) ^ set(here)):
        raise SystemExit(f"the corpus differs from the shipped target's in {len(different)} files: {different[0]!r}")


def figures(output: Path) -> tuple[float, ...]:
    """Shares of the target's greedy tokens among the best 1, 4 and 16 candidates, on held-out documents."""
    state = torch.load(output / "training" / "state.pt", map_location="cpu", weights_only=True)
    _, _, by_step, _ = json.loads(state["history"])[-1]
    return tuple(by_step[0][k - 1] for k in (1, 4, 16))


def write_card(work: Path, kinds: Collection[str]) -> None:
    """Write the card with the figures of ``kinds``; the others' rows are those of the shipped card."""
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", (DRAFTERS / "README.md").read_text(), re.MULTILINE))
    for kind in kinds:
        output = work / kind
        size = sum(file.stat().st_size for file in output.glob("*.*"))
        shares = " | ".join(f"{share:.0%}" for share in figures(output))
        rows[kind.replace("-", "_")] = f"| {size / 1e6:.1f} MB | {shares} |"
    (work / "README.md").write_text(CARD.format(rows="\n".join(f"| `{name}` {row}" for name, row in rows.items())))


CARD: Final = """---
license: other
license_name: psf-2.0
language: [code]
---

# Drafters for the Penstock demo target

Modules that read the demo target's own hidden states, so that `speculative_config={{"method": "eagle3"}}` and its like
can be tried with `demo` without a download. Each was made by one run of `penstock train` on 3.1M tokens, a third of the
files that the target was trained on; `scripts/train_demo_drafters.py` in the project's repository holds the recipes.

How often the target's greedy token is among the best k candidates on held-out documents. `eagle3`: the first token
of a chain, from the states of the token before. `medusa`: the first of four heads. `spd`, of four layers: after a token
that has just entered a full pipeline of 16 stages. `early_exit`: after one that has passed the fourth layer. `dspark`:
the first token of a block, with none in flight. Of the target's 4,096 tokens `eagle3` can draft the 2,048 most frequent
ones (91% of those held out), `medusa` and `early_exit` 1,536 (87%), `spd` 3,072 (97%), `dspark` all.

| | size | top 1 | top 4 | top 16 |
| --- | --- | --- | --- | --- |
{rows}

The small model beside them, `draft`, which reads nothing of the target's, has 76%, 93% and 98% after 5M tokens.

**Licence.** As the target's: see the card one folder up.
"""


def install(work: Path, kinds: Collection[str]) -> None:
    for kind in kinds:
        folder = DRAFTERS / kind.replace("-", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in (work / kind).glob("*.*"):
            shutil.copy(file, folder / file.name)
    shutil.copy(work / "README.md", DRAFTERS / "README.md")
    size = sum(file.stat().st_size for file in DRAFTERS.rglob("*") if file.is_file())
    if size > LIMIT_MB * 1e6:
        raise SystemExit(f"the drafters take {size / 1e6:.1f} MB; {LIMIT_MB} are the most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo-drafters"), help="data, states and drafters")
    parser.add_argument("--only", choices=RECIPES, action="append", help="train this one; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--install", action="store_true", help="put the results into penstock/demo/drafters")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    check_corpus(args.work)
    data = write_data(args.work / "data")
    kinds = args.only or list(RECIPES)
    for kind in kinds:
        run_train(
            TrainOptions(kind=kind, model="demo", data=(data,), output=args.work / kind, **COMMON, **RECIPES[kind])
        )
    if args.install:
        write_card(args.work, kinds)
        install(args.work, kinds)


if __name__ == "__main__":
    main()
