"""The sampling parameters that a GGUF file recommends, as fields of generation_config.json."""

from __future__ import annotations

import logging
from typing import Any, Final

from penstock.core import RequestError, SamplingParams
from penstock.files import problem_in, shown
from penstock.models.gguf.header import Header

log = logging.getLogger(__name__)

PREFIX: Final = "general.sampling."
FIELDS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Entry -> the parameter that it recommends a value for."""
PENALISED: Final = "penalty_last_n"
"""The number of latest tokens that llama.cpp penalises; -1 for all, as here, and 0 for none."""
OFF: Final[dict[str, tuple[Any, ...]]] = {
    PENALISED: (-1, 0),
    "penalty_repeat": (1.0,),
    "mirostat": (0,),
    "xtc_probability": (0.0,),
}
"""Entry -> values that are followed without a parameter; the first one is llama.cpp's default, or does the same."""
DEPENDENT: Final = {
    PENALISED: "penalty_repeat",
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "xtc_threshold": "xtc_probability",
}
"""Entry -> the one that makes it count; where that is off, it says nothing."""


def sampling(header: Header) -> dict[str, Any]:
    """The recommended parameters, rounded to six places: the file has float32.

    Recommendations that no parameter here follows are named in one line of the log. Raises ConfigError for values
    that no parameter may have.
    """
    stated = {key.removeprefix(PREFIX): key for key in header.entries if key.startswith(PREFIX)}
    found = {name: recommended(header, stated[one], name) for one, name in FIELDS.items() if one in stated}
    if header.value(f"{PREFIX}{PENALISED}") == 0:
        found.pop("repetition_penalty", None)
    unread = [key for name, key in stated.items() if name not in FIELDS and not is_followed(header, name)]
    if unread:
        values = ", ".join(f"{key} {shown(header.value(key))}" for key in unread)
        log.warning(f"{header.path} recommends {values}, for which there is no sampling parameter here: not followed")
    return found


def recommended(header: Header, key: str, name: str) -> int | float:
    """The value of an entry for the parameter ``name``."""
    value = header.value(key)
    params: dict[str, Any] = {name: round(value, 6) if isinstance(value, float) else value}
    try:
        return getattr(SamplingParams(**params), name)  # type: ignore[no-any-return]
    except RequestError as error:
        raise problem_in(header.path, key, f"recommends what cannot be: {error}") from error


def is_followed(header: Header, name: str) -> bool:
    """Whether an entry without a parameter says nothing, or what is done anyway."""
    values = OFF.get(name, ())
    default = values[0] if values else None
    return header.value(f"{PREFIX}{name}", default) in values or (
        name in DEPENDENT and is_followed(header, DEPENDENT[name])
    )
