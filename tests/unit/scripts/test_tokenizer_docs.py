"""The table of pre-tokenizers is today's, and each of them is llama.cpp's or refused."""

from __future__ import annotations

from tests.llama_cpp import needs_llama_cpp


@needs_llama_cpp
def test_the_table_is_todays() -> None:
    from scripts import tokenizer_docs

    page = tokenizer_docs.page()
    assert page == tokenizer_docs.PAGE.read_text(), "run python -m scripts.tokenizer_docs"
    verdicts = {row.split("|")[2].strip() for row in page.splitlines() if row.startswith("| `") and " of 20" in row}
    assert verdicts == {"20 of 20"}
