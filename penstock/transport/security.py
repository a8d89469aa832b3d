"""Mutual TLS between hosts: what a process shows the others, and whom it believes."""

from __future__ import annotations

import ssl

import msgspec

from penstock.core import ConfigError
from penstock.messages import FilePath


class LinkSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files: a cluster's authority, and this host's certificate and key, which that authority has signed.

    Both ends of a connection show a certificate. One of the cluster's hosts may do what any of them may: a certificate
    says that its owner is a member, not which one. Only TLS 1.3 is spoken.
    """

    authority: FilePath
    certificate: FilePath
    key: FilePath

    def for_listening(self) -> ssl.SSLContext:
        """Raises ConfigError, as ``for_connecting`` does, where a file is missing or is not what it should be."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # A ticket would lie unread at the sender's end, and its closing would then break the connection off.
        context.num_tickets = 0
        return context

    def for_connecting(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses of hosts change, and each is a member
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.authority)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"link security: authority {self.authority}: {reason_of(error)}") from error
        try:
            context.load_cert_chain(self.certificate, self.key, password="")  # nobody is asked for one
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"link security: certificate {self.certificate} with key {self.key}: {reason_of(error)}"
            ) from error
        return context


def reason_of(error: Exception) -> str:
    """OpenSSL's or the system's words for what is wrong."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
