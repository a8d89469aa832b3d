"""What a head (the engine's process) and the agents of other hosts say to each other, and the one codec of it.

A header carries the secret of a lease, like a stage's its session's. A head comes to an agent's door with a lease of
its own making. The agent dials back, and from then on both name that lease in all they say. A lease is never used
again: whoever speaks of one that has ended is refused.

Every field has bounds, which are checked when a message is decoded. A message under a lease that does not keep to them
ends that lease with a reason, and nobody else's.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from penstock.hosts.facts import HostFacts
from penstock.hosts.weights.hub import HubSource
from penstock.hosts.weights.manifest import Digest, FileName, FilePart, Layers, check_parts
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
)
from penstock.pipeline.plan import StageSpec

DEFAULT_PORT: Final = 7700
DOOR: Final = "penstock agent"
"""The session in whose name a head connects. It is no secret: certificates keep strangers out, or the network does."""
HEAD_DOOR: Final = "penstock head"
"""The session in whose name a worker comes to a head. It is as little of a secret."""
BEAT: Final = 0.75
"""Seconds between two beats of a head."""
LEASE: Final = 3 * BEAT
"""Seconds of listening without a word after which a head is gone for an agent, and a host for a head."""
MOST_HEADER: Final = 4 << 20
MOST_FRAME: Final = 64 << 20
"""Bytes of a message's frames: digests of half a terabyte of weights fit."""


class Attach(msgspec.Struct, tag="attach", kw_only=True, frozen=True):
    """From a head at the door: answer to ``head``, its inbox. ``host`` is the agent's own address, as the head has it.

    What comes under this lease is obeyed for as long as beats come.
    """

    head: Address
    host: Numeric


class Join(msgspec.Struct, tag="join", kw_only=True, frozen=True):
    """From a worker at a head's door: attach to ``host``, HOST:PORT, where it listens."""

    host: HostPort


class Attached(msgspec.Struct, tag="attached", kw_only=True, frozen=True):
    facts: HostFacts


class Beat(msgspec.Struct, tag="beat", kw_only=True, frozen=True):
    """``sent``: by the head's monotonic clock, in seconds."""

    sent: Moment


class BeatAnswer(msgspec.Struct, tag="beat_answer", kw_only=True, frozen=True):
    """``sent`` is the beat's own; the others are by the agent's monotonic clock, in seconds."""

    sent: Moment
    received: Moment
    answered: Moment


class FindCheckpoint(msgspec.Struct, tag="find_checkpoint", kw_only=True, frozen=True):
    """Does the host hold what stages of these ``layers`` read of the checkpoint that the head has at ``path``?

    ``files`` are all of the checkpoint's, ``digest`` is theirs together. The second frame has the digests of the pieces
    of each file of which something is needed, one after the other. What the host lacks comes from the ``hub``, or from
    the head. ``number`` tells this question from every other one under the lease: answers and pieces bear it.
    """

    number: Index
    path: FilePath
    digest: Digest
    is_folder: bool
    layers: Annotated[list[Layers], msgspec.Meta(max_length=4096)]
    files: Annotated[list[FilePart], msgspec.Meta(max_length=4096)]
    hub: HubSource | None = None


class CheckpointFound(msgspec.Struct, tag="checkpoint_found", kw_only=True, frozen=True):
    """Whether a question's checkpoint is there and every byte of it was checked: ``problem`` says why not."""

    number: Index
    problem: Words = ""


class Progress(msgspec.Struct, tag="progress", kw_only=True, frozen=True):
    """How many bytes are held and checked of those that are needed; ``fetched``: others have to be sent."""

    number: Index
    held: Word
    fetched: bool = False


class WantPiece(msgspec.Struct, tag="want_piece", kw_only=True, frozen=True):
    """Piece number ``piece`` of a file."""

    number: Index
    file: FileName
    piece: Index


class Piece(msgspec.Struct, tag="piece", kw_only=True, frozen=True):
    """What was wanted: the bytes are the message's second frame."""

    number: Index
    file: FileName
    piece: Index


class StartStage(msgspec.Struct, tag="start_stage", kw_only=True, frozen=True):
    spec: StageSpec


class KillStage(msgspec.Struct, tag="kill_stage", kw_only=True, frozen=True):
    process: Label


class StageEnded(msgspec.Struct, tag="stage_ended", kw_only=True, frozen=True):
    process: Label
    cause: Words


class StartProbe(msgspec.Struct, tag="start_probe", kw_only=True, frozen=True):
    """Start a process that measures this host and its links (``doctor/probe.py``), for as long as the lease lasts.

    ``name`` is what the head calls it; it answers to ``head``, an inbox, in the name of ``session``.
    """

    name: Label
    session: Label
    head: Address


class Detach(msgspec.Struct, tag="detach", kw_only=True, frozen=True):
    """The head leaves: end all that was started under its lease."""


class LeaseEnded(msgspec.Struct, tag="lease_ended", kw_only=True, frozen=True):
    """From an agent: it has ended the lease, with all that was started under it."""

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
    return _encoder.encode((lease, message))


def lease_of(frames: Sequence[Frame]) -> tuple[str, msgspec.Raw]:
    """The lease that a message names, and the message undecoded. Raises ForeignFrame for what is none."""
    if not frames or len(frames[0]) > MOST_HEADER:
        raise ForeignFrame("header missing or too large")
    try:
        return _envelope.decode(frames[0])
    except UNDECODABLE as error:
        raise ForeignFrame(f"header does not decode: {error}") from error


def decode(raw: msgspec.Raw, contents: Sequence[Frame] = ()) -> Message:
    """A message whose fields keep to their bounds. ``contents`` are the frames behind its header.

    Raises MalformedMessage.
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
    """Whether two secrets are the same, found out in the same time wherever they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
