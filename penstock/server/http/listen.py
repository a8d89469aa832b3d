"""A server's address, names, certificate, and limits on connections."""

from __future__ import annotations

import ipaddress
import resource
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from penstock.config import FieldError, check, check_positive
from penstock.options import LIMITS, SERVER, Option

OTHER_FILES: Final = 128
"""Open files beside the connections: those for stages, workers, health checks and logs."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """An address and its limits. Raises FieldError naming the field."""

    host: Annotated[str, Option("Address to listen on; 0.0.0.0 is all of this machine's.", SERVER)] = "127.0.0.1"
    port: Annotated[int, Option("0 takes a free one.", SERVER)] = 8000
    root_path: Annotated[
        str, Option("What a proxy in front takes off every path.", SERVER, metavar="/PATH", default="none")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Further names, as in the Host header, to which it answers; '.example.org' is all below it, too, '*' any. "
            "May be repeated.",
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
        Path | None, Option("The certificate's key.", SERVER, metavar="FILE", default="in the same file")
    ] = None
    max_connections: Annotated[int, Option("Most connections at a time.", LIMITS)] = 512
    max_connections_per_address: Annotated[int, Option("Most of them from one address.", LIMITS)] = 384
    """More than run and wait by default, because a proxy in front counts as one address."""
    header_timeout: Annotated[float, Option("Most seconds for a request's head to arrive.", LIMITS)] = 10.0

    def __post_init__(self) -> None:
        root = self.root_path
        known = not root or (root.startswith("/") and not root.endswith("/") and root.isascii())
        check(known, "root_path", root, "empty, or begin with a slash and not end with one, for example '/llm'")
        for name in self.allowed_hosts:
            plain = bool(name) and name.isascii() and not set(name) & set("/:[]@ ")
            check(plain, "allowed_hosts", name, "'*', or a name without scheme and port, for example 'llm.example.org'")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise FieldError("ssl_certfile", "is missing: name the certificate that ssl_keyfile is the key of")
        check(0 <= self.port < 65536, "port", self.port, "between 0 and 65535")
        check_positive(self, "max_connections", "max_connections_per_address", "header_timeout")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

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
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return
        if hard != resource.RLIM_INFINITY and hard < needed:
            most = hard - OTHER_FILES
            remedy = f"set it to at most {most}" if most > 0 else "there is room for no connection"
            problem = f"is {self.max_connections}, for which the server needs {needed} open files; the system allows"
            raise FieldError("max_connections", f"{problem} {hard} (ulimit -n): raise that limit, or {remedy}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

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
        except socket.gaierror as error:
            raise FieldError("host", f"is {self.host!r}, which cannot be resolved: {error.strerror}") from None
        except OSError as error:
            problem = f"is {self.port}, which cannot be had on {self.host}: {error.strerror}; choose another"
            raise FieldError("port", problem) from None
        return bound
