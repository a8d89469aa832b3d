"""Reference tokens: what transformers' ``generate`` makes of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def generate(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Generate greedily up to the full length, past end tokens; no token of the prompt counts as padding."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    continued: list[int] = model.generate(ids, max_new_tokens=tokens, **options)[0, len(prompt) :].tolist()
    return continued
