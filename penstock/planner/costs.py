"""Times of a cluster's devices and links, and the pieces of a prompt that these times make best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise, product
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cluster.spec import Cluster, Device, ModelPrice
from penstock.cluster.timing import (
    BATCH_ROWS,
    MESSAGE_ROW_BYTES,
    Attended,
    LinkTiming,
    StageTiming,
    check_divisible,
    chunk,
    held_by,
    held_by_part,
    link_timing,
    part_timing,
    slowest_link,
)
from penstock.config import FieldError
from penstock.planner.partition import Problem, Seconds

# --------------------------------------------------------------------------------------------------------------- pieces
# Plans the pieces in which a prompt enters a pipeline of modelled stages, so that its first token is there soonest.
#
# Short pieces keep all stages busy early, but each costs a stage's overhead and one more reading of its weights. As
# attention grows along a text, pieces that take equally long get shorter. Therefore pieces of equal time are tried, for
# many such times, and pieces of equal length; the ends of the best ones are then moved by some blocks while that helps.

BLOCK: Final = 16
"""Tokens of a block of the prefix cache, as ``slots.BLOCK``. All pieces but the last have a multiple of it."""
HEADER_BYTES: Final = 300
"""Bytes of a batch's header without its rows. A plain header has 170, one with the spans of four stages and the nodes
for a drafter 370."""
HEADER_ROW_BYTES: Final = 20
"""Bytes that each row adds to a batch's header. Numbers of five digits take 20."""
FEW: Final = 8
"""Number of blocks up to which all cuts are tried: eight have 128."""
TIMES: Final = 24
"""Number of durations of a piece that are tried, from that of a block to that of the longest piece. More take longer to
try, and lie closer together."""
WORK: Final = 60_000
"""Upper limit of the passes of a piece through a stage that the search may compute. It bounds the time by which a new
text's first batch is later."""
MOVES: Final = 150
"""Upper limit of the changes to the pieces that the search looks at. It bounds the time by which a new text's first
batch is later."""
REMEMBERED: Final = 4096
"""Upper limit of the texts whose pieces a table remembers; the one that was asked for longest ago goes first. It bounds
the table's memory."""

Ends = tuple[int, ...]
"""The number of the text's tokens at which each piece ends."""


class Flow:
    """Pieces on their way: a stage works on one, its neighbour's buffer holds one, and each link carries one."""

    def __init__(self, stages: Sequence[StageTiming], links: Sequence[LinkTiming]) -> None:
        self._stages = stages
        self._links = links
        self._stage_s = lru_cache(maxsize=1 << 17)(self._seconds)

    def _seconds(self, stage: int, rows: int, cached: int) -> float:
        return self._stages[stage].seconds(rows, chunk(rows, cached))

    @property
    def stages(self) -> int:
        return len(self._stages)

    def slowest_s(self, rows: int, cached: int) -> float:
        """Seconds of the slowest stage for ``rows`` tokens behind ``cached`` ones."""
        return max(self._stage_s(stage, rows, cached) for stage in range(self.stages))

    def first_token_s(self, begin: int, ends: Sequence[int]) -> float:
        """Seconds until the last piece has come out of the last stage, and its result has reached the engine.

        A stage says that its buffer is free when it begins a piece, which takes the link's latency to arrive. Its
        output leaves once the next stage has said so, and only then does it begin another piece.
        """
        links, stages = self._links, self.stages
        free = [0.0] * (stages + 1)  # when the buffer before each stage is known to be free; the engine's always is
        left = [0.0] * stages  # when the latest output of each stage began to leave it
        sent = [0.0] * len(links)  # when the last byte of the latest piece has entered each link
        at = 0.0
        for first, last in pairwise((begin, *ends)):
            rows, at = last - first, free[0]
            for i in range(stages):
                link = links[i]
                # Without the latency, which passes while the link carries the next piece.
                sent[i] = max(at, sent[i]) + link.seconds(rows, header_bytes(rows, i)) - link.latency_s
                start = max(sent[i] + link.latency_s, left[i])
                free[i] = start + link.latency_s
                at = left[i] = max(start + self._stage_s(i, rows, first), free[i + 1])
        return at + links[-1].seconds(1)


def header_bytes(rows: int, hop: int) -> int:
    """Bytes beside the hidden states. To the first stage the rows are in the header, and the link prices them."""
    return HEADER_BYTES + (HEADER_ROW_BYTES * rows if hop else 0)


class PieceTable:
    """The pieces of any text behind any cached part of it, for one pipeline; planned when they are first asked for.

    ``known`` holds those that have been planned, by the text's tokens and how many of them are cached.
    """

    def __init__(
        self,
        stages: Sequence[StageTiming],
        links: Sequence[LinkTiming],
        most: int = BATCH_ROWS,
        known: Mapping[tuple[int, int], Ends] | None = None,
    ) -> None:
        self._flow = Flow(stages, links)
        self._most = most
        self._known = dict(known or {})
        self.reckoned = 0
        """Number of texts that were planned here and were not among the ``known`` ones."""

    @property
    def known(self) -> Mapping[tuple[int, int], Ends]:
        """The planned pieces, in the order in which they were last asked for."""
        return self._known

    def ends(self, tokens: int, cached: int = 0) -> Ends:
        """Ends of the pieces that follow a text's ``cached`` first tokens, as numbers of the text's tokens.

        Texts of over 1,024 tokens whose lengths differ by less than 1 in 32 may be cut alike.
        """
        # Lengths are rounded up to a multiple of the step, so that fewer different texts have to be planned.
        step = BLOCK
        while step * 64 < tokens:
            step *= 2
        text = -(-tokens // step) * step, cached
        planned = self._known.pop(text, None)
        if planned is None:
            planned = best_ends(self._flow, cached, text[0], self._most)
            self.reckoned += 1
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
        self._known[text] = planned  # at the end again: the dict is in the order of use
        return (*(end for end in planned if end < tokens), tokens)


def best_ends(flow: Flow, begin: int, tokens: int, most: int) -> Ends:
    """The pieces from ``begin`` on that give the first token soonest: of all cuts, or of those that a search finds."""
    if tokens - begin <= FEW * BLOCK:
        return min(every_cut(begin, tokens, most), key=lambda ends: flow.first_token_s(begin, ends))
    ways = dict.fromkeys([*equal_lengths(begin, tokens, most), *equal_times(flow, begin, tokens, most)])
    best = min(ways, key=lambda ends: flow.first_token_s(begin, ends))
    return moved_about(flow, begin, best, most)


def every_cut(begin: int, tokens: int, most: int) -> Iterator[Ends]:
    """All ways to cut at ends of blocks into pieces of at most ``most`` tokens."""
    blocks = range(begin + BLOCK, tokens, BLOCK)
    for count in range(len(blocks) + 1):
        for cuts in combinations(blocks, count):
            if all(end - first <= most for first, end in pairwise((begin, *cuts, tokens))):
                yield (*cuts, tokens)


def equal_lengths(begin: int, tokens: int, most: int) -> Iterator[Ends]:
    """Pieces of equal lengths, but for the last: a block, two blocks, four, and so on, up to ``most`` tokens."""
    length = BLOCK
    while length <= most:
        yield (*range(begin + length, tokens, length), tokens)
        length *= 2


def equal_times(flow: Flow, begin: int, tokens: int, most: int) -> Iterator[Ends]:
    """Pieces that all take the slowest stage about the same time, as far as blocks allow: one cut for each of TIMES."""
    shortest, longest = flow.slowest_s(BLOCK, begin), flow.slowest_s(most, max(begin, tokens - most))
    for i in range(TIMES):
        limit = shortest * (longest / shortest) ** (i / (TIMES - 1))  # geometric steps
        ends, done = list[int](), begin
        while done < tokens:
            done = min(tokens, done + rows_within(flow, done, limit, most))
            ends.append(done)
        yield tuple(ends)


def rows_within(flow: Flow, cached: int, limit: float, most: int) -> int:
    """Tokens of the most blocks that the slowest stage can compute within ``limit`` seconds, at least of one block."""
    low, high = 1, most // BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if flow.slowest_s(middle * BLOCK, cached) <= limit * (1 + 1e-9):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK


def moved_about(flow: Flow, begin: int, ends: Ends, most: int) -> Ends:
    """The pieces after changes (``changes``), one at a time, as long as one helps."""
    least = flow.first_token_s(begin, ends)
    left = min(MOVES, WORK // (len(ends) * flow.stages))
    better = True
    while better and left > 0:
        better = False
        for changed in changes(begin, ends, most):
            left -= 1
            if left < 0:
                break
            if (found := flow.first_token_s(begin, changed)) < least * (1 - 1e-9):
                ends, least, better = changed, found, True
                break
    return ends


def changes(begin: int, ends: Ends, most: int) -> Iterator[Ends]:
    """Changed pieces: one piece halved, or an end but the last moved by some blocks or removed, none too long."""
    for i, (before, end) in enumerate(pairwise((begin, *ends))):
        if end - before > BLOCK:
            middle = before + max(1, (end - before) // (2 * BLOCK)) * BLOCK
            yield (*ends[:i], middle, *ends[i:])
    for i, end in enumerate(ends[:-1]):
        before, after = (ends[i - 1] if i else begin), ends[i + 1]
        for blocks in (-4, -1, 1, 4):
            moved = end + blocks * BLOCK
            if before < moved < after and max(moved - before, after - moved) <= most:
                yield (*ends[:i], moved, *ends[i + 1 :])
        if after - before <= most:
            yield (*ends[:i], *ends[i + 1 :])


# ---------------------------------------------------------------------------------------------------------------- costs
# Times of a cluster's devices and links for any layers that the devices might be given.

Group = tuple[Device, ...]
"""Devices that hold a stage together: a single one, or the ranks of a tensor parallel group, its leader first."""
MOST_GROUPINGS: Final = 16
"""Upper limit of the ways to join devices into groups that are planned for. Each is planned for on its own."""


class Batch(NamedTuple):
    """The batch that stages are planned for: ``rows`` rows of one text that has ``context`` tokens."""

    rows: int
    context: int

    @property
    def attended(self) -> Attended:
        return Attended(self.rows * self.context, self.context)


def candidates(cluster: Cluster) -> tuple[Device, ...]:
    """The devices that may hold layers: those that hold some in the file, and those that have no other task there.

    Raises FieldError for a device whose times are known only for the layers that it has.
    """
    staged = {name for stage in cluster.stages for name in stage.devices}
    busy = {cluster.drafter, cluster.engine} - staged
    found = []
    for i, device in enumerate(cluster.devices):
        if device.name in busy:
            continue
        if device.pass_ms is not None:
            problem = "holds for layers that no stage of the file states; state them, or weight_bandwidth_gb_s instead"
            raise FieldError(f"devices[{i}].pass_ms", problem)
        if not device.priced:
            raise FieldError(f"devices[{i}]", f"({device.name!r}) has no prices; state them, or remove the device")
        found.append(device)
    return tuple(found)


def groupings(cluster: Cluster, devices: Sequence[Device]) -> Iterator[tuple[Group, ...]]:
    """Ways to join the devices into groups; the first one leaves every device alone.

    Devices of one host that are alike and joined alike are of one kind; kinds of several hosts that have the same
    numbers and links are joined alike. A kind's groups have 2, 4, 8, ... ranks, as many as the model's layers can be
    shared by, and its remaining devices stay alone. Every combination of the kinds' sizes is there, or where these are
    more than MOST_GROUPINGS every size for all kinds alike.
    """
    model = cluster.as_model
    assert model is not None
    kinds: dict[object, dict[str, list[Device]]] = {}
    for kind, members in alike_on_a_host(cluster, devices):
        kinds.setdefault(kind, {})[members[0].host + members[0].name] = members
    sizes = [[1, *sizes_of(model, max(map(len, places.values())))] for places in kinds.values()]
    choices = list(product(*sizes))
    if len(choices) > MOST_GROUPINGS:
        most = max(map(max, sizes))
        choices = [tuple(min(size, one[-1]) for one in sizes) for size in (2**n for n in range(most.bit_length()))]
    order = {device.name: i for i, device in enumerate(devices)}
    for choice in choices:
        found = [
            group
            for size, places in zip(choice, kinds.values(), strict=True)
            for members in places.values()
            for group in in_groups(members, size)
        ]
        yield tuple(sorted(found, key=lambda group: order[group[0].name]))


def alike_on_a_host(cluster: Cluster, devices: Sequence[Device]) -> Iterator[tuple[object, list[Device]]]:
    """(kind, its devices on one host); a kind is a device's numbers and the slowest link between any two of them.

    Only devices whose whole price is known by rates are joined: a measured layer says nothing of a share of it.
    """
    hosts: dict[tuple[object, ...], list[Device]] = {}
    for device in devices:
        by_rates = device.measured is None and device.pass_ms is None
        # The drafter's device has less memory and other work, so that it is unlike every other.
        alone = None if by_rates and device.name != cluster.drafter else device.name
        hosts.setdefault((device.host, numbers_of(device), device.memory_gb, alone), []).append(device)
    for kind, members in hosts.items():
        joined = slowest_link(cluster, members) if len(members) > 1 else None
        yield (*kind[1:], joined), members


def sizes_of(model: ModelPrice, devices: int) -> list[int]:
    """The sizes that groups of at most so many devices may have: 2, 4, 8, ..., while the model can be divided."""
    found = []
    for size in (2**n for n in range(1, devices.bit_length())):
        try:
            check_divisible(model, size, "devices")
        except FieldError:
            break
        found.append(size)
    return found


def in_groups(members: Sequence[Device], size: int) -> Iterator[Group]:
    """Groups of ``size`` neighbours, and each device that is left alone."""
    whole = len(members) - len(members) % size
    yield from (tuple(members[i : i + size]) for i in range(0, whole, size))
    yield from ((device,) for device in members[whole:])


def problem_of(cluster: Cluster, devices: Sequence[Device], batch: Batch) -> Problem:
    """The planning problem for single devices: ``grouped_problem`` without groups."""
    return grouped_problem(cluster, [(device,) for device in devices], batch)


def grouped_problem(cluster: Cluster, groups: Sequence[Group], batch: Batch) -> Problem:
    """The planning problem in which each group is a device, whatever stages the file has.

    A link is busy until the next batch can arrive over it. A stage asks for the next batch when it begins one: the
    question takes the link's latency, and so does the batch. A group's messages are those of its leader.
    """
    model = cluster.as_model
    assert model is not None
    tables: dict[object, Seconds] = {}
    for group in groups:
        if kind_of(cluster, group) not in tables:
            tables[kind_of(cluster, group)] = stage_table(cluster, model, group, batch)
    stage_s = np.stack([tables[kind_of(cluster, group)] for group in groups])
    for n, group in enumerate(groups):
        stage_s[n][~holdable(cluster, model, group)] = math.inf
    leaders = [group[0] for group in groups]
    ends = [link_timing(cluster, cluster.engine, device.name, MESSAGE_ROW_BYTES) for device in leaders]
    end_s, end_busy_s = (np.array([taken(link, batch) for link in ends]) for taken in (crossing, busy))
    hop_s, hop_busy_s = (np.zeros((len(groups), len(groups))) for _ in range(2))
    for (i, one), (j, two) in combinations(enumerate(leaders), 2):
        link = link_timing(cluster, one.name, two.name, model.row_bytes)
        hop_s[i, j] = hop_s[j, i] = crossing(link, batch)
        hop_busy_s[i, j] = hop_busy_s[j, i] = busy(link, batch)
    return Problem(
        stage_s=stage_s,
        hop_s=hop_s,
        hop_busy_s=hop_busy_s,
        **{f"{way}_s": end_s for way in ("enter", "leave")},
        **{f"{way}_busy_s": end_busy_s for way in ("enter", "leave")},
    )


def numbers_of(device: Device) -> Device:
    """The device without what its times do not depend on: equal for devices that are alike."""
    return replace(device, name="any", host="", kind=None, memory_gb=None)


def kind_of(cluster: Cluster, group: Group) -> object:
    """All that a group's times depend on: its devices' numbers, and the link between them."""
    return tuple(map(numbers_of, group)), slowest_link(cluster, group) if len(group) > 1 else None


def crossing(link: LinkTiming, batch: Batch) -> float:
    """Seconds until a batch has arrived over a link."""
    return link.seconds(batch.rows)


def busy(link: LinkTiming, batch: Batch) -> float:
    """Seconds until the next batch can arrive over a link: the batch's own and those of the question for the next."""
    return link.seconds(batch.rows) + link.latency_s


def stage_table(cluster: Cluster, model: ModelPrice, group: Group, batch: Batch) -> Seconds:
    """[L + 1, L + 1]: seconds for layers i to j - 1, with the head if j is L; infinite for no layer."""

    def seconds(layers: range, *, head: bool) -> float:
        return part_timing(cluster, model, group, layers, head=head).seconds(batch.rows, batch.attended)

    return by_range(model, lambda layers: seconds(layers, head=layers.stop == model.layers))


def by_range(model: ModelPrice, value: Callable[[range], float]) -> Seconds:
    """[L + 1, L + 1]: the ``value`` of layers i to j - 1, infinite for none.

    It is asked for once for each mix of kinds of layers; that may begin with the first layer or end with the last one.
    """
    table: Seconds = np.full((model.layers + 1, model.layers + 1), math.inf)
    known: dict[object, float] = {}
    for i, j in combinations(range(model.layers + 1), 2):
        # The first and the last layer count, since the embedding and the head are held with them.
        mix = model.counts(range(i, j)), i == 0, j == model.layers
        if mix not in known:
            known[mix] = value(range(i, j))
        table[i, j] = known[mix]
    return table


def holdable(cluster: Cluster, model: ModelPrice, group: Group) -> npt.NDArray[np.bool_]:
    """[L + 1, L + 1]: whether every device has the memory for its part of layers i to j - 1, and of the drafter where
    it drafts."""
    draft = cluster.draft_as_model
    if all(device.memory_gb is None for device in group):
        return np.full((model.layers + 1, model.layers + 1), True)

    def excess(layers: range) -> float:
        """Bytes that the device with the least room to spare lacks; 0 or below where all have room."""
        embedding, head = layers.start == 0, layers.stop == model.layers
        each, lacking = held_by_part(model, group, layers, cluster.kv_slots, embedding=embedding, head=head), -math.inf
        for device, held in zip(group, each, strict=True):
            if draft is not None and device.name == cluster.drafter:
                held += held_by(draft, draft.all_layers, cluster.kv_slots, embedding=True, head=True)
            if device.memory_gb is not None:
                lacking = max(lacking, held.total - device.memory_gb * 1e9)
        return lacking

    return by_range(model, excess) <= 0


def shortage(cluster: Cluster, devices: Sequence[Device]) -> str:
    """The reason why no plan fits: the memory that the model needs and that these devices have, in GB."""
    model = cluster.as_model
    assert model is not None
    whole = held_by(model, model.all_layers, cluster.kv_slots, embedding=True, head=True)
    each = [held_by(model, range(i, i + 1), cluster.kv_slots, embedding=False, head=False) for i in model.all_layers]
    layer = max(each, key=lambda one: one.weights + one.cache)
    have = ", ".join(f"{one.name} {round(one.memory_gb, 2):g}" for one in devices if one.memory_gb is not None)
    which = "the largest" if model.kinds else "a"
    return (
        f"the model needs {whole.total / 1e9:.2f} GB (weights {whole.weights / 1e9:.2f}, {cluster.kv_slots} tokens of "
        f"KV {whole.cache / 1e9:.2f}), {which} layer {(layer.weights + layer.cache) / 1e9:.2f}; devices have, in GB: "
        f"{have}"
    )
