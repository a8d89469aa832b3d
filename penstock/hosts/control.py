"""What a head (the engine's process) and the agents of other hosts say to each other, and the one codec of it.

A header carries the secret of a lease, like a stage's its session's. A head comes to an agent's door with a lease of
its own making. The agent dials back, and from then on both name that lease in all they say. A lease is never used
again: whoever speaks of one that has ended is refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from penstock.hosts.facts import HostFacts
from penstock.hosts.weights.hub import HubSource
from penstock.hosts.weights.ranges import FilePart, Layers
from penstock.messages import MAX_HEADER_BYTES, UNDECODABLE, ForeignFrame, Frame, MalformedMessage
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


class Attach(msgspec.Struct, tag="attach", kw_only=True, frozen=True):
    """From a head at the door: answer to ``head``, its inbox. ``host`` is the agent's own address, as the head has it.

    What comes under this lease is obeyed for as long as beats come.
    """

    head: str
    host: str


class Join(msgspec.Struct, tag="join", kw_only=True, frozen=True):
    """From a worker at a head's door: attach to ``host``, HOST:PORT, where it listens."""

    host: str


class Attached(msgspec.Struct, tag="attached", kw_only=True, frozen=True):
    facts: HostFacts


class Beat(msgspec.Struct, tag="beat", kw_only=True, frozen=True):
    """``sent``: by the head's monotonic clock, in seconds."""

    sent: float


class BeatAnswer(msgspec.Struct, tag="beat_answer", kw_only=True, frozen=True):
    """``sent`` is the beat's own; the others are by the agent's monotonic clock, in seconds."""

    sent: float
    received: float
    answered: float


class FindCheckpoint(msgspec.Struct, tag="find_checkpoint", kw_only=True, frozen=True):
    """Is the checkpoint of this digest there, which the head has at ``path``, a folder or a file?

    If it is not, ``files`` is what stages of these ``layers`` need of it. The ``hub`` may have it, and the head sends
    what is wanted.
    """

    path: str
    digest: str
    is_folder: bool
    layers: list[Layers]
    files: list[FilePart]
    hub: HubSource | None = None


class CheckpointFound(msgspec.Struct, tag="checkpoint_found", kw_only=True, frozen=True):
    """``problem`` says why stages cannot load it; empty if they can. While it is ``fetched``, neither is known."""

    path: str
    problem: str = ""
    fetched: bool = False


class Fetched(msgspec.Struct, tag="fetched", kw_only=True, frozen=True):
    """How many bytes are there of those that the host needs of the checkpoint that the head has at ``path``."""

    path: str
    held: int
    needed: int


class WantPiece(msgspec.Struct, tag="want_piece", kw_only=True, frozen=True):
    """Some bytes of a file of the checkpoint that the head has at ``path``."""

    path: str
    file: str
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: int


class Piece(msgspec.Struct, tag="piece", kw_only=True, frozen=True):
    """What was wanted: the bytes are the message's second frame."""

    path: str
    file: str
    start: int
    end: int


class StartStage(msgspec.Struct, tag="start_stage", kw_only=True, frozen=True):
    spec: StageSpec


class KillStage(msgspec.Struct, tag="kill_stage", kw_only=True, frozen=True):
    process: str


class StageEnded(msgspec.Struct, tag="stage_ended", kw_only=True, frozen=True):
    process: str
    cause: str


class StartProbe(msgspec.Struct, tag="start_probe", kw_only=True, frozen=True):
    """Start a process that measures this host and its links (``doctor/probe.py``), for as long as the lease lasts.

    ``name`` is what the head calls it; it answers to ``head``, an inbox, in the name of ``session``.
    """

    name: str
    session: str
    head: str


class Detach(msgspec.Struct, tag="detach", kw_only=True, frozen=True):
    """The head leaves: end all that was started under its lease."""


Message = (
    Attach
    | Join
    | Attached
    | Beat
    | BeatAnswer
    | FindCheckpoint
    | CheckpointFound
    | Fetched
    | WantPiece
    | Piece
    | StartStage
    | KillStage
    | StageEnded
    | StartProbe
    | Detach
)

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: msgspec.Struct, lease: str) -> bytes:
    return _encoder.encode((lease, message))


def lease_of(frames: Sequence[Frame]) -> tuple[str, msgspec.Raw]:
    """The lease that a message names, and the message undecoded. Raises ForeignFrame for what is none."""
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise ForeignFrame("header missing or too large")
    try:
        return _envelope.decode(frames[0])
    except UNDECODABLE as error:
        raise ForeignFrame(f"header does not decode: {error}") from error


def decode(raw: msgspec.Raw) -> Message:
    """Raises MalformedMessage."""
    try:
        message: Message = _decoder.decode(raw)
    except UNDECODABLE as error:
        raise MalformedMessage(f"message does not decode: {error}") from error
    return message


def same(one: str, other: str) -> bool:
    """Whether two secrets are the same, found out in the same time wherever they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
