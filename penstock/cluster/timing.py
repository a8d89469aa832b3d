"""The times that a cluster's stages and links take, and the memory that its devices need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

from penstock.cluster.drawn import split_by_speed
from penstock.cluster.spec import Cluster, Device, ModelPrice, interpolated, parts_of
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.messages import Index, Seconds

# ------------------------------------------------------------------------------------------------------ tensor parallel
# Tensor parallel stages: each rank's share of a layer, and the bytes that ranks send each other.
#
# Every matrix is split by its outputs and every sum stays whole, so that the tokens are the same for any number of
# ranks. Megatron-LM (Shoeybi et al., section 3) splits the inputs of ``o`` and ``down`` instead, and adds up partial
# sums with two all-reduces a layer. Here a layer has four all-gathers of whole rows:
#
#     q, k, v -> attend | attended | -> o | o | -> gate, up | opened | -> down | down |
#
# Attention is shared by KV groups, all other outputs in blocks of 16: the formats int8 and int4 compute blocks of that
# many outputs, and one rule for every format gives the same slices whatever the weights are held as.

BLOCK: Final = 16
"""Outputs of a matrix that are never divided between two ranks; the last block may be shorter. Compiled products
compute so many side by side (``models.compiled.dot.LANES``)."""
GATHERS: Final = 4
"""All-gathers in a layer: of attention's output, of ``o``'s output, of ``down``'s input and of ``down``'s output."""


class Shares(NamedTuple):
    """How many units of each dimension every rank has, in the ranks' order."""

    heads: tuple[int, ...]
    """KV groups, with the heads of queries that read them."""
    hidden: tuple[int, ...]
    """Blocks of the outputs of ``o`` and ``down``."""
    opened: tuple[int, ...]
    """Blocks of the outputs of ``gate`` and ``up``."""
    logits: tuple[int, ...]
    """Blocks of the head's outputs."""


class Exchange(NamedTuple):
    """The traffic on a rank's link for one batch: messages sent one after the other, and bytes for each row."""

    # messages: latencies that add up, however many rows there are; row_bytes: bytes a row, to all other ranks together
    messages: int
    row_bytes: float


def check_divisible(model: ModelPrice, ranks: int, where: str) -> None:
    """Raise FieldError unless ``ranks`` ranks can share the model's layers. ``where``: the field that names the ranks.

    The error names a field of ``as_model`` where a size is unknown or wrong.
    """
    if model.kinds:
        problem = f"says that layers differ, and {where} are tensor parallel ranks, which share layers that are alike"
        raise FieldError("as_model.kinds", f'{problem}: split the stage by "layers"')
    for name in ("key_value_heads", "intermediate_size"):
        if getattr(model, name) is None:
            remedy = f'state it, or split the stage by "layers" (mixtures of experts have no {name} to be split by yet)'
            raise FieldError(f"as_model.{name}", f"is missing, and {where} are tensor parallel ranks: {remedy}")
    if (least := sum(matrices(model)[:3])) > model.layer_parameters:
        problem = (
            f"is {model.layer_parameters}, and q, k, v, o and down of these sizes have {least}; correct one of them"
        )
        raise FieldError("as_model.layer_parameters", problem)
    assert model.key_value_heads is not None
    assert model.intermediate_size is not None
    most = {
        "KV groups of a layer": model.key_value_heads,
        f"blocks of {BLOCK} outputs of hidden_size": blocks(model.hidden_size),
        f"blocks of {BLOCK} outputs of intermediate_size": blocks(model.intermediate_size),
        f"blocks of {BLOCK} outputs of the head": blocks(logits(model)),
    }
    for what, count in most.items():
        # A rank without a unit would have an empty slice, and a gather needs one from every rank.
        if ranks > count:
            raise FieldError(where, f"are {ranks} tensor parallel ranks for the {count} {what}; name at most {count}")


@lru_cache(maxsize=256)
def shares_of(model: ModelPrice, speeds: tuple[float, ...]) -> Shares:
    """Each rank's share of a model that ``check_divisible`` accepts, in proportion to the ranks' ``speeds``.

    Each unit goes to the rank that would be done first with it: ranks of equal speed differ by one unit at most, and
    the first ones have more.
    """
    assert model.key_value_heads is not None
    assert model.intermediate_size is not None
    units = (model.key_value_heads, *map(blocks, (model.hidden_size, model.intermediate_size, logits(model))))
    # KV heads are the unit of q, k and v: a rank that has a KV head has all query heads that read it.
    return Shares(*(tuple(split_by_speed(count, speeds)) for count in units))


def rank_prices(model: ModelPrice, speeds: tuple[float, ...]) -> tuple[ModelPrice, ...]:
    """The price of each rank's part of the model: what it holds, reads and computes of every layer and of the head.

    Summed over the ranks, parameters, queries, keys and values are the model's own. The leader, which is the first
    rank, holds the embedding. Norms are counted among the outputs of ``gate`` and ``up``.
    """
    shares = shares_of(model, speeds)
    incoming, after, down, opened = matrices(model)
    by_rank = zip(
        parts(incoming, shares.heads),
        parts(after + down, shares.hidden),
        parts(opened, shares.opened),
        parts(model.head_parameters, shares.logits),
        parts(model.queries, shares.heads),
        parts(model.keys, shares.heads),
        strict=True,
    )
    return tuple(
        replace(
            model,
            layer_parameters=attending + hidden + opening,
            head_parameters=head,
            embedding_parameters=0 if rank else model.embedding_parameters,
            attention_size=queries,
            key_value_size=keys,
            # A rank's part is not split again.
            key_value_heads=None,
            intermediate_size=None,
        )
        for rank, (attending, hidden, opening, head, queries, keys) in enumerate(by_rank)
    )


def exchange_of(model: ModelPrice, speeds: tuple[float, ...], layers: int, *, head: bool) -> Exchange:
    """The traffic of the rank that sends most, for a stage of ``layers`` layers, and of the head if ``head`` is True.

    The leader sends its batch's hidden states to every other rank: those that come in and, with the head, those that
    the head reads, which only the leader keeps. In each gather every rank sends its slice to all others at the same
    time, and its link takes these messages one after the other; latencies overlap.
    """
    others = len(speeds) - 1
    if not others:
        return Exchange(0, 0.0)
    shares = shares_of(model, speeds)
    # What ``o`` and ``down`` multiply travels as they read it: with int4 and int8 already rounded to eight bits.
    entering = model.activation_bytes if model.gathered_bytes is None else model.gathered_bytes
    assert model.intermediate_size is not None
    attended = largest(shares.heads) * model.queries * entering
    opened = largest(shares.opened) * model.intermediate_size * entering
    # o and down each give a row of hidden states, which the next norm needs whole.
    hidden = 2 * largest(shares.hidden) * model.row_bytes
    sampled = largest(shares.logits) * logits(model) * model.activation_bytes if head else 0.0
    handed_out = 2 if head else 1
    # Each message goes to every other rank over the sender's one link, hence ``others`` times the bytes.
    row_bytes = others * (handed_out * model.row_bytes + layers * (attended + opened + hidden) + sampled)
    return Exchange(handed_out + GATHERS * layers + head, row_bytes)


def matrices(model: ModelPrice) -> tuple[int, int, int, int]:
    """Parameters of a layer's q, k and v; of its o; of its down; and of the rest, gate, up and norms."""
    assert model.intermediate_size is not None
    incoming, after = model.hidden_size * (model.queries + 2 * model.keys), model.queries * model.hidden_size
    down = model.intermediate_size * model.hidden_size
    return incoming, after, down, model.layer_parameters - incoming - after - down


def logits(model: ModelPrice) -> int:
    """Outputs of the head; its norm counts as one of them."""
    return max(1, model.head_parameters // model.hidden_size)


def blocks(outputs: int) -> int:
    """Blocks of ``BLOCK`` outputs, the last one included where it is shorter."""
    return -(-outputs // BLOCK)


def parts(total: int, units: Sequence[int]) -> list[int]:
    """``total`` in proportion to the units, in whole numbers whose sum is ``total``."""
    # Rounding the ends, not the parts, keeps the sum exact: what one part loses, its neighbour has.
    ends = [total * end // sum(units) for end in accumulate(units, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def largest(units: Sequence[int]) -> float:
    """Fraction of the largest share, 0 to 1."""
    return max(units) / sum(units)


# --------------------------------------------------------------------------------------------------------------- timing
# Times of an emulated cluster: per stage and batch, per link and message. All are in seconds, time_scale applied.
#
# A device's pass over a batch lasts ``fixed + max(reading, computing)``, the roofline: its weights, and the keys and
# values that the batch attends to, are read once; every row and its attention are computed. A message on a link lasts
# ``latency + bytes / rate``. Stage processes wait for these times, and the simulator adds them. Where a device's layers
# have been measured, the measurements count.

MESSAGE_ROW_BYTES: Final = 24
"""One row to or from the engine, where no hidden state travels: six integers of 1 to 5 bytes in msgpack, rounded up."""
MAX_OVERRUNS: Final = 0.05
"""Largest fraction of passes that may really take longer than modelled; above it no emulated figure is valid. At 0 one
late wake-up would make a figure invalid."""

AXIS: Final = msgspec.Meta(max_length=4096)
"""The bound on both sides of a measured grid, which is decoded from messages. A profile's have five sizes and three
contexts (``engine.profile.measure``)."""
GridAxis = Annotated[tuple[Index, ...], AXIS]
"""Measured numbers of rows, or of tokens before a batch, in rising order."""
BoundedGrid = Annotated[tuple[Annotated[tuple[Seconds, ...], AXIS], ...], AXIS]
"""[rows][contexts]: seconds."""


class Attended(NamedTuple):
    """Attention of a batch: ``pairs`` of a row and a token that it sees, and ``slots`` whose keys and values are read.

    Several rows may see one token: it counts once for each row in ``pairs``, and once in ``slots``.
    """

    pairs: float = 0
    slots: float = 0


NOTHING: Final = Attended()
"""The attention of a batch that is not told: none is priced."""


def chunk(rows: int, cached: int = 0) -> Attended:
    """Attention of ``rows`` tokens of one text that follow ``cached`` ones: each sees all before it, and itself."""
    # Row i of 1 to n sees cached + i tokens, in the mean cached + (n + 1) / 2.
    return Attended(rows * (cached + (rows + 1) / 2), cached + rows)


class DeviceTiming(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One device's part of a stage, in seconds: fixed for a batch, for reading its weights, for computing one row.

    ``pair_s`` is the time of a row's attention to one token, ``slot_s`` that to read one token's keys and values,
    ``state_s`` that to read and write the states of one row. ``near_pair_s`` and ``near_slot_s`` are of layers whose
    rows see ``reach`` tokens at most.
    """

    fixed_s: Seconds
    weight_s: Seconds
    row_s: Seconds
    pair_s: Seconds = 0.0
    slot_s: Seconds = 0.0
    state_s: Seconds = 0.0
    near_pair_s: Seconds = 0.0
    near_slot_s: Seconds = 0.0
    reach: Index = 0

    def seconds(self, rows: int, attended: Attended = NOTHING) -> float:
        """Seconds for a batch; 0 without surviving rows, since it is only passed on."""
        if not rows:
            return 0.0
        reading = self.weight_s + self.slot_s * attended.slots + self.state_s * rows
        computing = self.row_s * rows + self.pair_s * attended.pairs
        if self.reach and attended.pairs:
            # Attended does not say what each row sees, so all rows are taken to see pairs / rows tokens: ``near`` is
            # the share of those that is within reach.
            near = min(1.0, self.reach * rows / attended.pairs)
            reading += near * self.near_slot_s * attended.slots
            computing += near * self.near_pair_s * attended.pairs
            # Reading and computing overlap, so the longer of them counts (the roofline model).
        return self.fixed_s + max(reading, computing)


class MeasuredTiming(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One device's part of a stage as measured: seconds by the rows of a batch and the tokens cached before it."""

    rows: GridAxis
    contexts: GridAxis
    grid: BoundedGrid
    """[rows][contexts]: seconds."""

    def seconds(self, rows: int, attended: Attended = NOTHING) -> float:
        """Seconds for a batch; 0 without surviving rows, since it is only passed on."""
        if not rows:
            return 0.0
        # ``slots`` counts the batch's own rows, too, and the grid only the tokens before them.
        return interpolated(self.rows, self.contexts, self.grid, rows, max(0.0, attended.slots - rows))


class LinkTiming(msgspec.Struct, frozen=True, array_like=True):
    """A link, and the bytes of a row on it. Within one device it has no latency and an infinite rate."""

    latency_s: Seconds
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0)]
    row_bytes: Annotated[float, msgspec.Meta(ge=0.0)]

    def seconds(self, rows: int, header_bytes: int = 0) -> float:
        """Seconds from the first byte sent to the last received.

        To or from the engine the rows stand in the header: give either their number, or 0 and the header's size.
        """
        return self.latency_s + (rows * self.row_bytes + header_bytes) / self.bytes_per_s


class GroupTiming(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A tensor parallel group: its ranks compute side by side, and exchange rows in every layer.

    ``exchange`` stands for all messages of a batch: its latency is their sum, its ``row_bytes`` are all their bytes.
    """

    ranks: Annotated[tuple[DeviceTiming, ...], AXIS]
    exchange: LinkTiming

    def seconds(self, rows: int, attended: Attended = NOTHING) -> float:
        """Seconds for a batch: those of the slowest rank, and the exchange. 0 without surviving rows.

        Every gather waits for its slowest rank. Among equal devices that is the first one each time, because remainders
        go to the first ranks; among unlike devices this is a lower bound.
        """
        if not rows:
            return 0.0
        return max(rank.seconds(rows, attended) for rank in self.ranks) + self.exchange.seconds(rows)


PartTiming = DeviceTiming | MeasuredTiming | GroupTiming


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """A stage: its devices, or its one group, in sequence and the links between them. It takes one batch at a time."""

    devices: Annotated[tuple[PartTiming, ...], AXIS]
    between: Annotated[tuple[LinkTiming, ...], AXIS] = ()

    def seconds(self, rows: int, attended: Attended = NOTHING) -> float:
        """Seconds for which a batch occupies the stage. 0 rows: only a header crosses the links inside the stage."""
        seconds = sum([device.seconds(rows, attended) for device in self.devices])
        return seconds + sum([link.seconds(rows) for link in self.between]) if self.between else seconds


def stage_timings(cluster: Cluster) -> tuple[StageTiming, ...]:
    """Times of each stage; the last device or group carries the head. Raises ConfigError if nothing is emulated."""
    model = emulated_model(cluster)
    last = cluster.stages[-1].last_device
    return tuple(
        StageTiming(
            devices=tuple(
                part_timing(cluster, model, [*map(cluster.device, names)], layers, head=last in names)
                for names, layers in parts
            ),
            between=tuple(
                link_timing(cluster, one[-1], other[0], model.row_bytes) for (one, _), (other, _) in pairwise(parts)
            ),
        )
        for parts in parts_of(cluster.stages)
    )


def link_timings(cluster: Cluster) -> tuple[LinkTiming, ...]:
    """Links engine to first stage, stage to stage, last stage to engine. Raises ConfigError if nothing is emulated."""
    model = emulated_model(cluster)
    row_bytes = [MESSAGE_ROW_BYTES, *[model.row_bytes] * (len(cluster.stages) - 1), MESSAGE_ROW_BYTES]
    return tuple(link_timing(cluster, *hop, row) for hop, row in zip(cluster.route(), row_bytes, strict=True))


def draft_timing(cluster: Cluster) -> StageTiming | None:
    """One pass of the draft model, priced on the drafter's device; None where the cluster names no drafter."""
    if cluster.drafter is None or cluster.draft_as_model is None:
        return None
    return drafter_timing(cluster, cluster.draft_as_model, cluster.draft_as_model.all_layers)


def speculator_timing(cluster: Cluster, depth: int) -> StageTiming | None:
    """One pass of a learned drafter: the target's first ``depth`` layers and its head; None without a drafter.

    If the cluster file states a measured pass, that counts.
    """
    if cluster.drafter is None or cluster.as_model is None:
        return None
    return drafter_timing(cluster, cluster.as_model, range(depth))


def drafter_timing(cluster: Cluster, model: ModelPrice, layers: range) -> StageTiming:
    """One pass over ``layers`` of a model and its head on the drafter's device."""
    assert cluster.drafter is not None
    device = cluster.device(cluster.drafter)
    if cluster.draft_pass_ms is not None:
        device = replace(device, pass_ms=cluster.draft_pass_ms)
    return StageTiming(devices=(device_timing(device, model, layers, cluster.time_scale, head=True),))


def feature_links(cluster: Cluster) -> tuple[LinkTiming, ...]:
    """Links from each stage to the drafter, for one layer's hidden state of a row; to the engine without a drafter."""
    model, drafter = emulated_model(cluster), cluster.drafter or cluster.engine
    return tuple(link_timing(cluster, stage.last_device, drafter, model.row_bytes) for stage in cluster.stages)


def draft_link(cluster: Cluster) -> LinkTiming | None:
    """The link between engine and drafter, in either direction; None if the cluster names no drafter."""
    if cluster.drafter is None:
        return None
    return link_timing(cluster, cluster.engine, cluster.drafter, MESSAGE_ROW_BYTES)


def plain_step_seconds(cluster: Cluster) -> float:
    """The plain pipeline's time per token: one row from the engine through every stage and back."""
    stages, links = stage_timings(cluster), link_timings(cluster)
    return sum(stage.seconds(1) for stage in stages) + sum(link.seconds(1) for link in links)


def emulated_model(cluster: Cluster) -> ModelPrice:
    """The model that the cluster's stages are priced as. Raises ConfigError if nothing is emulated."""
    if cluster.as_model is None:
        raise ConfigError(
            f"cluster {cluster.name} has no as_model: nothing is emulated, so there are no modelled times"
        )
    return cluster.as_model


def part_timing(
    cluster: Cluster, model: ModelPrice, devices: Sequence[Device], layers: range, *, head: bool
) -> PartTiming:
    """Times of ``layers`` on a device, or on several as the ranks of a tensor parallel group."""
    if len(devices) == 1:
        return stage_part(devices[0], model, layers, cluster.time_scale, head=head)
    # Ranks are priced by rate alone: check_groups has refused devices with a measured pass, which state no rate.
    speeds = speeds_of(devices)
    ranks = zip(devices, rank_prices(model, speeds), strict=True)
    exchange = exchange_of(model, speeds, len(layers), head=head)
    slowest = slowest_link(cluster, devices)
    return GroupTiming(
        ranks=tuple(device_timing(device, part, layers, cluster.time_scale, head=head) for device, part in ranks),
        exchange=LinkTiming(exchange.messages * slowest.latency_s, slowest.bytes_per_s, exchange.row_bytes),
        # Latencies add up, one for each message; the rows' bytes of all messages are counted in one go.
    )


def speeds_of(devices: Sequence[Device]) -> tuple[float, ...]:
    """The devices' speeds, by which ranks share: those at which they read weights, in 1e9 bytes/s."""
    return tuple(device.weight_bandwidth_gb_s or 0.0 for device in devices)


def slowest_link(cluster: Cluster, devices: Sequence[Device]) -> LinkTiming:
    """The longest latency and the lowest rate among any two ranks: every gather waits for the last slice."""
    links = [link_timing(cluster, one.name, other.name, 0.0) for one, other in combinations(devices, 2)]
    return LinkTiming(max(link.latency_s for link in links), min(link.bytes_per_s for link in links), 0.0)


def stage_part(
    device: Device, model: ModelPrice, layers: range, time_scale: float, *, head: bool
) -> DeviceTiming | MeasuredTiming:
    """Times of ``layers`` of ``as_model`` on a device: interpolated from measurements if it has any, else priced."""
    times = device.measured
    if times is None:
        return device_timing(device, model, layers, time_scale, head=head)
    grid = tuple(tuple(time_scale * s for s in line) for line in times.of_stage(model.counts(layers), head=head))
    return MeasuredTiming(times.rows, times.contexts, grid)


def device_timing(device: Device, model: ModelPrice, layers: range, time_scale: float, *, head: bool) -> DeviceTiming:
    """Price ``layers`` of a model on a device; its measured pass, if stated, is the time that all rows share."""
    assert device.compute_tflops is not None
    operation_s = time_scale / (device.compute_tflops * 1e12)
    computing = DeviceTiming(
        fixed_s=0.0,
        weight_s=0.0,
        row_s=operation_s * model.row_operations(layers, head=head),
        pair_s=operation_s * model.pair_operations(layers),
        near_pair_s=operation_s * model.pair_operations(layers, near=True),
        reach=model.reach or 0,
    )
    if device.pass_ms is not None:
        # A measured pass holds the overhead and all that is read, so that fixed_s and the other reading stay 0.
        return msgspec.structs.replace(computing, weight_s=time_scale * device.pass_ms / 1e3)
    assert device.overhead_ms is not None
    assert device.weight_bandwidth_gb_s is not None
    byte_s = time_scale / (device.weight_bandwidth_gb_s * 1e9)
    return msgspec.structs.replace(
        computing,
        fixed_s=time_scale * device.overhead_ms / 1e3,
        weight_s=byte_s * model.weight_bytes(layers, head=head),
        slot_s=byte_s * model.slot_bytes(layers),
        near_slot_s=byte_s * model.slot_bytes(layers, near=True),
        state_s=2 * byte_s * model.state_bytes(layers),  # read and written
    )


def link_timing(cluster: Cluster, one: str, other: str, row_bytes: float) -> LinkTiming:
    """The link between two devices by name, with the bytes of a row on it."""
    link = cluster.link(one, other)
    if link is None:  # both ends are one device: nothing travels
        return LinkTiming(0.0, math.inf, row_bytes)
    return LinkTiming(
        latency_s=cluster.time_scale * link.latency_ms / 1e3,
        bytes_per_s=link.bandwidth_gbit_s * 1e9 / 8 / cluster.time_scale,  # slower where times are stretched
        row_bytes=row_bytes,
    )


# --------------------------------------------------------------------------------------------------------------- memory
# Memory that a device needs: weights, the KV cache, the activations of a batch, and a drafter beside them.

BATCH_ROWS: Final = 512
"""Rows of the largest batch for which memory is counted: a piece of a prompt. A GPU's pieces have no more by default
(``engine.build.GPU_CHUNK``)."""
ROW_STATES: Final = 16
"""Activations of a row, in hidden states: residual, norm, queries to values, and 2 x 3.5 of the feed-forward part."""


class Held(NamedTuple):
    """Bytes that one device holds."""

    weights: float
    cache: float
    activations: float

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: object) -> Held:
        """The bytes of both on one device. Only one of them computes at a time, so activations are not added."""
        assert isinstance(other, Held)
        return Held(self.weights + other.weights, self.cache + other.cache, max(self.activations, other.activations))


def held_by(model: ModelPrice, layers: range, kv_slots: int, *, embedding: bool, head: bool) -> Held:
    """Bytes of ``layers`` of a model, of the KV cache for ``kv_slots`` tokens, and of embedding and head if True."""
    return Held(
        weights=model.weight_bytes(layers, head=head) + (model.embedding_bytes if embedding else 0.0),
        cache=model.held_bytes(layers, kv_slots),
        activations=BATCH_ROWS * ROW_STATES * model.row_bytes,
    )


def held_by_part(
    model: ModelPrice, devices: Sequence[Device], layers: range, kv_slots: int, *, embedding: bool, head: bool
) -> list[Held]:
    """Bytes on each device that has a part of ``layers``: one device holds them whole, a group's ranks their shares."""
    prices = [model] if len(devices) == 1 else rank_prices(model, speeds_of(devices))
    return [held_by(price, layers, kv_slots, embedding=embedding, head=head) for price in prices]


def check_memory(cluster: Cluster, model: ModelPrice) -> None:
    """Raise FieldError, with the numbers, for the first device whose memory does not suffice.

    A drafter, with an embedding of its own, counts on the device that holds it, beside a stage's layers.
    """
    draft = cluster.draft_as_model
    drafting = None
    if draft is not None:
        drafting = held_by(draft, draft.all_layers, cluster.kv_slots, embedding=True, head=True)
    last, entered = cluster.stages[-1].last_device, cluster.stages[0].devices[0]
    for i, (stage, parts) in enumerate(zip(cluster.stages, parts_of(cluster.stages), strict=True)):
        for names, layers in parts:
            devices = [*map(cluster.device, names)]
            # A group's leader has the embedding; the head counts in every rank's price (rank_prices).
            embedding, head = entered in names, last in names
            each = held_by_part(model, devices, layers, cluster.kv_slots, embedding=embedding, head=head)
            what = f"{len(layers)} layers" if len(names) == 1 else f"share of {len(layers)} layers"
            for device, held in zip(devices, each, strict=True):
                where = f"stages[{i}].devices[{stage.devices.index(device.name)}]"
                check_fits(where, device, held, f"its {what}", cluster.kv_slots)
                if drafting is not None and device.name == cluster.drafter:
                    check_fits("drafter", device, held + drafting, f"{what} and the draft model", cluster.kv_slots)
    if drafting is not None and cluster.drafter is not None and cluster.drafting_stage is None:
        check_fits("drafter", cluster.device(cluster.drafter), drafting, "the draft model", cluster.kv_slots)


def check_fits(where: str, device: Device, held: Held, what: str, kv_slots: int) -> None:
    """Raise FieldError at the field ``where`` if a device has less memory than ``held``. ``what``: in words."""
    if device.memory_gb is not None and held.total > device.memory_gb * 1e9:
        parts = f"weights {held.weights / 1e9:.2f}, {kv_slots} tokens of KV {held.cache / 1e9:.2f}"
        numbers = f"{held.total / 1e9:.2f} GB for {what} ({parts}, activations {held.activations / 1e9:.2f})"
        remedy = "give it fewer layers or lower kv_slots"
        raise FieldError(where, f"({device.name!r}) would need {numbers}; it has {device.memory_gb:g} GB: {remedy}")
