"""The errors between this host and the hub, each in one line that names what was typed and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.core import ConfigError, PenstockError
from penstock.files import said
from penstock.library.names import hint

ELSEWHERE: Final = "or download it elsewhere and give the path of its folder or file"


class Unreachable(PenstockError):
    """Nobody who has the model that was ``typed`` answers."""

    def __init__(self, message: str, typed: str = "") -> None:
        super().__init__(message)
        self.typed = typed


@contextmanager
def one_line(typed: str) -> Iterator[None]:
    """Raise errors of the hub's client, the network and the disk as one line about the model that was ``typed``."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except PenstockError:
        raise
    except OfflineModeIsEnabled as error:
        words = f"model: {typed!r} is not on this host, and HF_HUB_OFFLINE is set: unset it{hint(typed)}"
        raise Unreachable(words, typed) from error
    except HFValidationError as error:
        raise ConfigError(
            f"model: {typed!r} is neither a place on this host nor a valid hub id: {said(error)}"
        ) from error
    except HfHubHTTPError as error:
        raise answered(typed, error) from error
    except (HTTPError, ConnectionError) as error:
        raise Unreachable(
            f"model: {typed!r} is not on this host, and its server does not answer ({said(error)}): check the network "
            f"and HF_ENDPOINT, {ELSEWHERE}{hint(typed)}",
            typed,
        ) from error
    except OSError as error:
        raise of_disk(typed, error) from error


def answered(typed: str, error: Any) -> PenstockError:
    """The error for an answer that refuses."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    if isinstance(error, GatedRepoError):
        return ConfigError(
            f"model: {typed!r} is gated: accept its licence on its page, then `hf auth login` or set HF_TOKEN"
        )
    if status == 404 and "://" in typed:
        return ConfigError(f"model: there is nothing at {typed!r} (status 404): check the address")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return ConfigError(
            f"model: the hub has no {typed!r}, or shows it to nobody without a token: check the name, and for a "
            f"private model `hf auth login`{hint(typed)}"
        )
    if status in (401, 403):
        return ConfigError(
            f"model: the hub refuses {typed!r} to this token (status {status}): `hf auth login` with one that may "
            "read it"
        )
    return Unreachable(
        f"model: {typed!r} is not on this host, and its server answers with status {status}: try again later, "
        f"{ELSEWHERE}",
        typed,
    )


def of_disk(typed: str, error: OSError) -> PenstockError:
    """The error for a file that cannot be written."""
    place = f" in {Path(str(error.filename)).parent}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return PenstockError(
            f"model: {typed!r} does not fit: the disk is full{place}; free some space, as with penstock rm, and pull "
            "it again: it goes on from there"
        )
    return PenstockError(
        f"model: {typed!r} cannot be kept{place}: {error.strerror or said(error)}; set HF_HOME, or XDG_CACHE_HOME for "
        "what is not the hub's, to a folder that can be written to"
    )
