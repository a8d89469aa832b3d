"""Knowledge of the next token in a state half-way through the target: the limit of in-flight correction.

    python -m benchmarks.drafters.halfway

A head is trained for exactly that. It reads the demo target's states after half of the layers, has one layer of the
target's kind and a head over the whole vocabulary, and begins as the target's last layer, norm and head. It learns the
target's own distribution after every token of Python's standard library, in steps of eight windows of 256 tokens, each
used once. The rate is constant; for each point of the learning curve a copy goes on while its rate falls to zero over
the last quarter of that point's tokens. ``long_text``'s file is held out, in windows of 512 tokens of which the second
half counts.

SPD's module answers first, for a token that has just entered eight stages; the head answers when the token has passed
four of them. "again" is how often the head's best token is the target's greedy one where the first answer's best was
not, and "kept" how often it is where the first answer's was.
"""

from __future__ import annotations

import copy
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import utils

from benchmarks.papers.long_text import CONTEXT, windows
from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.reading import Answer, Reader
from benchmarks.shared.virtual import TARGET
from penstock.engine.options import DEMO
from penstock.messages import Sampling

NAME, HOW = "halfway", "Computed with the demo target"
STAGES: Final = 8
BATCH, WINDOW = 8, 256
CURVE: Final = (250, 500, 1000, 2000, 4000)
"""Steps of the learning curve's points."""
DECAY: Final = 4
"""Denominator of the last part of a point's steps, in which the rate falls."""
RATE, RISING = 1e-3, 25
"""The highest rate, and the steps until it is reached."""
HELD_OUT: Final = 15_000
"""Tokens of the file that is held out."""
SHARES: Final = (0.25, 0.5, 1.0, 2.0)
"""Weights with which the first answer's log chances are added to the head's."""


@dataclass(frozen=True)
class Judged:
    """A held-out window: its tokens, and for those that count the first answers and the target's picks."""

    text: Tensor
    first: Tensor
    """Log chances [counted, V] of the first answers."""
    picks: Tensor


def lessons(tokenizer: Any, steps: int) -> Tensor:
    """[steps, BATCH, WINDOW] tokens, from files in an order drawn once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)
    random.Random(0).shuffle(files)
    found: list[Tensor] = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8", errors="replace"), return_tensors="pt").input_ids[0]
        found += ids[: len(ids) // WINDOW * WINDOW].split(WINDOW) if len(ids) >= WINDOW else []
        if len(found) >= steps * BATCH:
            break
    return torch.stack(found[: steps * BATCH]).view(steps, BATCH, WINDOW)


def half_and_end(target: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """States after half of the layers, and the logits."""
    with torch.no_grad():
        out = target(ids, output_hidden_states=True)
    return out.hidden_states[target.config.num_hidden_layers // 2], out.logits


def make_head(target: Any) -> Any:
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    head = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    head.model.layers[0].load_state_dict(target.model.layers[-1].state_dict())
    head.model.norm.load_state_dict(target.model.norm.state_dict())
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    return head


def optimizer_of(head: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)


def train(head: Any, optimizer: torch.optim.AdamW, target: Any, batches: Tensor, rates: Sequence[float]) -> None:
    for ids, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states, logits = half_and_end(target, ids)
            found = head(inputs_embeds=states.float()).logits
        chances = logits.float().softmax(-1).flatten(0, 1)
        loss = nn.functional.kl_div(found.float().log_softmax(-1).flatten(0, 1), chances, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()


def heads(target: Any, tokenizer: Any) -> Iterator[tuple[int, Any]]:
    """Steps and the head of each point of the curve."""
    batches, trunk = lessons(tokenizer, CURVE[-1]), make_head(target)
    optimizer, done = optimizer_of(trunk), 0
    for steps in CURVE:
        falling = steps // DECAY
        rates = [RATE * min(1.0, (i + 1) / RISING) for i in range(done, steps - falling)]
        train(trunk, optimizer, target, batches[done : steps - falling], rates)
        done = steps - falling
        # The copy goes on at a falling rate, while the trunk keeps the constant one for later points.
        head = copy.deepcopy(trunk)
        own = optimizer_of(head)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(head, own, target, batches[done:steps], [RATE * (1 - i / falling) for i in range(falling)])
        yield steps, head.eval()


@torch.inference_mode()
def held_out(target: Any, tokenizer: Any) -> list[Judged]:
    ids = tokenizer(Path(utils.__file__).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, :HELD_OUT]
    reader = Reader(TARGET, "spd", str(DEMO / "drafters" / "spd"), STAGES, CONTEXT)
    found = []
    for start, end, counts in windows(len(ids)):
        text, at = ids[start:end], max(1, counts - start)
        _, steps = reader.read(Answer("", text.tolist(), at, Sampling()))
        first = torch.stack([torch.from_numpy(one) for one in steps[0]]).log_softmax(-1)
        found.append(Judged(text, first, half_and_end(target, text[None])[1][0, :-1].argmax(-1)[-len(first) :]))
    return found


@torch.inference_mode()
def judged(head: Any, target: Any, texts: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """The shares "again" and "kept" by weight of the first answer."""
    was = torch.cat([one.first.argmax(-1) == one.picks for one in texts])
    now: dict[float, list[Tensor]] = {share: [] for share in SHARES}
    for one in texts:
        states, _ = half_and_end(target, one.text[None])
        later = head(inputs_embeds=states).logits[0, :-1].log_softmax(-1)[-len(one.first) :]
        for share, found in now.items():
            found.append((later + share * one.first).argmax(-1) == one.picks)
    right = {share: torch.cat(found).double() for share, found in now.items()}
    return {
        f"{share:g}": {"again": float(one[~was].mean()), "kept": float(one[was].mean())} for share, one in right.items()
    }


def measured() -> Iterator[dict[str, Any]]:
    """Yields all figures so far after each point of the curve."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts, curve = held_out(target, tokenizer), []
    picks, right = (torch.cat(some) for some in ([one.picks for one in texts], [one.first.argmax(-1) for one in texts]))
    about = {"tokens": len(picks), "first": float((picks == right).double().mean())}
    for steps, head in heads(target, tokenizer):
        curve.append({"learned": steps * BATCH * WINDOW, "shares": judged(head, target, texts)})
        yield {**about, "curve": curve}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for figures in measured():
        Benchmark(__file__, HOW).keep(figures)
        show(figures["curve"][-1])
