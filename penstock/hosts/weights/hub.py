"""Reads ranges of a checkpoint's files from the hub, on a host that reaches it, so that the head need not send them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import httpx
import msgspec

SNAPSHOT: Final = re.compile(r"models--(?P<repo>[\w.-]+(?:--[\w.-]+)?)/snapshots/(?P<revision>[0-9a-f]{40})")
"""The name that the hub's cache gives the folder of a repository at a commit."""
ANSWER_S: Final = 2.0
"""Seconds without a byte after which the head is asked instead: a hub this slow is no help."""


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of the hub's at a commit, which never changes."""

    repo: Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[\w.-]+(?:/[\w.-]+)?\Z")]
    revision: Annotated[str, msgspec.Meta(max_length=40, pattern=r"\A[0-9a-f]{40}\Z")]


def hub_source(checkpoint: Path) -> HubSource | None:
    """The repository and commit of a checkpoint's folder in the hub's cache; None for any other folder."""
    found = SNAPSHOT.fullmatch("/".join(checkpoint.parts[-3:]))
    return HubSource(repo=found["repo"].replace("--", "/"), revision=found["revision"]) if found else None


class Hub:
    """Reads from the hub that this host's environment names, with this host's token. Raises httpx.HTTPError."""

    def __init__(self, source: HubSource) -> None:
        from huggingface_hub.utils import build_hf_headers

        self._source = source
        self._client = httpx.Client(headers=build_hf_headers(), timeout=ANSWER_S, follow_redirects=True)

    def read(self, file: str, start: int, end: int, stopped: Callable[[], bool]) -> bytearray:
        """The bytes of a file from ``start`` to ``end``; fewer if ``stopped`` says so, or if the file ends before."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._source.repo, file, revision=self._source.revision)
        came = bytearray()
        with self._client.stream("GET", url, headers={"Range": f"bytes={start}-{end - 1}"}) as answer:
            if answer.raise_for_status().status_code != httpx.codes.PARTIAL_CONTENT:
                raise httpx.RequestError("the hub does not send ranges")
            for part in answer.iter_bytes():
                came += part
                if stopped() or len(came) > end - start:
                    break
        return came

    def close(self) -> None:
        self._client.close()


def is_offline() -> bool:
    """Whether this host's environment says that the hub is not to be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
