"""A server's settings beside the engine's options: access, limits and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from penstock.api_keys import API_KEY_VARIABLE
from penstock.config import check, check_positive
from penstock.engine.options import EngineOptions
from penstock.options import LIMITS, SERVER, Option

MIB: Final = 1 << 20
LEVELS: Final = ("debug", "info", "warning", "error")
"""Levels of log lines, from the least to the most important."""

ServedNames = Annotated[
    tuple[str, ...],
    Option(
        "What clients call the model. May be repeated.", SERVER, default="the folder's or file's name, or the hub id"
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server. Durations are seconds, sizes bytes. Raises FieldError naming the field."""

    served_model_name: tuple[str, ...] = (EngineOptions.model,)
    """Names by which clients may call the model; replies carry the first."""
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            "Clients have to send it as 'Authorization: Bearer KEY'. May be repeated: any of them will do.",
            SERVER,
            names=("--api-key",),
            envvar=API_KEY_VARIABLE,
            default="",
        ),
    ] = field(default=(), repr=False)
    """API keys. If there are none, here and in ``api_key_file``, the server is open to whoever reaches it."""
    api_key_file: Annotated[
        Path | None,
        Option(
            "Keys, one a line: other users of this machine see what --api-key says.", SERVER, metavar="FILE", default=""
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        Option("Jinja template in place of the checkpoint's own.", SERVER, metavar="FILE", default=""),
    ] = None
    allow_special_tokens_in_messages: Annotated[
        bool, Option("What a message holds may be a special token; else it is text.", SERVER)
    ] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Other sites whose web pages may call this server (CORS); '*' is any. May be repeated.",
            SERVER,
            metavar="ORIGIN",
            default="none",
        ),
    ] = ()
    web: Annotated[bool, Option("No web page at /.", SERVER, names=("--no-web",))] = True
    """Whether the web page is served at /."""
    log_level: Annotated[str, Option("debug, info, warning or error.", SERVER)] = "info"
    log_prompts: Annotated[bool, Option("Have prompts and answers in the log too.", SERVER)] = False
    seed: Annotated[
        int | None,
        Option("Of requests that give none: the same request, the same text.", SERVER, default="a fresh one each"),
    ] = None
    max_body_size: Annotated[int, Option("Most bytes of a request's body.", LIMITS)] = MIB
    body_timeout: Annotated[float, Option("Most seconds for a body to arrive.", LIMITS)] = 30.0
    max_queue: Annotated[int, Option("Most requests that wait; further ones are refused.", LIMITS)] = 256
    queue_timeout: Annotated[float, Option("Most seconds to wait.", LIMITS)] = 60.0
    request_timeout: Annotated[float, Option("Most seconds until a request's last token.", LIMITS)] = 600.0
    drain_timeout: Annotated[float, Option("Seconds that requests may still take after SIGTERM.", LIMITS)] = 30.0

    def __post_init__(self) -> None:
        names = self.served_model_name
        check(bool(names) and all(names), "served_model_name", names, "at least one name, none of them empty")
        check(all(self.api_keys), "api_key", "", "not empty")
        check_positive(self, "request_timeout", "queue_timeout", "body_timeout", "max_body_size")
        check_positive(self, "drain_timeout", or_zero=True)
        check(self.max_queue >= 1, "max_queue", self.max_queue, "at least 1")
        check(self.log_level in LEVELS, "log_level", self.log_level, f"one of {', '.join(LEVELS)}")
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        for origin in self.allowed_origins:
            known = origin == "*" or (origin.startswith(("http://", "https://")) and not origin.endswith("/"))
            check(known, "allowed_origins", origin, "'*', or as browsers write it, for example 'https://example.org'")
