"""Write the table of pre-tokenizers in docs/reference/models.md: each name that llama.cpp knows, beside llama.cpp.

python -m scripts.tokenizer_docs
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from penstock.checkpoint.gguf_header import read_header
from penstock.checkpoint.gguf_tokenizer import pipeline
from penstock.checkpoint.gguf_vocabulary import PRE_TOKENIZERS, UNREADABLE, vocabulary_of
from penstock.core import ConfigError
from tests.gguf_tokenizers import TEXTS, byte_level_words, write_file
from tests.llama_cpp import vocabulary

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "models.md"
BEGIN: Final = "<!-- pre-tokenizers: written by python -m scripts.tokenizer_docs -->\n"
END: Final = "<!-- end of pre-tokenizers -->\n"
HEAD: Final = """\
llama.cpp is the one of xllamacpp {version}. *Equal* counts those of {texts} texts (scripts, spaces, digits, emoji,
code, contractions) that have llama.cpp's ids, with a vocabulary whose tokens reach over words. *Whole words*: a word
that is a token is never merged of others. *BOS*: texts begin with it unless `tokenizer.ggml.add_bos_token` says
otherwise.

| `tokenizer.ggml.pre` | equal | whole words | BOS |
| --- | --- | --- | --- |
"""


def section() -> str:
    """The table with the markers around it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.gguf"
        found: dict[tuple[str, bool, bool], list[str]] = {}
        for name in sorted({*PRE_TOKENIZERS, *UNREADABLE}):
            pre = PRE_TOKENIZERS.get(name)
            traits = (pre.ignore_merges, pre.add_bos) if pre is not None else (False, False)
            found.setdefault((verdict(file, name), *traits), []).append(name)
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | {said} | {yes(whole)} | {yes(bos)} |"
        for (said, whole, bos), names in found.items()
    ]
    head = HEAD.format(version=version("xllamacpp"), texts=len(TEXTS))
    return BEGIN + head + "\n".join(rows) + "\n" + END


def verdict(file: Path, name: str) -> str:
    """How many texts have llama.cpp's ids, or that the name is refused."""
    header = read_header(write_file(file, byte_level_words(), pre=name))
    try:
        built = pipeline(header, vocabulary_of(header))
    except ConfigError:
        return "refused"
    with vocabulary(file) as judge:
        assert judge is not None
        ids = [built.encode(text).ids == judge.encode(text, add_special=True) for text in TEXTS]
    return f"{sum(ids)} of {len(ids)}"


def yes(fact: bool) -> str:
    return "yes" if fact else ""


def page() -> str:
    """The whole of docs/reference/models.md with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
