"""Every message between engine, stages and drafters, and their one codec.

A message on the wire is one msgpack header and, for a batch between stages and for features, one raw tensor frame: the
hidden states of the surviving rows. Nothing is pickled. Every header carries its session's secret; a header without it
comes from a stranger and is refused. A message of the session that does not decode, contradicts itself or whose tensor
does not have the announced size is malformed, and ends the session's pipeline.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from penstock.core import MOST_RANKS, PenstockError
from penstock.files import DTYPE_BYTES

PROTOCOL: Final = 1
"""Version of the messages between stages, hosts and the engine. A message of another version is refused."""
MAX_HEADER_BYTES: Final = 16 << 20
"""Upper limit of a message's header, its first frame, in bytes; a batch's takes about 20 for each row. It only bounds
what is decoded: 800,000 rows would fit."""
Frame = bytes | bytearray
"""The bytes of one frame, as they were read from the socket."""
NO_SLOT: Final = -1
"""The parent slot of a request's very first row."""


Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""The number of a request, node, stream or sample, or a seed."""
MOST: Final = 2**31
"""Every slot, position, token id and count is below this number. msgpack takes up to five bytes for it."""
Index = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
"""A slot, position, token id or count. Which of them exist, a stage's own capacity and vocabulary say."""
Parent = Annotated[int, msgspec.Meta(ge=NO_SLOT, lt=MOST)]
"""The slot of a row's parent, or NO_SLOT."""
SeedWord = Annotated[int, msgspec.Meta(ge=0)]
"""A seed up to 2**64 - 1, the largest number that msgpack holds; msgspec takes no bound above 2**63 - 1."""
LARGEST: Final = sys.float_info.max
"""The largest finite float64. A bound of it refuses infinity, and msgspec's bounds refuse NaN."""
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
"""A float that is neither infinite nor NaN."""
Moment = Annotated[float, msgspec.Meta(ge=0.0, le=1e10)]
"""Time of a monotonic clock, in seconds; the bound is about 300 years after the host's start."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST)]
"""A duration in seconds."""
Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Logarithm = Annotated[float, msgspec.Meta(le=0.0)]
"""Natural logarithm of a probability; -inf for probability 0."""
AnyStage = Annotated[int, msgspec.Meta(ge=-1, lt=MOST)]
"""The number of a stage; -1 for none in particular."""
IPV4: Final = r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)"
IPV6: Final = r"\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,32})?\]"
Numeric = Annotated[str, msgspec.Meta(max_length=96, pattern=rf"\A(?:{IPV4}|{IPV6})\Z")]
"""A host's numeric address. A name would have to be looked up, and its sender could make the lookup slow."""
HostPort = Annotated[str, msgspec.Meta(max_length=128, pattern=rf"\A(?:{IPV4}|{IPV6}):\d{{1,5}}\Z")]
"""A host's numeric address and a port."""
Address = Annotated[
    str, msgspec.Meta(max_length=256, pattern=rf"\A(?:ipc://[^\x00]{{1,200}}|tcp://(?:{IPV4}|{IPV6}):\d{{1,5}})\Z")
]
"""The address on which an inbox listens."""
MOST_WORDS: Final = 4096
"""Upper limit of a text for people, like a reason, in characters. It is about a screen of text."""
Words = Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
"""Text for people. The sender cuts it to length with ``cut``."""
MOST_DETAILS: Final = 16 * MOST_WORDS
"""Upper limit of a traceback, in characters. Tracebacks have thousands."""
Details = Annotated[str, msgspec.Meta(max_length=MOST_DETAILS)]
"""A traceback, of which only the end is sent if it is too long."""
MOST_LABEL: Final = 256
"""Upper limit of a name, in characters. Linux's names of files have up to 255 bytes."""
Label = Annotated[str, msgspec.Meta(max_length=MOST_LABEL, pattern=r"\A[^\x00-\x1f]*\Z")]
"""The name of a process, a device or a dtype."""
FilePath = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"\A[^\x00]*\Z")]
GrammarText = Annotated[str, msgspec.Meta(max_length=1 << 22)]
"""A grammar in llguidance's format, at most 4 Mi characters."""
MOST_ROWS: Final = 1 << 20
"""Upper limit of a batch's rows, which are hundreds, and of the entries of any list that has one per row."""
Many = msgspec.Meta(max_length=MOST_ROWS)
Numbers = Annotated[list[Word], Many]
Indices = Annotated[list[Index], Many]
MOST_LAYERS: Final = 1 << 14
"""Upper limit of a pipeline's layers, and so of its stages; models have up to 128. It bounds lists that are decoded
from messages."""
LayerNumbers = Annotated[list[Index], msgspec.Meta(max_length=MOST_LAYERS)]


def cut(text: str, most: int = MOST_WORDS) -> str:
    """The text, cut to ``most`` characters, by default those of ``Words``; "..." marks the cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class ForeignFrame(PenstockError):
    """A frame that does not carry the session's secret, or speaks another protocol version."""


class MalformedMessage(PenstockError):
    """A message of the session that does not decode, contradicts itself or disagrees with its header."""


class MalformedBatch(MalformedMessage):
    """A batch that decodes, but contradicts itself or disagrees with its tensor frame or its stage's layers."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """The parameters with which the last stage (and a drafter) picks a request's tokens, as in SamplingParams.

    ``seed`` and ``sample`` key the request's Gumbel noise; ``logprobs`` -1 means none.
    ``barred`` token ids cannot be picked while the picked token would stand before position ``barred_before``
    (EOS and stop tokens under min_tokens). ``allowed_token_ids``, where there are any, are the only ones that can.
    ``grammar`` is the output's grammar in llguidance's format, "" for none. The output begins at position
    ``prompt_length``, also where the request was interrupted and went on with part of its output as its prompt.
    """

    seed: SeedWord = 0
    sample: SeedWord = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Index = 0
    min_p: Probability = 0.0
    logprobs: Annotated[int, msgspec.Meta(ge=-1, lt=MOST)] = -1
    barred: Annotated[tuple[Index, ...], Many] = ()
    barred_before: Index = 0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=LARGEST)] = 1.0
    logit_bias: Annotated[tuple[tuple[Index, Finite], ...], Many] = ()
    allowed_token_ids: Annotated[tuple[Index, ...], Many] = ()
    grammar: GrammarText = ""
    prompt_length: Index = 0


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A request whose rows appear from this batch on."""

    request: Word
    sampling: Sampling


class CommittedSlots(msgspec.Struct, frozen=True, array_like=True):
    """Slots of one request that have been committed since the last batch, in position order, no position left out."""

    request: Word
    slots: Indices


class Rows(msgspec.Struct, array_like=True):
    """The rows of a batch, column by column; all six lists have one entry per row."""

    requests: Numbers = []
    nodes: Numbers = []
    slots: Indices = []
    parents: Annotated[list[Parent], Many] = []
    positions: Indices = []
    tokens: Indices = []

    def __len__(self) -> int:
        return len(self.nodes)

    def append(self, request: int, node: int, slot: int, parent: int, position: int, token: int) -> None:
        """Add one row. ``parent`` is the slot of the row's parent, or NO_SLOT."""
        self.requests.append(request)
        self.nodes.append(node)
        self.slots.append(slot)
        self.parents.append(parent)
        self.positions.append(position)
        self.tokens.append(token)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A stage's work on a batch, which computed ``rows`` rows. Moments are seconds of its host's monotonic clock.

    The batch arrived at ``received`` and was computed from ``start`` to ``end``. ``computed`` is the part of
    ``end - start`` that was real computation, ``modelled`` the emulated device's time for the batch, both in seconds
    (``modelled`` is 0 where nothing is emulated). ``features`` is the moment a link delivered the batch's features to
    the drafter (0 where no link is modelled): those that this stage sent, or, in the drafter itself, the last that the
    batch needed; None where there were none.
    """

    stage: Index
    received: Moment
    start: Moment
    end: Moment
    computed: Moment
    modelled: Moment
    rows: Index
    features: Moment | None = None

    @property
    def overrun(self) -> bool | None:
        """Whether computing took longer than the modelled time; None on a real device and for a batch without rows."""
        return self.computed > self.modelled if self.modelled > 0 and self.rows else None

    def shifted(self, seconds: float) -> Span:
        """The span moved by ``seconds``. A moment of 0 means none, and stays."""
        return msgspec.structs.replace(
            self,
            received=self.received + seconds,
            start=self.start + seconds,
            end=self.end + seconds,
            features=self.features + seconds if self.features else self.features,
        )


SHORT_NAMES: Final = {"committed": "certain", "feature_nodes": "joins", "feature_levels": "levels"}
"""Wire names of a batch's longer fields. They are short because every header carries them."""


Spans = Annotated[list[Span], msgspec.Meta(max_length=MOST_LAYERS)]
"""The spans of a batch, one from each stage."""


BATCH: Final = "batch"
"""The tag of a ``Batch`` on the wire."""
PATH, CONTEXT, KEPT = 0, 1, 2
"""The values of ``feature_levels`` for a block drafter. PATH: a token of the tree, of which the target's states are not
known. CONTEXT: a committed token, which joins the context by its states. KEPT: a token that is answered from the block
that was computed for a node above it."""


class Batch(msgspec.Struct, tag=BATCH, kw_only=True, rename=SHORT_NAMES):
    """The rows that enter the first stage together, on their way through the stages in stream order.

    Before it computes the rows a stage takes in ``closed`` (numbers of requests that have ended), ``opened`` (requests
    with their first rows) and ``committed``. ``alive`` are the indices of the rows that no stage so far has dropped, in
    ascending order. The tensor frame behind the first stage is [len(alive), ``width``] in ``dtype``.

    ``wanted`` are the indices of the rows whose next token the last stage is to pick. ``candidates`` above 0 makes it a
    drafter's batch: each of these rows is answered by that many noise-ranked candidates instead, and by those of
    ``ahead`` further levels below. ``feature_nodes`` are the nodes whose features a learned drafter must have before it
    computes the rows, one entry per row, 0 if it needs none; empty where no features are read. ``feature_levels`` say
    how deep in the target the features are to be, one entry per row, as the drafter counts levels; empty where it reads
    the same for every row. ``spans`` has the work of the stages so far, in their order.
    """

    stream: Word
    opened: Annotated[list[Opened], Many] = []
    committed: Annotated[list[CommittedSlots], Many] = []
    closed: Numbers = []
    rows: Rows
    wanted: Indices = []
    candidates: Index = 0
    ahead: Index = 0
    feature_nodes: Numbers = []
    feature_levels: Indices = []
    alive: Indices = []
    dtype: Label = ""
    width: Index = 0
    spans: Spans = []


class Features(msgspec.Struct, tag="features", kw_only=True):
    """Hidden states of a batch's surviving rows, on their way from a target's stage straight to the drafter.

    ``layers`` are numbered as Hugging Face does: 0 is the embedding, k the output of layer k - 1, and the last one is
    final-normed. The tensor frame has one line per row: its states side by side, ``width`` values in all.
    """

    layers: LayerNumbers
    nodes: Numbers
    slots: Indices
    dtype: Label = ""
    width: Index = 0


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """The target's next token after one row. ``top`` holds (token, logprob) pairs when logprobs were asked for.

    A non-empty ``error`` says why there is no token: ``token`` is then meaningless, and the request ends with the error
    if the row becomes its last token.
    """

    node: Word
    token: Index
    logprob: Logarithm = 0.0
    rank: Index = 0
    top: Annotated[list[tuple[Index, Logarithm]], Many] = []
    error: Words = ""


class Candidates(msgspec.Struct, frozen=True, array_like=True):
    """A drafter's answer for one row: tokens best first, and the log of the chance that the target picks each.

    ``level`` is 0 for the tokens after the row, and k for those k tokens further on, whichever tokens stand between.
    """

    node: Word
    tokens: Indices
    scores: Annotated[list[Logarithm], Many]
    level: Index = 0


class Result(msgspec.Struct, tag="result", kw_only=True):
    """The last stage's output for one batch. Every batch has exactly one result, also when no row survived."""

    stream: Word
    picks: Annotated[list[SampledToken], Many] = []
    candidates: Annotated[list[Candidates], Many] = []
    spans: Spans = []


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    """Dead nodes, whose rows are to be dropped from batches below ``before``. It may come late, early or twice."""

    before: Word
    nodes: Numbers


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """A stage sends it upstream when the buffer in front of it is free again: the next batch may come."""

    stage: Index


class ReserveDevice(msgspec.Struct, tag="reserve_device", kw_only=True):
    """Asks the stage on a modelled device to set aside this many seconds of the device's time for a drafter's pass."""

    seconds: Seconds


class DeviceReserved(msgspec.Struct, tag="device_reserved", kw_only=True):
    """The answer to ReserveDevice: the modelled device runs the drafter's pass from ``start`` to ``end``, behind the
    work that it had already. Both are seconds of the stage's clock."""

    stage: Index
    start: Finite
    end: Finite


class PrepareGrammar(msgspec.Struct, tag="prepare_grammar", kw_only=True):
    """Asks the last stage to compile a request's grammar while batches run. It comes before the request's first row."""

    request: Word
    grammar: GrammarText


class GrammarPrepared(msgspec.Struct, tag="grammar_prepared", kw_only=True):
    """The last stage has compiled the request's grammar, or failed to; the picks of its rows then carry the error."""

    request: Word


class ForgetGrammar(msgspec.Struct, tag="forget_grammar", kw_only=True):
    """The last stage may drop the request's grammar, which no further row needs."""

    request: Word


class Loading(msgspec.Struct, tag="loading", kw_only=True):
    """A starting stage has read ``read`` of its ``total`` weights (counts of numbers)."""

    stage: Index
    read: Word
    total: Word


class RanksMeet(msgspec.Struct, tag="ranks_meet", kw_only=True):
    """The first rank of a stage on several hosts listens for the others at ``address``, and loads its share."""

    stage: Index
    address: Address


class RankBytes(msgspec.Struct, frozen=True, array_like=True):
    """The bytes that one rank of a stage holds: of weights, and of keys and values."""

    weights: Word
    kv: Word


class Started(msgspec.Struct, tag="started", kw_only=True):
    """A stage has loaded its layers, ``weight_bytes`` in all, and listens at ``address``. ``kv_bytes`` is the size of
    its KV arenas.

    ``exact`` says whether a row's bits depend on nothing but what it sees. ``ranks`` has each rank's part of these
    bytes, where several share the layers.
    """

    stage: Index
    address: Address
    kv_bytes: Word
    weight_bytes: Word
    exact: bool = False
    ranks: Annotated[list[RankBytes], msgspec.Meta(max_length=MOST_RANKS)] = []


class ConnectNeighbours(msgspec.Struct, tag="connect_neighbours", kw_only=True):
    """Gives a stage its neighbours' addresses. The engine is the neighbour of both the first and the last stage."""

    upstream: Address
    downstream: Address


class Rejoin(msgspec.Struct, tag="rejoin", kw_only=True):
    """Asks a stage to leave the session and to start in another one, with the layers that it has loaded.

    ``spec`` is the ``StageSpec``, as JSON, with which a new process would be started in that session.
    """

    spec: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class Heartbeat(msgspec.Struct, tag="heartbeat", kw_only=True):
    """A stage's sign that its loop is running. It sends the next one only after the engine's HeartbeatAck."""

    stage: Index


class HeartbeatAck(msgspec.Struct, tag="heartbeat_ack", kw_only=True):
    """The engine's answer to a Heartbeat that it has read. An inbox that nobody reads thus holds one Heartbeat of each
    stage at most."""


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """A stage cannot go on; ``cause`` is one line for people, ``details`` its traceback.

    ``unusable`` says what the stage was sent that it cannot use: a "batch", which the one before it has sent, or a
    "message", whose sender it cannot tell. It is "rank" where another rank of the stage has ended, and empty where the
    fault is the stage's own.
    """

    stage: AnyStage
    cause: Words
    details: Details = ""
    unusable: Annotated[str, msgspec.Meta(max_length=7, pattern=r"\A(?:batch|message|rank)?\Z")] = ""


class Recall(msgspec.Struct, tag="recall", kw_only=True):
    """Asks a stage which batch it got under this number. The engine asks where a result does not fit the batch."""

    stream: Word


class Recalled(msgspec.Struct, tag="recalled", kw_only=True):
    """The answer to Recall: ``digest_of`` the batch as the stage got it; "" if it got none, or has forgotten it."""

    stage: Index
    digest: Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A(?:[0-9a-f]{64})?\Z")] = ""


Neighbour = Annotated[str, msgspec.Meta(max_length=10, pattern=r"\A(?:upstream|downstream|drafter)?\Z")]
"""The end of one of a stage's own connections; "" for a connection that another process opened to the stage."""


class LinkBroken(msgspec.Struct, tag="link_broken", kw_only=True):
    """A connection of this stage has ended, though the stage was not asked to leave.

    Where ``to`` is "upstream", "downstream" or "drafter", it is the stage's own connection to that neighbour, and
    ``cause`` says why it broke; with "" it is a connection that another process had opened to the stage.
    """

    stage: Index
    to: Neighbour = ""
    cause: Words = ""


class Stop(msgspec.Struct, tag="stop", kw_only=True):
    """Asks a stage to leave its loop."""


Message = (
    Batch
    | Features
    | Result
    | Cancel
    | Ready
    | ReserveDevice
    | DeviceReserved
    | PrepareGrammar
    | GrammarPrepared
    | ForgetGrammar
    | Loading
    | RanksMeet
    | Started
    | ConnectNeighbours
    | Rejoin
    | Heartbeat
    | HeartbeatAck
    | Failed
    | LinkBroken
    | Recall
    | Recalled
    | Stop
)


class Delivery(msgspec.Struct, tag="delivery", kw_only=True):
    """A message and the time at which a modelled link delivers it; 0 where it has arrived.

    Only modelled links put this envelope on the wire: others send the message as it is.
    """

    message: Message
    arrives: Finite = 0.0
    """The time of delivery, in seconds of the monotonic clock that a host's processes share; with ``from_receipt``, the
    seconds from the receipt to the delivery."""
    from_receipt: bool = False
    """Whether ``arrives`` counts from the receipt, because the receiver's host has another clock."""

    def arrives_by(self, now: float) -> float:
        """Time at which the message arrives, in seconds of the receiver's clock, if it was received at ``now``."""
        return now + self.arrives if self.from_receipt and self.arrives else self.arrives


class Tagged(msgspec.Struct):
    """A message's tag, and that of the message inside if it is an envelope. All other fields are ignored."""

    type: str
    message: Tagged | None = None


UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are no message, hold invalid UTF-8, or nest thousands of levels deep."""

_encoder = msgspec.msgpack.Encoder()
# Reads protocol and secret of a foreign header, and leaves its message undecoded.
_envelope = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(Message | Delivery)
_tagged = msgspec.msgpack.Decoder(Tagged)


def encode(message: Message, session: str, arrives: float = 0.0, left: float | None = None) -> bytes:
    """A message's header; in an envelope if a modelled link delivers it.

    Both times are seconds of the sender's clock: ``arrives`` is when the message arrives and ``left`` when it was sent,
    which is given where the receiver has another clock.
    """
    sent: Message | Delivery = message
    if arrives and left is None:
        sent = Delivery(message=message, arrives=arrives)
    elif arrives and left is not None:
        # The clocks of two hosts have unrelated zeros, so only the difference of two times of one clock may travel.
        sent = Delivery(message=message, arrives=arrives - left, from_receipt=True)
    return opening(session) + _encoder.encode(sent)


@lru_cache(maxsize=64)
def opening(session: str) -> bytes:
    """The bytes that begin every header of a session: an array of three, its protocol and its secret."""
    whole: bytes = _encoder.encode((PROTOCOL, session, None))
    return whole[:-1]  # without the one byte of None: the message's own bytes take its place


def belongs(frames: Sequence[Frame], session: str) -> bool:
    """Whether a message carries the session's secret."""
    return bool(frames) and begins(frames[0], opening(session))


def begins(header: Frame, start: bytes) -> bool:
    """Whether a header begins with these bytes."""
    # In constant time: an ordinary comparison stops at the first wrong byte, and its duration would give the secret
    # away byte by byte.
    return hmac.compare_digest(header[: len(start)], start)


def decode(frames: Sequence[Frame], session: str) -> Delivery:
    """Decode and check one message.

    A batch with surviving rows past the first stage, and features, have their tensor as frames[1].

    Raises ForeignFrame when the header is not one of this session's, and MalformedMessage when the message does not
    decode, is inconsistent, or its tensor frame is missing, unexpected or of the wrong size.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise ForeignFrame("header missing or too large")
    start = opening(session)
    # The secret is compared before anything is decoded: a stranger's bytes never reach the decoder of messages.
    if not begins(frames[0], start):
        raise ForeignFrame(whose(frames[0]))
    try:
        decoded: Message | Delivery = _decoder.decode(memoryview(frames[0])[len(start) :])
    except UNDECODABLE as error:
        malformed = MalformedBatch if says_batch(memoryview(frames[0])[len(start) :]) else MalformedMessage
        raise malformed(f"message does not decode: {error}") from error
    delivery = decoded if isinstance(decoded, Delivery) else Delivery(message=decoded)
    expected, found = tensor_bytes(delivery.message), sum(len(frame) for frame in frames[1:])
    if found != expected or len(frames) > 2:
        malformed = MalformedBatch if isinstance(delivery.message, Batch) else MalformedMessage
        raise malformed(f"tensor frame of {found} bytes, header announces {expected}")
    return delivery


def says_batch(header: memoryview) -> bool:
    """Whether a message that does not decode says of itself that it is a batch."""
    try:
        told = _tagged.decode(header)
    except UNDECODABLE:
        return False
    return (told.message or told).type == BATCH


def tensor_bytes(message: Message) -> int:
    """Bytes of the tensor that comes with a message. Raises MalformedMessage for one that contradicts itself."""
    if isinstance(message, Batch):
        check_batch(message)
        return len(message.alive) * message.width * DTYPE_BYTES.get(message.dtype, 0)
    if isinstance(message, Features):
        check_features(message)
        return len(message.nodes) * message.width * DTYPE_BYTES[message.dtype]
    if isinstance(message, Result):
        check_result(message)
    return 0


def whose(header: Frame) -> str:
    """Error text for a header that is not of the session: undecodable, another protocol, or another session."""
    try:
        protocol, _, _ = _envelope.decode(header)
    except UNDECODABLE as error:
        return f"header does not decode: {error}"
    if protocol != PROTOCOL:
        return f"protocol {protocol}, expected {PROTOCOL}: run the same version of penstock everywhere"
    return "message of another session"


def check_batch(batch: Batch) -> None:
    """Raise MalformedBatch unless the columns agree in length and every index points at a row."""
    rows, count = batch.rows, len(batch.rows.nodes)
    columns = (rows.requests, rows.slots, rows.parents, rows.positions, rows.tokens)
    if {*map(len, columns)} != {count}:
        raise MalformedBatch(f"stream {batch.stream}: row columns differ in length")
    if not within(batch.alive, count) or not within(batch.wanted, count):
        raise MalformedBatch(f"stream {batch.stream}: an index points past its {count} rows")
    # Line i of the tensor is row alive[i]: an index out of order or twice would give a row another row's states.
    if batch.alive != sorted({*batch.alive}):
        raise MalformedBatch(f"stream {batch.stream}: surviving rows are not in ascending order")
    if batch.feature_nodes and len(batch.feature_nodes) != count:
        raise MalformedBatch(f"stream {batch.stream}: {len(batch.feature_nodes)} feature_nodes of {count} rows")
    if batch.feature_levels and len(batch.feature_levels) != len(batch.feature_nodes):
        raise MalformedBatch(
            f"stream {batch.stream}: {len(batch.feature_levels)} levels of {len(batch.feature_nodes)} feature_nodes"
        )
    if batch.dtype and batch.dtype not in DTYPE_BYTES:
        raise MalformedBatch(f"stream {batch.stream}: dtype {batch.dtype!r}")


def digest_of(batch: Batch) -> str:
    """The digest of all that no stage may change in a batch on its way."""
    # These four are what each stage writes: it drops rows, replaces the tensor, and adds its span.
    same = msgspec.structs.replace(batch, alive=[], dtype="", width=0, spans=[])
    return hashlib.sha256(_encoder.encode(same)).hexdigest()


def within(indices: list[int], count: int) -> bool:
    """Whether all indices are below ``count``. No index is negative: the decoder has refused those."""
    return not indices or max(indices) < count


def check_result(result: Result) -> None:
    """Raise MalformedMessage unless every candidate has its score."""
    for answer in result.candidates:
        if len(answer.scores) != len(answer.tokens):
            raise MalformedMessage(
                f"stream {result.stream}: {len(answer.tokens)} candidates, {len(answer.scores)} scores"
            )


def check_features(features: Features) -> None:
    """Raise MalformedMessage unless every row has a slot and the layers divide a line's width evenly."""
    if len(features.slots) != len(features.nodes):
        raise MalformedMessage(f"features of {len(features.nodes)} nodes name {len(features.slots)} slots")
    if features.dtype not in DTYPE_BYTES or not features.layers or features.width % len(features.layers):
        raise MalformedMessage(
            f"features of layers {features.layers}: dtype {features.dtype!r}, width {features.width}"
        )
