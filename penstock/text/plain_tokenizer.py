"""The tokenizer of a folder that was made from a GGUF file, read without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from penstock.files import MORE_TEMPLATES, TOKENIZER_CONFIG_FILE, read_json
from penstock.text.tokenizer_bounds import TOKENIZER_FILE

TEMPLATE_FILE: Final = "chat_template.jinja"
DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"


class PlainTokenizer:
    """Takes the place of one of transformers' classes in ``Tokenizer``, under the names that it asks for."""

    def __init__(self, folder: Path) -> None:
        self.backend_tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self.init_kwargs = read_json(folder / TOKENIZER_CONFIG_FILE)
        self.chat_template = templates_in(folder)
        """The chat template, or several by their names."""
        self.bos_token: str | None = self.init_kwargs.get("bos_token")
        eos: str | None = self.init_kwargs.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self.backend_tokenizer.token_to_id(eos)
        self.special_tokens_map: dict[str, str] = {
            name: token for name, token in self.init_kwargs.items() if name.endswith("_token") and token is not None
        }

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template that is given, in full or by its name, else the file's. Raises ValueError without a default."""
        named = self.chat_template if isinstance(self.chat_template, dict) else {DEFAULT: self.chat_template}
        if chat_template is not None:
            return named.get(chat_template) or chat_template
        for name in (WITH_TOOLS,) * (tools is not None) + (DEFAULT,):
            if (found := named.get(name)) is not None:
                return found
        raise ValueError(f"none of the checkpoint's templates ({', '.join(sorted(named))}) is the default: give one")


def templates_in(folder: Path) -> str | dict[str, str] | None:
    """The folder's chat template, several by name, or None."""
    main = folder / TEMPLATE_FILE
    found = {DEFAULT: main.read_text(encoding="utf-8")} if main.is_file() else {}
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found.get(DEFAULT) if found.keys() <= {DEFAULT} else found
