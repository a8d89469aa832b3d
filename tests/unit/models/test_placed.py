"""The device of a drafter whose stages are on other hosts."""

from __future__ import annotations

import pytest
import torch

from penstock.models.packing import drafting_device


@pytest.mark.parametrize(
    ("device", "found", "drafts"),
    [
        ("cpu", 4, "cpu"),
        ("cuda", 0, "cpu"),
        ("cuda:2", 0, "cpu"),
        ("cuda", 4, "cuda:0"),
        ("cuda:2", 4, "cuda:2"),
        ("cuda:2", 2, "cuda:0"),
    ],
)
def test_it_is_the_one_that_was_asked_for_where_this_host_has_it(
    monkeypatch: pytest.MonkeyPatch, device: str, found: int, drafts: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert drafting_device(device) == drafts
