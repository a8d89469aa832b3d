"""Write the table of short names in docs/reference/models.md, from the file that the package ships.

python scripts/names_docs.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.library.names import short_names

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "models.md"
BEGIN: Final = "<!-- short names: written by python scripts/names_docs.py -->\n"
END: Final = "<!-- end of short names -->\n"
HEAD: Final = "| short name | model | what is pulled |\n| --- | --- | --- |\n"


def section() -> str:
    """The table with the markers around it."""
    rows = [f"| `{name}` | {known.model} | `{known.pull}` |" for name, known in short_names().items()]
    return BEGIN + HEAD + "\n".join(rows) + "\n" + END


def page() -> str:
    """The whole of docs/reference/models.md with the table as it is now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
