"""Prompts: what chat templates read, and what would keep the event loop busy is done elsewhere."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from penstock.server.openai.params import Prompts


class Tokenizer:
    """Notes on which threads it works."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __len__(self) -> int:
        self.threads.add(threading.get_ident())
        return 5

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.threads.add(threading.get_ident())
        return str(ids)


def test_tokens_become_text_on_another_thread() -> None:
    tokenizer: Any = Tokenizer()
    prompts = Prompts(tokenizer, 10)
    assert asyncio.run(prompts.names([1, 2])) == ["[1]", "[2]"]
    assert asyncio.run(prompts.of_ids([1, 2])).token_ids == [1, 2]
    assert threading.get_ident() not in tokenizer.threads
