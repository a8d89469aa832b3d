"""Certificates for links with TLS."""

from __future__ import annotations

from pathlib import Path

import trustme

from penstock.transport.addresses import LinkSecurity


def only_host(folder: Path) -> LinkSecurity:
    """The certificates of a cluster of one host, as files in the folder."""
    authority = trustme.CA()
    own = authority.issue_cert("a-host.example")
    paths = {name: folder / f"{name}.pem" for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(paths["authority"])
    own.cert_chain_pems[0].write_to_path(paths["certificate"])
    own.private_key_pem.write_to_path(paths["key"])
    return LinkSecurity(**{name: str(path) for name, path in paths.items()})
