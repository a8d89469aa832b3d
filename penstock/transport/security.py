"""Mutual TLS between hosts: the certificate that a process shows, and the authority it trusts."""

from __future__ import annotations

import ssl

import msgspec

from penstock.core import ConfigError
from penstock.messages import FilePath


class LinkSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files: the cluster's authority, and this host's certificate and key, signed by that authority.

    Both ends of a connection show a certificate. It proves that its owner is a member of the cluster, not which one:
    every member may do the same. Only TLS 1.3 is spoken.
    """

    authority: FilePath
    certificate: FilePath
    key: FilePath

    def for_listening(self) -> ssl.SSLContext:
        """A server's context.

        Raises ConfigError, like ``for_connecting``, for a file that is missing or not as it should be.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # A ticket would lie unread at the sender's end, and its closing would then break the connection off.
        context.num_tickets = 0
        return context

    def for_connecting(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts' addresses change, and membership is all that counts
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.authority)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"link security: authority {self.authority}: {reason_of(error)}") from error
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"link security: certificate {self.certificate} with key {self.key}: {reason_of(error)}"
            ) from error
        return context


def reason_of(error: Exception) -> str:
    """The reason for an error in the words of OpenSSL or the system."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
