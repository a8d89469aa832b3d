"""What a server is told beside the engine's options: who may ask, how much, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.config import check, check_positive

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Durations are seconds, sizes bytes. Raises FieldError naming the field."""

    served_model_name: tuple[str, ...] = ("demo",)
    """What clients may call the model; replies carry the first."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of these opens the server; with none it is open to whoever reaches it."""
    request_timeout: float = 600.0
    """From a request's arrival to its last token."""
    queue_timeout: float = 60.0
    """How long a request may wait for the engine to start it."""
    drain_timeout: float = 30.0
    """After SIGTERM: how long requests under way may go on."""
    body_timeout: float = 30.0
    """How long a body may take to arrive."""
    max_body_size: int = MIB
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server (CORS); "*" is any."""
    web: bool = True
    """Whether the web page is served at /."""
    log_prompts: bool = False
    seed: int | None = None
    """Of requests that give none; with None each of these gets a fresh one."""

    def __post_init__(self) -> None:
        names = self.served_model_name
        check(bool(names) and all(names), "served_model_name", names, "at least one name, none of them empty")
        check(all(self.api_keys), "api_key", "", "not empty")
        check_positive(self, "request_timeout", "queue_timeout", "body_timeout", "max_body_size")
        check_positive(self, "drain_timeout", or_zero=True)
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        for origin in self.allowed_origins:
            known = origin == "*" or (origin.startswith(("http://", "https://")) and not origin.endswith("/"))
            check(known, "allowed_origins", origin, "'*', or as browsers write it, for example 'https://example.org'")
