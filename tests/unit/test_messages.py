"""The codec: whatever arrives is a message of the session, or refused as a stranger's, or malformed; nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.files import DTYPE_BYTES
from penstock.messages import (
    MAX_HEADER_BYTES,
    NO_SLOT,
    PROTOCOL,
    Batch,
    Cancel,
    Candidates,
    CommittedSlots,
    ConnectNeighbours,
    Delivery,
    DeviceReserved,
    Failed,
    Features,
    ForeignFrame,
    ForgetGrammar,
    GrammarPrepared,
    Heartbeat,
    HeartbeatAck,
    Loading,
    MalformedMessage,
    Message,
    Opened,
    PrepareGrammar,
    Ready,
    ReserveDevice,
    Result,
    Rows,
    SampledToken,
    Sampling,
    Span,
    Started,
    Stop,
    decode,
    encode,
)

SESSION = "5" * 32

whole = st.integers(-(2**63), 2**64 - 1)
word = st.integers(0, 2**63 - 1)
index = st.integers(0, 2**31 - 1)
number = st.floats(allow_nan=False, allow_infinity=False)
logarithm = st.floats(max_value=0.0)
moment = st.floats(0, 1e10)
text = st.text(max_size=8)
address = st.sampled_from(["tcp://127.0.0.1:7700", "tcp://[fe80::1%eth0]:1", "ipc:///tmp/a folder/inbox"])


samplings = st.builds(Sampling, st.integers(0, 2**64 - 1), word, st.floats(0, 1e308), st.floats(0, 1, exclude_min=True))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, list[bytes]]:
    """A consistent batch and its tensor frame, if it has one."""
    count = draw(st.integers(0, 5))
    kinds = (word, word, index, st.integers(NO_SLOT, 2**31 - 1), index, index)
    columns = [draw(st.lists(kind, min_size=count, max_size=count)) for kind in kinds]
    indices = st.lists(st.integers(0, count - 1), unique=True, max_size=count) if count else st.just([])
    batch = Batch(
        stream=draw(word),
        opened=draw(st.lists(st.builds(Opened, word, samplings), max_size=2)),
        committed=draw(st.lists(st.builds(CommittedSlots, word, st.lists(index, max_size=4)), max_size=2)),
        closed=draw(st.lists(word, max_size=3)),
        rows=Rows(*columns),
        wanted=draw(indices),
        alive=sorted(draw(indices)),
        candidates=draw(index),
        feature_nodes=draw(st.lists(word, min_size=count, max_size=count) | st.just([])),
        dtype=draw(st.sampled_from(["", *DTYPE_BYTES])),
        width=draw(st.integers(0, 9)),
        spans=draw(st.lists(st.builds(Span, index, moment, moment, moment, moment, moment, index), max_size=2)),
    )
    size = len(batch.alive) * batch.width * DTYPE_BYTES.get(batch.dtype, 0)
    return batch, [bytes(size)] if size else []


@st.composite
def features(draw: st.DrawFn) -> tuple[Features, list[bytes]]:
    """Consistent features and their tensor frame, if it has one."""
    count, layers = draw(st.integers(0, 4)), draw(st.lists(index, min_size=1, max_size=3))
    nodes, slots = (draw(st.lists(kind, min_size=count, max_size=count)) for kind in (word, index))
    dtype, width = draw(st.sampled_from([*DTYPE_BYTES])), len(layers) * draw(st.integers(0, 4))
    sent = Features(layers=layers, nodes=nodes, slots=slots, dtype=dtype, width=width)
    size = count * width * DTYPE_BYTES[dtype]
    return sent, [bytes(size)] if size else []


picks = st.builds(SampledToken, word, index, logarithm, index, st.lists(st.tuples(index, logarithm), max_size=2))
ranked = st.lists(st.tuples(index, logarithm), max_size=2)
candidates = st.builds(
    lambda node, pairs, level: Candidates(node, [t for t, _ in pairs], [s for _, s in pairs], level),
    word,
    ranked,
    index,
)
others: st.SearchStrategy[Message] = st.one_of(
    st.builds(Result, stream=word, picks=st.lists(picks, max_size=3), candidates=st.lists(candidates, max_size=3)),
    st.builds(Cancel, before=word, nodes=st.lists(word)),
    st.builds(Ready, stage=index),
    st.builds(ReserveDevice, seconds=st.floats(0, allow_infinity=False)),
    st.builds(DeviceReserved, stage=index, start=number, end=number),
    st.builds(Loading, stage=index, read=word, total=word),
    st.builds(Started, stage=index, address=address, kv_bytes=word, weight_bytes=word),
    st.builds(PrepareGrammar, request=word, grammar=text),
    st.builds(GrammarPrepared, request=word),
    st.builds(ForgetGrammar, request=word),
    st.builds(ConnectNeighbours, upstream=address, downstream=address),
    st.builds(Heartbeat, stage=index),
    st.just(HeartbeatAck()),
    st.builds(Failed, stage=st.integers(-1, 2**31 - 1), cause=text, details=text),
    st.just(Stop()),
)
messages = st.one_of(batches(), features(), others.map(lambda message: (message, [])))


@given(messages, number)
def test_round_trip(sent: tuple[Message, list[bytes]], arrives: float) -> None:
    message, tensors = sent
    frame = encode(message, SESSION, arrives)
    assert decode([frame, *tensors], SESSION) == Delivery(message=message, arrives=arrives)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_between_clocks_that_differ_a_message_says_how_long_it_takes(left: float, received: float) -> None:
    frame = encode(Ready(stage=3), SESSION, left + 1.5, left)
    assert decode([frame], SESSION).arrives_by(received) == received + ((left + 1.5) - left)


def test_only_modelled_links_have_an_envelope() -> None:
    plain, in_envelope = (encode(Ready(stage=3), SESSION, arrives) for arrives in (0.0, 1.5))
    assert msgspec.msgpack.decode(plain) == [PROTOCOL, SESSION, {"type": "ready", "stage": 3}]
    assert len(in_envelope) > len(plain)


@settings(max_examples=300)
@given(messages, st.data())
def test_damage_is_noticed_or_harmless(sent: tuple[Message, list[bytes]], data: st.DataObject) -> None:
    """A byte changed, cut off or put in: a message of the right shape, or one of two errors."""
    message, tensors = sent
    frame = bytearray(encode(message, SESSION, data.draw(number)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(frame) - 1, 0)))
        frame[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        found = decode([bytes(frame), *tensors], SESSION)
    except (ForeignFrame, MalformedMessage):
        return
    assert isinstance(found.message, Message)


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_noise_is_a_strangers(frames: list[bytes]) -> None:
    with pytest.raises(ForeignFrame):
        decode(frames, SESSION)


nested = st.recursive(
    st.none() | st.booleans() | whole | st.text(max_size=4) | st.binary(max_size=4) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(nested)
def test_any_other_content_of_the_session_is_malformed(content: Any) -> None:
    frame = msgspec.msgpack.encode((PROTOCOL, SESSION, content))
    with pytest.raises(MalformedMessage):
        decode([frame], SESSION)


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([], "missing"),
        ([b""], "does not decode"),
        ([bytes(MAX_HEADER_BYTES + 1)], "too large"),
        ([encode(Stop(), "another")], "another session"),
        ([encode(Stop(), SESSION[:-1])], "another session"),
        ([encode(Stop(), "")], "another session"),
        ([encode(Stop(), "ü" * 32)], "another session"),
        ([msgspec.msgpack.encode((PROTOCOL + 1, SESSION, Stop()))], "run the same version"),
        ([msgspec.msgpack.encode((PROTOCOL, SESSION))], "does not decode"),
        ([msgspec.msgpack.encode({"session": SESSION})], "does not decode"),
        ([b"\x93\x01\xa1x" + b"\x91" * 100_000], "recursion"),
        ([b"\x93\x01\xa2\xff\xfe\xc0"], "(?i)utf-8"),
    ],
)
def test_strangers(frames: list[bytes], complaint: str) -> None:
    with pytest.raises(ForeignFrame, match=complaint):
        decode(frames, SESSION)


def state(**changes: Any) -> Features:
    """Two rows of one layer, four float32 wide, with changes."""
    return Features(**{"layers": [3], "nodes": [1, 2], "slots": [4, 5], "dtype": "float32", "width": 4, **changes})


def simple(**fields: Any) -> Batch:
    return Batch(**{"stream": 1, "rows": Rows([0, 0], [1, 2], [0, 1], [-1, 0], [0, 1], [5, 6]), **fields})


@pytest.mark.parametrize(
    ("message", "tensors", "complaint"),
    [
        (simple(rows=Rows([0], [1, 2], [0, 1], [-1, 0], [0, 1], [5, 6])), [], "differ in length"),
        (simple(alive=[2]), [], "past its 2 rows"),
        (simple(wanted=[-1]), [], "wanted"),
        (simple(wanted=[2]), [], "past its 2 rows"),
        (simple(alive=[1, 0]), [], "ascending"),
        (simple(alive=[1, 1]), [], "ascending"),
        (simple(dtype="float64", width=1), [], "dtype 'float64'"),
        (simple(width=-1), [], "width"),
        (simple(alive=[0, 1], dtype="float16", width=3), [bytes(11)], "frame of 11 bytes, header announces 12"),
        (simple(alive=[0, 1], dtype="float16", width=3), [], "frame of 0 bytes, header announces 12"),
        (simple(alive=[0, 1], dtype="float16", width=3), [bytes(6), bytes(6)], "tensor frame"),
        (simple(alive=[], dtype="float16", width=3), [bytes(6)], "header announces 0"),
        (simple(feature_nodes=[0]), [], "1 feature_nodes of 2 rows"),
        (state(slots=[1]), [bytes(32)], "2 nodes name 1 slots"),
        (state(layers=[]), [bytes(32)], "features of layers"),
        (state(layers=[1, 2, 3]), [bytes(32)], "width 4"),
        (state(dtype="int8"), [bytes(8)], "dtype 'int8'"),
        (state(width=-4), [], "width"),
        (state(), [bytes(31)], "frame of 31 bytes, header announces 32"),
        (Stop(), [b"tail"], "header announces 0"),
        (Stop(), [b"", b""], "tensor frame"),
        (simple(alive=[0, 1], dtype="float32", width=2**31 - 1), [bytes(8)], "header announces"),
        (simple(alive=[0, 1], dtype="float32", width=2**62), [bytes(8)], "width"),
    ],
)
def test_malformed(message: Message, tensors: list[bytes], complaint: str) -> None:
    with pytest.raises(MalformedMessage, match=complaint):
        decode([encode(message, SESSION), *tensors], SESSION)


def test_a_tail_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="trailing"):
        decode([encode(Stop(), SESSION) + b"tail"], SESSION)


def test_content_that_nests_too_deeply_is_malformed() -> None:
    frame = msgspec.msgpack.encode((PROTOCOL, SESSION, msgspec.Raw(b"\x91" * 500 + b"\xc0")))
    with pytest.raises(MalformedMessage):
        decode([frame], SESSION)


bad_index = st.integers(-(2**63), -2) | st.integers(2**31, 2**64 - 1)
bad_number = st.sampled_from([float("nan"), float("inf"), -float("inf")])


@given(
    st.fixed_dictionaries({"seed": st.integers(-(2**63), -1)})
    | st.fixed_dictionaries({"sample": st.integers(-(2**63), -1)})
    | st.sampled_from(["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"]).flatmap(
        lambda name: st.fixed_dictionaries({name: bad_number})
    )
    | st.fixed_dictionaries({"top_p": bad_number | st.floats(max_value=0.0) | st.floats(1.0, exclude_min=True)})
    | st.fixed_dictionaries({"min_p": bad_number | st.floats(1.0, exclude_min=True)})
    | st.sampled_from(["top_k", "logprobs", "barred_before", "prompt_length"]).flatmap(
        lambda name: st.fixed_dictionaries({name: bad_index})
    )
    | st.sampled_from(["barred", "allowed_token_ids"]).flatmap(
        lambda name: st.fixed_dictionaries({name: st.tuples(bad_index)})
    )
    | st.fixed_dictionaries({"logit_bias": st.tuples(st.tuples(bad_index, st.just(1.0)))})
)
def test_sampling_out_of_range_is_malformed(fields: dict[str, Any]) -> None:
    frame = encode(simple(opened=[Opened(1, Sampling(**fields))]), SESSION)
    with pytest.raises(MalformedMessage, match=r"opened\[0\]"):
        decode([frame], SESSION)


@given(st.sampled_from(["requests", "nodes", "slots", "parents", "positions", "tokens"]), st.integers(-(2**63), -2))
def test_row_numbers_below_zero_are_malformed(column: str, value: int) -> None:
    batch = simple()
    getattr(batch.rows, column)[1] = value
    with pytest.raises(MalformedMessage, match="Expected `int`"):
        decode([encode(batch, SESSION)], SESSION)


@given(st.sampled_from(["slots", "parents", "positions", "tokens"]), st.integers(2**31, 2**64 - 1))
def test_row_numbers_that_no_stage_has_are_malformed(column: str, value: int) -> None:
    batch = simple()
    getattr(batch.rows, column)[0] = value
    with pytest.raises(MalformedMessage, match="Expected `int`"):
        decode([encode(batch, SESSION)], SESSION)


below = st.integers(-(2**63), -2)
beyond = st.integers(2**31, 2**64 - 1)
not_index = below | st.just(-1) | beyond
not_word = below | st.just(-1) | st.integers(2**63, 2**64 - 1)
not_logarithm = st.just(float("nan")) | st.floats(min_value=0.0, exclude_min=True)
not_seconds = bad_number | st.floats(max_value=0.0, exclude_max=True)


def picked(**fields: Any) -> Result:
    return Result(stream=1, picks=[SampledToken(**{"node": 1, "token": 2, **fields})])


def guessed(node: Any = 1, token: Any = 2, score: Any = -1.0) -> Result:
    return Result(stream=1, candidates=[Candidates(node, [token], [score])])


def started(**fields: Any) -> Started:
    return Started(**{"stage": 0, "address": "tcp://127.0.0.1:1", "kv_bytes": 1, "weight_bytes": 1, **fields})


def spanned(place: int, value: Any) -> Result:
    numbers: list[Any] = [0, 1.0, 1.0, 2.0, 1.0, 0.0, 3, 1.0]
    numbers[place] = value
    return Result(stream=1, spans=[Span(*numbers)])


lies = st.one_of(
    st.builds(Result, stream=not_word),
    st.builds(picked, node=not_word),
    st.builds(picked, token=not_index),
    st.builds(picked, rank=not_index),
    st.builds(picked, logprob=not_logarithm),
    st.builds(picked, top=st.tuples(not_index, logarithm).map(lambda pair: [pair])),
    st.builds(picked, top=st.tuples(index, not_logarithm).map(lambda pair: [pair])),
    st.builds(guessed, node=not_word),
    st.builds(guessed, token=not_index),
    st.builds(guessed, score=not_logarithm),
    st.builds(spanned, st.sampled_from([0, 6]), not_index),
    st.builds(spanned, st.sampled_from([1, 2, 3, 4, 5, 7]), bad_number),
    st.builds(Ready, stage=not_index),
    st.builds(Heartbeat, stage=not_index),
    st.builds(Failed, stage=below | beyond, cause=text),
    st.builds(started, stage=not_index),
    st.builds(started, kv_bytes=not_word),
    st.builds(started, weight_bytes=not_word),
    st.builds(GrammarPrepared, request=not_word),
    st.builds(DeviceReserved, stage=not_index, start=number, end=number),
    st.builds(DeviceReserved, stage=index, start=bad_number, end=number),
    st.builds(DeviceReserved, stage=index, start=number, end=bad_number),
    st.builds(ReserveDevice, seconds=not_seconds),
)


@settings(max_examples=500)
@given(lies)
def test_numbers_for_the_engine_out_of_range_are_malformed(message: Message) -> None:
    with pytest.raises(MalformedMessage, match=r"Expected `(int|float)`"):
        decode([encode(message, SESSION)], SESSION)


@given(bad_number)
def test_a_message_that_never_arrives_is_malformed(arrives: float) -> None:
    with pytest.raises(MalformedMessage, match="arrives"):
        decode([encode(Ready(stage=0), SESSION, arrives)], SESSION)


def test_candidates_without_their_scores_are_malformed() -> None:
    with pytest.raises(MalformedMessage, match="2 candidates, 1 scores"):
        decode([encode(Result(stream=1, candidates=[Candidates(1, [2, 3], [-1.0])]), SESSION)], SESSION)
