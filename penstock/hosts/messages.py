"""The messages between a head and the agents of other hosts, and the log of those that are refused."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from penstock.hosts.facts import HostFacts
from penstock.hosts.weights import Digest, FileName, FilePart, HubSource, Layers, check_parts
from penstock.messages import (
    UNDECODABLE,
    Address,
    FilePath,
    ForeignFrame,
    Frame,
    HostPort,
    Index,
    Label,
    MalformedMessage,
    Moment,
    Numeric,
    Word,
    Words,
    cut,
)
from penstock.pipeline.base import StageSpec

# -------------------------------------------------------------------------------------------------------------- control
# The messages between a head (the engine's process) and the agents of other hosts, and their codec.
#
# A header carries the secret of a lease, as a stage's header carries its session's. A head comes to an agent's door
# with a lease of its own making. The agent dials back, and from then on both name that lease in every message. A lease
# is never used again: messages under one that has ended are refused.
#
# Every field has bounds, which are checked when a message is decoded. A message outside of them ends its own lease,
# with a reason, and no other.

DEFAULT_PORT: Final = 7700
"""The TCP port on which ``penstock worker`` listens. Any port above 1023 would do: these need no right of root's."""
DOOR: Final = "penstock agent"
"""The session under which a head connects. It is no secret: certificates, or a private network, keep strangers out."""
HEAD_DOOR: Final = "penstock head"
"""The session under which a worker connects to a head. It is no secret either."""
BEAT: Final = 0.75
"""Seconds between two beats of a head. Shorter ones wake every host more often; longer ones leave requests on a lost
host for longer."""
LEASE: Final = 3 * BEAT
"""Seconds of listening without a message after which an agent gives up a head, and a head gives up a host. A busy host
may delay one or two beats."""
MOST_HEADER: Final = 4 << 20
"""Most bytes of a message's header, its first frame. The 4,096 files that a question may list take up to 1,000 bytes
each."""
MOST_FRAME: Final = 64 << 20
"""Most bytes of a message's frames: the digests of half a terabyte of weights fit."""


class Attach(msgspec.Struct, tag="attach", kw_only=True, frozen=True):
    """From a head at an agent's door: the agent shall serve it, and answer to ``head``, its inbox.

    ``host`` is the agent's own address, as the head has it.

    Messages under this lease are obeyed for as long as beats come.
    """

    head: Address
    host: Numeric


class Join(msgspec.Struct, tag="join", kw_only=True, frozen=True):
    """From a worker at a head's door: the head shall attach to ``host``, HOST:PORT, where the worker listens."""

    host: HostPort


class Attached(msgspec.Struct, tag="attached", kw_only=True, frozen=True):
    """From an agent: it serves the head from now on; ``facts`` are those of its host."""

    facts: HostFacts


class Beat(msgspec.Struct, tag="beat", kw_only=True, frozen=True):
    """A head's sign of life. ``sent``: by the head's monotonic clock, in seconds."""

    sent: Moment


class BeatAnswer(msgspec.Struct, tag="beat_answer", kw_only=True, frozen=True):
    """The answer to a beat, with its ``sent``; the other moments are by the agent's monotonic clock, in seconds."""

    sent: Moment
    received: Moment
    answered: Moment


class FindCheckpoint(msgspec.Struct, tag="find_checkpoint", kw_only=True, frozen=True):
    """Asks whether a host holds what stages of ``layers`` read of the checkpoint that the head has at ``path``.

    ``files`` are all files of the checkpoint, ``digest`` is its digest. The second frame has the digests of the pieces
    of each file that is needed in part or whole, one after the other. The host fetches what it lacks from the ``hub``,
    or from the head. ``number`` tells this question from every other one under the lease: answers and pieces bear it.
    """

    number: Index
    path: FilePath
    digest: Digest
    is_folder: bool
    layers: Annotated[list[Layers], msgspec.Meta(max_length=4096)]
    files: Annotated[list[FilePart], msgspec.Meta(max_length=4096)]
    hub: HubSource | None = None


class CheckpointFound(msgspec.Struct, tag="checkpoint_found", kw_only=True, frozen=True):
    """The checkpoint of a question is there, and every byte was checked; else ``problem`` says why not."""

    number: Index
    problem: Words = ""


class Progress(msgspec.Struct, tag="progress", kw_only=True, frozen=True):
    """Bytes of the needed ones that the host holds and has checked; ``fetched``: whether it is sent the others."""

    number: Index
    held: Word
    fetched: bool = False


class WantPiece(msgspec.Struct, tag="want_piece", kw_only=True, frozen=True):
    """A host's request for piece number ``piece`` of a file."""

    number: Index
    file: FileName
    piece: Index


class Piece(msgspec.Struct, tag="piece", kw_only=True, frozen=True):
    """The answer to ``WantPiece``: the bytes are the message's second frame."""

    number: Index
    file: FileName
    piece: Index


class StartStage(msgspec.Struct, tag="start_stage", kw_only=True, frozen=True):
    """Start a stage by its ``spec``, into which the host puts its own paths, address and keys."""

    spec: StageSpec


class KillStage(msgspec.Struct, tag="kill_stage", kw_only=True, frozen=True):
    """Kill the process of that name."""

    process: Label


class StageEnded(msgspec.Struct, tag="stage_ended", kw_only=True, frozen=True):
    """A stage's process has ended, or was not started, for this ``cause``."""

    process: Label
    cause: Words


class StartProbe(msgspec.Struct, tag="start_probe", kw_only=True, frozen=True):
    """Start a process that measures this host and its links (``hosts/probe.py``), for as long as the lease lasts.

    ``name`` is the head's name for it. It answers to ``head``, an inbox, under ``session``.
    """

    name: Label
    session: Label
    head: Address


class Detach(msgspec.Struct, tag="detach", kw_only=True, frozen=True):
    """The head leaves: end all processes that were started under its lease."""


class LeaseEnded(msgspec.Struct, tag="lease_ended", kw_only=True, frozen=True):
    """From an agent: it has ended the lease, with all processes that were started under it."""

    cause: Words


Message = (
    Attach
    | Join
    | Attached
    | Beat
    | BeatAnswer
    | FindCheckpoint
    | CheckpointFound
    | Progress
    | WantPiece
    | Piece
    | StartStage
    | KillStage
    | StageEnded
    | StartProbe
    | Detach
    | LeaseEnded
)
WITH_CONTENT: Final = (FindCheckpoint, Piece)
"""The messages that have a second frame."""

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[Label, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: msgspec.Struct, lease: str) -> bytes:
    """A message's first frame: the lease's secret and the message, in msgpack."""
    return _encoder.encode((lease, message))


def lease_of(frames: Sequence[Frame]) -> tuple[str, msgspec.Raw]:
    """The lease that a message names, and the message undecoded. Raises ForeignFrame for frames that are no message."""
    if not frames or len(frames[0]) > MOST_HEADER:
        raise ForeignFrame("header missing or too large")
    try:
        # The message stays undecoded until its lease is known: errors in it then end that lease alone.
        return _envelope.decode(frames[0])
    except UNDECODABLE as error:
        raise ForeignFrame(f"header does not decode: {error}") from error


def decode(raw: msgspec.Raw, contents: Sequence[Frame] = ()) -> Message:
    """Decode a message. ``contents`` are the frames behind its header.

    Raises MalformedMessage, also for a field outside of its bounds.
    """
    try:
        message: Message = _decoder.decode(raw)
    except UNDECODABLE as error:
        raise MalformedMessage(f"message does not decode: {error}") from error
    if len(contents) != isinstance(message, WITH_CONTENT):
        raise MalformedMessage(f"{type(message).__name__} comes with {len(contents)} frames behind its header")
    if isinstance(message, FindCheckpoint):
        check_parts(message.digest, message.files, message.is_folder, contents[0])
    return message


def same(one: str, other: str) -> bool:
    """Whether two secrets are equal; the comparison takes the same time wherever they differ, and so leaks nothing."""
    return hmac.compare_digest(one.encode(), other.encode())


# ------------------------------------------------------------------------------------------------------------- refusals
# Logs messages that are refused, without letting their senders flood the log.

log = logging.getLogger(__name__)

AT_ONCE: Final = 10
"""Lines that may follow at once; after them one a second is logged, however much is sent. So many show a fault with
what follows from it."""
MOST_SAID: Final = 300
"""Most characters of a logged line. That is about four lines of a terminal."""


class Refusals:
    """Logs why a message was refused, and how many more were since the line before."""

    def __init__(self) -> None:
        self._lines = float(AT_ONCE)
        """Lines that may be logged now; it grows by one a second, up to ``AT_ONCE``."""
        self._since = time.monotonic()
        self._unsaid = 0

    def note(self, why: str) -> None:
        """Log why a message was refused, or only count it if too many lines have been logged lately."""
        now = time.monotonic()
        self._lines = min(AT_ONCE, self._lines + now - self._since)
        self._since = now
        if self._lines < 1:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more since the line before)" if self._unsaid else ""
        log.warning("refused a message: %s%s", cut(why, MOST_SAID), more)
        self._lines -= 1
        self._unsaid = 0
