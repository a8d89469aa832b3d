"""A server's settings beside the engine's options, and where it listens."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from penstock.checkpoint.look import GGUF
from penstock.config import LIMITS, SERVER, FieldError, Option, check, check_positive, check_types
from penstock.core import NO_HOST
from penstock.engine.options import EngineOptions, check_idle_timeout
from penstock.environment import API_KEY_VARIABLE
from penstock.files import allow_open_files
from penstock.transport.addresses import is_loopback

# ------------------------------------------------------------------------------------------------------------- settings
# A server's settings beside the engine's options: access, limits and timeouts.

MIB: Final = 1 << 20
"""Bytes of a mebibyte, the default of ``max_body_size``."""
LEVELS: Final = ("debug", "info", "warning", "error")
"""Levels of log lines, from the least to the most important."""

ServedNames = Annotated[
    tuple[str, ...],
    Option(
        "Name by which clients call the model. May be repeated.",
        SERVER,
        default="the folder's or file's name, or the hub id",
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
            "Key that clients have to send as 'Authorization: Bearer KEY'. May be repeated: any of them will do.",
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
            "File with such keys, one a line: other users of this machine see what --api-key says.",
            SERVER,
            metavar="FILE",
            default="",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        Option("Jinja template in place of the checkpoint's own.", SERVER, metavar="FILE", default=""),
    ] = None
    allow_special_tokens_in_messages: Annotated[
        bool, Option("Read special tokens in messages as such; without it they are plain text.", SERVER)
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
    log_level: Annotated[
        str, Option("Least important log lines that are written: debug, info, warning or error.", SERVER)
    ] = "info"
    log_prompts: Annotated[bool, Option("Write prompts and answers to the log, too.", SERVER)] = False
    seed: Annotated[
        int | None,
        Option(
            "Seed of requests that give none: the same request then gets the same text.",
            SERVER,
            default="a fresh one each",
        ),
    ] = None
    max_body_size: Annotated[int, Option("Most bytes of a request's body.", LIMITS)] = MIB
    body_timeout: Annotated[float, Option("Most seconds for a body to arrive.", LIMITS)] = 30.0
    max_queue: Annotated[int, Option("Most requests that wait; further ones are refused with status 429.", LIMITS)] = (
        256
    )
    queue_timeout: Annotated[float, Option("Most seconds that a request waits before it runs.", LIMITS)] = 60.0
    request_timeout: Annotated[float, Option("Most seconds from a request's arrival to its last token.", LIMITS)] = (
        600.0
    )
    idle_timeout: Annotated[
        float | None,
        Option(
            "Seconds without a request after which the weights are freed until the next one comes.",
            LIMITS,
            default="never",
        ),
    ] = None
    """The next request waits for them to be loaded, as long as ``queue_timeout`` lets it."""
    drain_timeout: Annotated[float, Option("Seconds that requests may still take after SIGTERM.", LIMITS)] = 30.0

    def __post_init__(self) -> None:
        check_types(self)
        names = self.served_model_name
        check(bool(names) and all(names), "served_model_name", names, "at least one name, none of them empty")
        check(all(self.api_keys), "api_key", "", "not empty")
        check_positive(self, "request_timeout", "queue_timeout", "body_timeout", "max_body_size")
        check_positive(self, "drain_timeout", or_zero=True)
        check_idle_timeout(self.idle_timeout)
        check(self.max_queue >= 1, "max_queue", self.max_queue, "at least 1")
        check(self.log_level in LEVELS, "log_level", self.log_level, f"one of {', '.join(LEVELS)}")
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        for origin in self.allowed_origins:
            known = origin == "*" or (origin.startswith(("http://", "https://")) and not origin.endswith("/"))
            check(known, "allowed_origins", origin, "'*', or as browsers write it, for example 'https://example.org'")


def name_of(model: str) -> str:
    """The model's name for clients: its folder's name, its GGUF file's without the suffix, or the hub id unchanged."""
    place = Path(model).expanduser()
    if place.suffix == GGUF:
        return place.stem
    return place.resolve().name if place.is_dir() else model


# --------------------------------------------------------------------------------------------------------------- listen
# A server's address, names, certificate, and limits on connections.

OTHER_FILES: Final = 128
"""Open files beside the connections: those for stages, workers, health checks and logs. With fewer, the last
connections would find none left."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """An address and its limits. Raises FieldError naming the field."""

    host: Annotated[str, Option("Address to listen on; 0.0.0.0 is every address of this machine.", SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", SERVER)] = 8000
    root_path: Annotated[
        str,
        Option("Beginning of every path, which a proxy in front takes off.", SERVER, metavar="/PATH", default="none"),
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Further names, as in the Host header, to which the server answers; '.example.org' includes all below it, "
            "'*' is any. May be repeated.",
            SERVER,
            metavar="NAME",
            default="loopback's on loopback; elsewhere any address, and this host's own names",
        ),
    ] = ()
    ssl_certfile: Annotated[
        Path | None, Option("Certificate in PEM: serve HTTPS.", SERVER, metavar="FILE", default="")
    ] = None
    """The server's certificate, followed by those of the authorities that vouch for it."""
    ssl_keyfile: Annotated[
        Path | None, Option("The certificate's key.", SERVER, metavar="FILE", default="in the certificate's file")
    ] = None
    max_connections: Annotated[int, Option("Most connections at a time.", LIMITS)] = 512
    max_connections_per_address: Annotated[int, Option("Most connections at a time from one address.", LIMITS)] = 384
    """More than run and wait by default, because a proxy in front counts as one address."""
    header_timeout: Annotated[float, Option("Most seconds for a request's line and headers to arrive.", LIMITS)] = 10.0

    def __post_init__(self) -> None:
        check_types(self)
        root = self.root_path
        known = not root or (root.startswith("/") and not root.endswith("/") and root.isascii())
        check(known, "root_path", root, "empty, or begin with a slash and not end with one, for example '/llm'")
        for name in self.allowed_hosts:
            plain = bool(name) and name.isascii() and not set(name) & set("/:[]@ ")
            check(plain, "allowed_hosts", name, "'*', or a name without scheme and port, for example 'llm.example.org'")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise FieldError("ssl_certfile", "is missing: name the certificate that ssl_keyfile is the key of")
        # A name has no colon, and an address of IPv6 at least two: one alone separates a port, as brackets do.
        alone = not set(self.host) & set("/[]@ ") and self.host.count(":") != 1
        check(alone, "host", self.host, "an address or a name alone, for example '::1', with the port in 'port'")
        check(0 <= self.port < 65536, "port", self.port, "between 0 and 65535")
        check_positive(self, "max_connections", "max_connections_per_address", "header_timeout")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host.lower() == "localhost":
            return True
        try:  # the system's reader of numbers knows all their spellings, such as 127.1
            found = socket.getaddrinfo(self.host, None, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            return False
        return is_loopback(str(found[0][4][0]))

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    def check_certificate(self) -> None:
        """Raise FieldError unless uvicorn will be able to use certificate and key."""
        if self.ssl_certfile is None:
            return
        try:
            # Given no password, OpenSSL would ask for that of an encrypted key on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except OSError as error:
            key = "the key in it" if self.ssl_keyfile is None else f"key {str(self.ssl_keyfile)!r}"
            problem = f"is {str(self.ssl_certfile)!r}, which cannot be used with {key}: {error.strerror}"
            raise FieldError("ssl_certfile", f"{problem}; both have to be PEM, the key without a password") from None

    def allow_open_files(self) -> None:
        """Raise the soft limit on open files to the connections' need. Raises FieldError if the hard limit is below."""
        needed = self.max_connections + OTHER_FILES
        if (allowed := allow_open_files(needed)) < needed:
            most = allowed - OTHER_FILES
            remedy = f"set it to at most {most}" if most > 0 else "there is room for no connection"
            problem = f"is {self.max_connections}, for which the server needs {needed} open files; the system allows"
            raise FieldError("max_connections", f"{problem} {allowed} (ulimit -n): raise that limit, or {remedy}")

    def bind(self) -> socket.socket:
        """Bind the port without listening yet. Raises FieldError if it cannot be bound."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # The protocol is named: asyncio switches off Nagle's delay only for sockets that say that they are TCP.
            bound = socket.socket(family, kind, protocol)
            # A restart may take the port while connections of the previous run are in TIME_WAIT.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except (socket.gaierror, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or NO_HOST
            raise FieldError("host", f"is {self.host!r}, which cannot be resolved: {reason}") from None
        except OSError as error:
            problem = f"is {self.port}, which cannot be had on {self.host}: {error.strerror}; choose another"
            raise FieldError("port", problem) from None
        return bound
