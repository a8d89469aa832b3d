"""What a token's state half-way through the target knows of the next token: the limit of in-flight correction.

    python -m benchmarks.costs.halfway [STEPS]

A head is trained for exactly that. It reads the demo target's states after half of the layers, has one layer of the
target's kind and a head over the whole vocabulary, begins as the target's last layer, norm and head, and learns the
target's own distribution after every token of Python's standard library, eight windows of 256 tokens a step. Held out
is ``long_text``'s file, in windows of 512 of which the second half counts. SPD's module answers first, for a token that
has just entered eight stages; the head answers when it has passed four of them. "again" is how often its best is the
target's greedy token where the first answer's best was not, "kept" where it was.
"""

from __future__ import annotations

import copy
import random
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import utils

from benchmarks.papers.long_text import CONTEXT, windows
from benchmarks.shared.measured import store
from benchmarks.shared.reading import Answer, Reader
from benchmarks.shared.virtual import TARGET
from penstock.engine.options import DEMO
from penstock.messages import Sampling

NAME, HOW = "halfway", "Computed with the demo target"
STAGES: Final = 8
STEPS, BATCH, WINDOW = 200, 8, 256
RATE: Final = 1e-3
HELD_OUT: Final = 15_000
"""Tokens of the file."""
SHARES: Final = (0.0, 0.25, 0.5, 1.0)
"""Of the first answer's log chances, what is added to the head's: 0 is the head alone."""


def lessons(tokenizer: Any) -> Iterator[Tensor]:
    """[BATCH, WINDOW] tokens, from files in an order drawn once."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    while True:
        left: list[Tensor] = []
        for file in files:
            ids = tokenizer(file.read_text(encoding="utf-8", errors="replace"), return_tensors="pt").input_ids[0]
            left += ids[: len(ids) // WINDOW * WINDOW].split(WINDOW) if len(ids) >= WINDOW else []
            while len(left) >= BATCH:
                yield torch.stack(left[:BATCH])
                left = left[BATCH:]


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


def train(head: Any, target: Any, tokenizer: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for step, ids in enumerate(islice(lessons(tokenizer), steps)):
        states, logits = half_and_end(target, ids)
        found = head(inputs_embeds=states).logits.log_softmax(-1)
        loss = nn.functional.kl_div(found.flatten(0, 1), logits.softmax(-1).flatten(0, 1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.3f}", file=sys.stderr, flush=True)


@torch.inference_mode()
def judged(head: Any, target: Any, ids: Tensor) -> dict[str, Any]:
    """Of the held-out tokens: how many, how often the first answer is right, and by share "again" and "kept"."""
    reader = Reader(TARGET, "spd", str(DEMO / "drafters" / "spd"), STAGES, CONTEXT)
    first_right, later_right = [], {share: [] for share in SHARES}
    for start, end, counts in windows(len(ids)):
        text, at = ids[start:end], max(1, counts - start)
        states, logits = half_and_end(target, text[None])
        picks = logits[0, at - 1 : -1].argmax(-1)
        _, steps = reader.read(Answer("", text.tolist(), at, Sampling()))
        first = torch.stack([torch.from_numpy(one) for one in steps[0]]).log_softmax(-1)
        later = head(inputs_embeds=states).logits[0, :-1].log_softmax(-1)[-len(first) :]
        picks = picks[-len(first) :]
        first_right.append(first.argmax(-1) == picks)
        for share, found in later_right.items():
            found.append((later + share * first).argmax(-1) == picks if share else later.argmax(-1) == picks)
    was = torch.cat(first_right)
    now = {share: torch.cat(found) for share, found in later_right.items()}
    return {
        "tokens": len(was),
        "first": float(was.double().mean()),
        "shares": {
            f"{share:g}": {"again": float(one[~was].double().mean()), "kept": float(one[was].double().mean())}
            for share, one in now.items()
        },
    }


def measured(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    head = make_head(target)
    train(head, target, tokenizer, steps)
    ids = tokenizer(Path(utils.__file__).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, :HELD_OUT]
    return {"learned": steps * BATCH * WINDOW, **judged(head.eval(), target, ids)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    figures = measured(steps)
    store(NAME, HOW, ([f"python -m benchmarks.costs.{NAME}"], figures))
    print(figures)
