"""``penstock run`` says beforehand what its model is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import run
from penstock.config import FieldError
from penstock.engine.options import EngineOptions
from tests.checkpoints import make_checkpoint


def test_what_is_no_chat_model_is_said_or_refused(tmp_path: Path) -> None:
    assert run.introduction_of(EngineOptions(), "demo", None) == [f"demo {run.CONTINUES}"]
    assert run.introduction_of(EngineOptions(), "demo", "{{ messages[0].content }}") == []
    plain = EngineOptions(model=str(make_checkpoint(tmp_path, "llama", tokenizer=True)))
    with pytest.raises(FieldError, match=r"model is 'base', which has no chat template: .*--chat-template"):
        run.introduction_of(plain, "base", None)
