"""The objects of a cluster file: devices, links and stages, the prices of models, and measured times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, combinations, pairwise, product
from typing import Final

from penstock.config import FieldError, check, check_positive
from penstock.core import MOST_THREADS

# --------------------------------------------------------------------------------------------------------------- prices
# Prices of models: parameters to read, operations per row, attention by context, bytes per row on a link.
#
# A pass over a batch reads every weight once and does two operations (multiply, add) per weight and row. Attention
# takes four per element of a row's queries and token that the row sees (scores, then the weighted sum of values). The
# keys and values of every token that any row of the batch sees are read once.


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Sizes of the layers of one kind, in a model whose layers differ. A size that is None is the model's own.

    In a hybrid most layers carry a state in place of keys and values (``attention_size`` 0, ``state_bytes``), in many
    models most layers see only a window (``reach``), and in some the first feed-forward networks are no mixtures of
    experts (``layer_parameters``). Fields mean what they mean in ``ModelPrice``. Raises FieldError for a number out of
    range.
    """

    layer_parameters: int | None = None
    attention_size: int | None = None
    key_value_size: int | None = None
    reach: int | None = None
    """Most tokens that a row sees; None: all before it."""
    state_bytes: float = 0.0
    """Bytes of the state that a layer carries along, read and written for every row, and held for every slot."""
    held_slots: int | None = None
    """Tokens whose keys and values, or states, a layer holds at most; None: those of all slots."""

    def __post_init__(self) -> None:
        check_positive(self, "layer_parameters", "reach", "held_slots")
        check_positive(self, "attention_size", "key_value_size", "state_bytes", or_zero=True)


@dataclass(frozen=True, kw_only=True)
class ModelPrice:
    """A model's sizes; ``as_model`` in a cluster file names one of PRICES or holds these fields.

    Methods take layers as a range of their numbers, from 0 on, since not every layer need be like the others. Raises
    FieldError for a number out of range, and for heads or kinds that do not go together.
    """

    layers: int
    """Number of layers."""
    hidden_size: int
    """Elements of a row's hidden state."""
    layer_parameters: int
    """Number of weights of one layer that a pass reads; in a mixture of experts, only those that a batch touches."""
    head_parameters: int
    """Number of weights of the final norm and the output projection, which the last stage reads."""
    embedding_parameters: int = 0
    """Number of weights of the input embedding: memory on the first device, but no time, since a pass looks up a line
    per row."""
    bytes_per_parameter: float = 2.0
    """Bytes of one weight, in memory and as it is read."""
    activation_bytes: float = 2.0
    """Bytes of one element of a hidden state on a link."""
    attention_size: int | None = None
    """Elements of a row's queries in one layer, all heads together; None: hidden_size; 0: a model without attention."""
    key_value_size: int | None = None
    """Elements of a token's keys in one layer, and of its values; None: attention_size (every head has its own)."""
    cache_bytes: float | None = None
    """Bytes of one element of the KV cache; None: activation_bytes."""
    key_value_heads: int | None = None
    """KV groups of a layer: heads of queries that share keys and values, which no two ranks of a tensor parallel stage
    can divide. None: unknown, and the model cannot be split by tensors."""
    intermediate_size: int | None = None
    """Elements of the opened row, which ``down`` reads; None: unknown, and the model cannot be split by tensors."""
    gathered_bytes: float | None = None
    """Bytes of one element of what enters ``o`` and ``down`` where ranks gather it; None: activation_bytes. With int8
    and int4 it is 1.125: the eight bits in which these formats multiply, and a 32-bit scale for 32 neighbours."""
    kinds: tuple[LayerKind, ...] = ()
    """The kinds of layers that there are; empty where all are alike."""
    pattern: tuple[int, ...] = ()
    """The kind of each layer, an index into ``kinds``; repeated from the beginning until every layer has one."""

    def __post_init__(self) -> None:
        check_positive(self, "layers", "hidden_size", "layer_parameters", "bytes_per_parameter", "activation_bytes")
        check_positive(self, "head_parameters", "embedding_parameters", or_zero=True)
        check_positive(self, "attention_size", "key_value_size", or_zero=True)
        check_positive(self, "cache_bytes", "key_value_heads", "intermediate_size", "gathered_bytes")
        for name, size in (("attention_size", self.queries), ("key_value_size", self.keys)):
            heads = self.key_value_heads
            check(heads is None or size % heads == 0, name, size, f"a multiple of key_value_heads, {heads}")
        self._check_kinds()

    def _check_kinds(self) -> None:
        wanted = f"places in kinds, which has {len(self.kinds)}, and none where kinds is empty"
        known = all(0 <= kind < len(self.kinds) for kind in self.pattern)
        check(known and bool(self.pattern) == bool(self.kinds), "pattern", list(self.pattern), wanted)
        # DeviceTiming has one ``reach`` for all of a device's layers, so that one model cannot have two.
        reaches = {kind.reach for kind in self.kinds} - {None}
        check(len(reaches) < 2, "kinds", sorted(filter(None, reaches)), "of one reach, where some have one")

    def weight_bytes(self, layers: range, *, head: bool) -> float:
        """Bytes of weights that a device with ``layers`` reads per pass."""
        return self.read_parameters(layers, head=head) * self.bytes_per_parameter

    def row_operations(self, layers: range, *, head: bool) -> float:
        """Floating-point operations per row on a device with ``layers``, without those of attention and states."""
        return 2.0 * self.read_parameters(layers, head=head)

    def read_parameters(self, layers: range, *, head: bool) -> int:
        """Parameters that a pass over ``layers`` reads once, and those of the head if ``head`` is True."""
        read = sum(count * each.layer_parameters for each, count in self._of_kinds(layers))
        return read + (self.head_parameters if head else 0)

    def pair_operations(self, layers: range, *, near: bool = False) -> float:
        """Floating-point operations of attention per pair of a row and a token that it sees.

        ``near``: only layers whose rows see ``reach`` tokens at most; otherwise only those whose rows see all.
        """
        return sum(4.0 * count * each.queries for each, count in self._of_kinds(layers, near=near))

    def slot_bytes(self, layers: range, *, near: bool = False) -> float:
        """Bytes of one token's keys and values on a device with ``layers``; ``near`` as in ``pair_operations``."""
        return sum(count * each._token_bytes for each, count in self._of_kinds(layers, near=near))

    def state_bytes(self, layers: range) -> float:
        """Bytes of one row's states on a device with ``layers``."""
        return sum(count * self.kinds[kind].state_bytes for kind, count in enumerate(self.counts(layers)) if self.kinds)

    def held_bytes(self, layers: range, slots: int) -> float:
        """Bytes of keys, values and states that a device with ``layers`` holds for ``slots`` tokens."""
        if not self.kinds:
            return slots * self.slot_bytes(layers)
        held = 0.0
        # A window's layers hold a bounded number of tokens and a recurrent layer a bounded number of states, so that
        # ``slots`` counts only up to ``held_slots``.
        for kind, each, count in zip(self.kinds, self._by_kind, self.counts(layers), strict=True):
            kept = slots if kind.held_slots is None else min(slots, kind.held_slots)
            held += count * kept * (each._token_bytes + kind.state_bytes)
        return held

    def counts(self, layers: range) -> tuple[int, ...]:
        """The number of ``layers`` of each kind, [kinds]; one number where all are alike.

        Two ranges that give the same numbers take the same time and hold the same bytes.
        """
        if not self.kinds:
            return (len(layers),)
        # A difference of prefix sums: planners ask for thousands of ranges of the same model.
        return tuple(before[layers.stop] - before[layers.start] for before in self._layers_before)

    @property
    def all_layers(self) -> range:
        """Every layer's number, 0 to ``layers`` - 1."""
        return range(self.layers)

    @property
    def reach(self) -> int | None:
        """Tokens that a row sees at most in layers that have a window; None where none has one."""
        return next((kind.reach for kind in self.kinds if kind.reach is not None), None)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each layer, all 0 where they are alike."""
        return tuple(self.pattern[i % len(self.pattern)] if self.pattern else 0 for i in range(self.layers))

    @cached_property
    def _layers_before(self) -> tuple[tuple[int, ...], ...]:
        """[kinds][layers + 1]: how many of the layers before each one are of the kind."""
        return tuple(
            tuple(accumulate((one == kind for one in self.layer_kinds), initial=0)) for kind in range(len(self.kinds))
        )

    def of_kind(self, kind: int) -> ModelPrice:
        """The model as it would be if all its layers were of this kind, with no bound on how many there are."""
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> tuple[ModelPrice, ...]:
        names = ("layer_parameters", "attention_size", "key_value_size")
        # Heads are checked against the model's own sizes, and a kind need not have any.
        alike = replace(self, kinds=(), pattern=(), key_value_heads=None)
        own = [{name: size for name in names if (size := getattr(kind, name)) is not None} for kind in self.kinds]
        return tuple(replace(alike, **sizes) for sizes in own)

    def _of_kinds(self, layers: range, *, near: bool | None = None) -> Iterator[tuple[ModelPrice, int]]:
        """(the model as if all layers were of the kind, how many are), for each kind.

        ``near`` True: only kinds with a reach; False: only kinds without one; None: all kinds.
        """
        if not self.kinds:
            # Every layer sees all tokens before it, so that none is near.
            return iter(() if near else ((self, len(layers)),))
        each = zip(self.kinds, self._by_kind, self.counts(layers), strict=True)
        return ((model, count) for kind, model, count in each if near in (None, kind.reach is not None))

    @property
    def _token_bytes(self) -> float:
        """Bytes of one token's keys and values in one layer, where all are alike."""
        return 2.0 * self.keys * (self.activation_bytes if self.cache_bytes is None else self.cache_bytes)

    @property
    def queries(self) -> int:
        """Elements of a row's queries in one layer, all heads together."""
        return self.hidden_size if self.attention_size is None else self.attention_size

    @property
    def keys(self) -> int:
        """Elements of a token's keys in one layer, all heads together."""
        return self.queries if self.key_value_size is None else self.key_value_size

    @property
    def embedding_bytes(self) -> float:
        """Bytes of the input embedding."""
        return self.embedding_parameters * self.bytes_per_parameter

    @property
    def row_bytes(self) -> float:
        """Bytes of one row's hidden state between two stages."""
        return self.hidden_size * self.activation_bytes


def llama(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    key_value: int,
    vocabulary: int,
    bits: int,
    key_value_heads: int | None = None,
    tied: bool = False,
) -> ModelPrice:
    """Price a Llama-shaped model from its config.json.

    A layer has query and output projections (hidden x hidden), key and value (hidden x key_value), gate, up and down
    (hidden x intermediate), and two norms. ``tied``: the head is the embedding, held once where one device has both.
    ``bits=4``: blocks of 64 weights share a 32-bit scale, 4.5 bits a weight (Dettmers et al., QLoRA, section 3), and
    hidden states have 16 bits. Head and embedding are counted in the same bits, though bitsandbytes leaves them in 16.
    Raises FieldError for other ``bits`` than 4, 16 and 32.
    """
    check(bits in (4, 16, 32), "bits", bits, "4, 16 or 32")
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    return ModelPrice(
        layers=layers,
        hidden_size=hidden,
        layer_parameters=attention + 3 * hidden * intermediate + 2 * hidden,
        head_parameters=vocabulary * hidden + hidden,
        embedding_parameters=0 if tied else vocabulary * hidden,
        bytes_per_parameter=(4.5 if bits == 4 else bits) / 8,
        activation_bytes=max(bits, 16) / 8,
        key_value_size=key_value,
        key_value_heads=key_value_heads,
        intermediate_size=intermediate,
    )


def eagle(target: ModelPrice) -> ModelPrice:
    """Price an EAGLE head of a Llama-shaped target, in fp16 (Li et al., EAGLE, section 3; EAGLE-2 has the same).

    A layer like the target's behind ``fc`` (2 hidden -> hidden), whose bias makes up for the input norm that the layer
    lacks; then a copy of the target's output projection, without a norm, and of its embedding.
    """
    hidden = target.hidden_size
    return ModelPrice(
        layers=1,
        hidden_size=hidden,
        layer_parameters=target.layer_parameters + 2 * hidden * hidden,
        head_parameters=target.head_parameters - hidden,
        embedding_parameters=target.embedding_parameters,
        attention_size=target.attention_size,
        key_value_size=target.key_value_size,
    )


def medusa_head(target: ModelPrice) -> ModelPrice:
    """Price one Medusa head of a Llama-shaped target, in fp16 (Cai et al., Medusa, section 2.1.1).

    A residual block (hidden x hidden and a bias) and an output projection of its own. Each head drafts one depth, as a
    pass of the engine's drafter does, so that one head is the price of a pass.
    """
    hidden = target.hidden_size
    return ModelPrice(
        layers=1,
        hidden_size=hidden,
        layer_parameters=hidden * hidden + hidden,
        head_parameters=target.head_parameters - hidden,
        attention_size=0,
    )


# meta-llama/Llama-3.1-70B config.json: 80 x 855,654,400 + 2 x 1,050,673,152 + 8,192 = 70.55e9 parameters.
llama_70b = partial(
    llama, layers=80, hidden=8192, intermediate=28672, key_value=1024, key_value_heads=8, vocabulary=128256
)
# meta-llama/Llama-2-7b config.json: 32 x 202,383,360 + 2 x 131,072,000 + 4,096 = 6.738e9 parameters.
llama_7b = partial(
    llama, layers=32, hidden=4096, intermediate=11008, key_value=4096, key_value_heads=32, vocabulary=32000
)
# meta-llama/Llama-2-13b config.json: 40 x 317,204,480 + 2 x 163,840,000 + 5,120 = 13.016e9 parameters.
llama_13b = partial(
    llama, layers=40, hidden=5120, intermediate=13824, key_value=5120, key_value_heads=40, vocabulary=32000
)

PRICES: Final[dict[str, ModelPrice]] = {
    "llama-3.1-70b-fp32": llama_70b(bits=32),
    "llama-3.1-70b-bf16": llama_70b(bits=16),
    "llama-2-7b-fp16": llama_7b(bits=16),
    "llama-2-7b-4bit": llama_7b(bits=4),
    "llama-2-13b-4bit": llama_13b(bits=4),
    # meta-llama/Llama-3.2-1B config.json: 16 x 60,821,504 + 262,668,288 (tied) + 2,048 = 1.236e9 parameters.
    "llama-3.2-1b-fp32": llama(
        layers=16,
        hidden=2048,
        intermediate=8192,
        key_value=512,
        key_value_heads=8,
        vocabulary=128256,
        bits=32,
        tied=True,
    ),
    # TinyLlama/TinyLlama_v1.1 config.json: 22 x 44,044,288 + 2 x 65,536,000 + 2,048 = 1.100e9 parameters.
    "tinyllama-1.1b-fp16": llama(
        layers=22, hidden=2048, intermediate=5632, key_value=256, key_value_heads=4, vocabulary=32000, bits=16
    ),
    # JackFram/llama-160m config.json: 12 x 9,438,720 + 2 x 24,576,000 + 768 = 0.162e9 parameters.
    "llama-160m-fp16": llama(
        layers=12, hidden=768, intermediate=3072, key_value=768, key_value_heads=12, vocabulary=32000, bits=16
    ),
    # 202,383,360 + 2 x 4,096 x 4,096 = 235,937,792, and the target's 2 x 131,072,000 (yuhuili/EAGLE-llama2-chat-7B).
    "eagle-llama-2-7b-fp16": eagle(llama_7b(bits=16)),
    # 317,204,480 + 2 x 5,120 x 5,120 = 369,633,280, and the target's 2 x 163,840,000 (yuhuili/EAGLE-llama2-chat-13B).
    "eagle-llama-2-13b-fp16": eagle(llama_13b(bits=16)),
    # 855,654,400 + 2 x 8,192 x 8,192 = 989,872,128, and 2 x 1,050,673,152 (yuhuili/EAGLE-LLaMA3-Instruct-70B).
    "eagle-llama-3.1-70b-bf16": eagle(llama_70b(bits=16)),
    # 4,096 x 4,096 + 4,096 + 131,072,000 = 147,853,312 (FasterDecoding/medusa-vicuna-7b-v1.3, one of its heads).
    "medusa-head-llama-2-7b-fp16": medusa_head(llama_7b(bits=16)),
}
"""The models that cluster files may name, at the precision in the name."""


# ------------------------------------------------------------------------------------------------------------- measured
# Measured times of a model's layers on a device, and interpolation between the measurements.

Grid = tuple[tuple[float, ...], ...]
"""[rows][contexts]: times of a batch of so many rows behind so many tokens."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Milliseconds of a batch by its number of ``rows`` and by the tokens before it, its ``contexts``.

    A stage takes ``stage_ms`` beside its layers, and ``head_ms`` if it has the head, with a token picked for every row.
    Raises FieldError where lists are not of one length, do not rise, or hold a negative number.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    layer_ms: Grid
    """[rows][contexts]: milliseconds of one layer, the mean of all."""
    stage_ms: tuple[float, ...]
    """[rows]: milliseconds of a stage beside its layers."""
    head_ms: tuple[float, ...]
    """[rows]: milliseconds of the head."""
    kind_ms: tuple[Grid, ...] = ()
    """[kinds][rows][contexts]: milliseconds of one layer of each of the model's kinds; empty: all take ``layer_ms``."""

    def __post_init__(self) -> None:
        for name in ("rows", "contexts"):
            values = getattr(self, name)
            rising = bool(values) and values[0] >= 0 and all(one < two for one, two in pairwise(values))
            check(rising, name, list(values), "numbers from 0 on, each larger than the one before")
        for name in ("stage_ms", "head_ms"):
            found = len(getattr(self, name))
            check(found == len(self.rows), name, found, f"as long as rows, {len(self.rows)}")
        grids = {"layer_ms": self.layer_ms} | {f"kind_ms[{kind}]": grid for kind, grid in enumerate(self.kind_ms)}
        for name, grid in grids.items():
            check(len(grid) == len(self.rows), name, len(grid), f"as long as rows, {len(self.rows)}")
            for i, line in enumerate(grid):
                check(len(line) == len(self.contexts), f"{name}[{i}]", len(line), "as long as contexts")
        every = [*self.stage_ms, *self.head_ms, *(ms for grid in grids.values() for line in grid for ms in line)]
        check(min(every) >= 0, "layer_ms", min(every), "0 or above, as stage_ms, head_ms and kind_ms")

    def of_stage(self, layers: Sequence[int], *, head: bool) -> Grid:
        """[rows][contexts]: seconds of a stage whose number of layers of each kind is given (``ModelPrice.counts``)."""
        times, counts = (self.kind_ms, layers) if self.kind_ms else ((self.layer_ms,), (sum(layers),))
        beside = [stage + head * last for stage, last in zip(self.stage_ms, self.head_ms, strict=True)]
        return tuple(
            tuple(
                (ms + sum(count * grid[i][j] for count, grid in zip(counts, times, strict=True))) / 1e3
                for j in range(len(self.contexts))
            )
            for i, ms in enumerate(beside)
        )


def mean_grid(grids: Sequence[Grid], counts: Sequence[int]) -> Grid:
    """The mean of the grids, [rows][contexts], weighted by ``counts``."""
    return tuple(
        tuple(
            sum(count * ms for count, ms in zip(counts, each, strict=True)) / sum(counts)
            for each in zip(*lines, strict=True)
        )
        for lines in zip(*grids, strict=True)
    )


def between(places: Sequence[int], at: float) -> tuple[int, int, float]:
    """The indices of the two grid points around ``at``, and the weight of the second one, for interpolation.

    The weight is 0 at the first point and 1 at the second. Outside of the grid the two outermost points are returned,
    with a weight below 0 or above 1: the line through them is extended.
    """
    if len(places) == 1:
        return 0, 0, 0.0
    # From 1 to the last index: outside of the grid the outermost pair serves, and its line is extended.
    high = min(max(bisect_right(places, at), 1), len(places) - 1)
    low = high - 1
    return low, high, (at - places[low]) / (places[high] - places[low])


def interpolated(rows: Sequence[int], contexts: Sequence[int], grid: Grid, x: float, y: float) -> float:
    """The value of ``grid`` at ``x`` rows behind ``y`` tokens, linear between the nearest four; never below 0."""
    one, two, down = between(rows, x)
    left, right, across = between(contexts, y)
    # A line that falls towards small batches may cross 0 when it is extended, hence the bound below.
    # Along the contexts in the two rows of the grid, then between these.
    upper = grid[one][left] + across * (grid[one][right] - grid[one][left])
    lower = grid[two][left] + across * (grid[two][right] - grid[two][left])
    return max(0.0, upper + down * (lower - upper))


# ----------------------------------------------------------------------------------------------------------------- spec
# A cluster: devices, the links between them, and where each stage, the drafter and the engine run.
#
# These are the checked, resolved types; ``load.py`` makes them from a TOML file, a preset, a seed or ``local-N``.

HERE: Final = "localhost"
"""The name of the host on which a command is started."""
KV_SLOTS: Final = 4096
"""Tokens of KV cache for which a stage has memory, unless the file says otherwise. An engine sets aside no fewer by
default (``engine.resolve.DEFAULT_MODEL_LEN``)."""
LAYERS, TENSORS = "layers", "tensors"
SPLITS: Final = (LAYERS, TENSORS)
"""How several devices share a stage: one behind the other, each with layers of its own, or side by side as the ranks of
a tensor parallel group, each with a share of every layer."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Numbers that devices of one kind share. All but the first two are for emulated devices.

    Raises FieldError for a number that is not above 0; ``overhead_ms`` may be 0.
    """

    memory_gb: float | None = None
    """Memory for weights and cache, in 1e9 bytes; None: unknown, and not checked."""
    threads: int | None = None
    """Threads that compute on a real device; None: an equal part of the cores of its host."""
    weight_bandwidth_gb_s: float | None = None
    """Effective rate at which a pass reads weights, in 1e9 bytes/s."""
    compute_tflops: float | None = None
    """Effective rate of a pass over many rows, in 1e12 operations/s."""
    overhead_ms: float | None = None
    """Fixed milliseconds per batch, whatever its rows."""
    pass_ms: float | None = None
    """Measured milliseconds of a pass over a batch, in place of weight_bandwidth_gb_s and overhead_ms."""

    def __post_init__(self) -> None:
        check_positive(self, "memory_gb", "weight_bandwidth_gb_s", "compute_tflops", "pass_ms")
        check_positive(self, "overhead_ms", or_zero=True)
        check(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")
        most = self.threads is None or self.threads <= MOST_THREADS
        check(most, "threads", self.threads, f"at most {MOST_THREADS}")


@dataclass(frozen=True, kw_only=True)
class Device(DeviceKind):
    """One device. It takes each number that it does not state from its ``kind`` in the file's table of kinds."""

    name: str
    """The device's name, by which stages and links know it."""
    host: str = HERE
    """Its host: HOST or HOST:PORT of a worker, or any word where devices are emulated."""
    kind: str | None = None
    """Name of its kind in the file's table ``kinds``; None: it states all numbers itself."""
    measured: LayerTimes | None = None
    """Measured times of ``as_model``'s layers on this device; its other numbers price other models there."""

    @property
    def priced(self) -> bool:
        """Whether every number that emulation needs is there."""
        made_of = (self.weight_bandwidth_gb_s, self.overhead_ms)
        return self.compute_tflops is not None and (self.pass_ms is not None or None not in made_of)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two devices. Raises FieldError for a rate that is not above 0 and for a negative latency."""

    bandwidth_gbit_s: float
    """Rate in 1e9 bits/s of payload."""
    latency_ms: float
    """Milliseconds until the first byte arrives."""

    def __post_init__(self) -> None:
        check_positive(self, "bandwidth_gbit_s")
        check_positive(self, "latency_ms", or_zero=True)


@dataclass(frozen=True, kw_only=True)
class LinkBetween(Link):
    """A link that differs from the default. ``ends``: two names, each a device's or a host's; both directions."""

    ends: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.ends) == 2, "ends", list(self.ends), "two names of devices or hosts")


@dataclass(frozen=True, kw_only=True)
class Links:
    """``local`` joins devices of one host, ``network`` those of different hosts, unless ``between`` names them.

    A link that is None joins no devices, and a file that needs it is refused.
    """

    local: Link | None = None
    network: Link | None = None
    between: tuple[LinkBetween, ...] = ()
    exclusive: bool = False
    """Whether a device sends or receives hidden states of one batch at a time (PipeDec, algorithms 2 and 3): a transfer
    begins when both its ends are free. For simulations only."""

    def find(self, one: Device, other: Device) -> Link:
        """The link of two different devices; a device's name wins over its host's. Raises FieldError for none."""
        named = {frozenset(link.ends): link for link in self.between}
        for ends in product((one.name, one.host), (other.name, other.host)):  # names before hosts
            if frozenset(ends) in named:
                return named[frozenset(ends)]
        field, link = ("local", self.local) if one.host == other.host else ("network", self.network)
        if link is None:
            raise FieldError(f"links.{field}", f"is missing: {one.name!r} and {other.name!r} have to be joined")
        return link


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The devices that hold a stage, in order; a stage takes one batch at a time (PipeDec's groups, section 3.1).

    ``layers`` is the number of ``as_model``'s layers with which each device is priced; empty where nothing is emulated.
    With ``split`` "tensors" the devices are ranks, which the first one leads, and ``layers`` has one number for all.
    """

    devices: tuple[str, ...]
    layers: tuple[int, ...] = ()
    split: str = LAYERS

    @property
    def tensor_parallel(self) -> bool:
        """Whether the stage's devices are the ranks of a tensor parallel group."""
        return self.split == TENSORS

    @property
    def last_device(self) -> str:
        """The device that sends the stage's states on: the last one, or a group's leader."""
        return self.devices[0] if self.tensor_parallel else self.devices[-1]

    def parts(self, first: int) -> list[tuple[tuple[str, ...], range]]:
        """(devices, layers) of each part of the stage that computes in its turn: a device, or a whole group of ranks.

        ``first``: the number of the stage's first layer.
        """
        names = [self.devices] if self.tensor_parallel else [(name,) for name in self.devices]
        ends = [*accumulate(self.layers, initial=first)]
        return [(some, range(begin, end)) for some, (begin, end) in zip(names, pairwise(ends), strict=True)]

    @property
    def inner_hops(self) -> list[tuple[str, str]]:
        """The pairs of its devices that exchange messages: neighbours in sequence, or any two ranks."""
        return list(combinations(self.devices, 2) if self.tensor_parallel else pairwise(self.devices))


def parts_of(stages: Sequence[Stage]) -> list[list[tuple[tuple[str, ...], range]]]:
    """``Stage.parts`` of each of these stages, which hold a model's layers in order, from the first one on."""
    firsts = accumulate((sum(stage.layers) for stage in stages), initial=0)
    return [stage.parts(first) for stage, first in zip(stages, firsts, strict=False)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A valid cluster, which ``load_cluster`` makes. Every name in it is that of a device in ``devices``.

    Times of emulated devices are modelled (``as_model``); real devices take as long as they take.
    """

    name: str
    description: str = ""
    devices: tuple[Device, ...]
    links: Links
    stages: tuple[Stage, ...]
    engine: str
    """Device on whose host the engine runs; of a real cluster the host where the command is started."""
    drafter: str | None = None
    """Device of a drafter with weights; None: nothing drafts, or with real devices the drafter is with the engine."""
    as_model: ModelPrice | None = None
    """Emulation: the model that the stages are priced as. None means that nothing is emulated."""
    draft_as_model: ModelPrice | None = None
    """Emulation: the model that the drafter is priced as; None without a drafter."""
    draft_pass_ms: float | None = None
    """Measured milliseconds of one of the drafter's passes, on any device; None: priced by ``draft_as_model``."""
    time_scale: float = 1.0
    """Factor on every modelled time, above 0; for hosts that are too slow for 1."""
    kv_slots: int = KV_SLOTS
    """Tokens whose keys and values every stage has to have room for."""

    @property
    def emulated(self) -> bool:
        """Whether the stages' times are modelled, instead of devices that compute."""
        return self.as_model is not None

    def device(self, name: str) -> Device:
        """The device of this name, which the cluster must have."""
        return next(device for device in self.devices if device.name == name)

    def link(self, one: str, other: str) -> Link | None:
        """The link between two devices; None between a device and itself."""
        return None if one == other else self.links.find(self.device(one), self.device(other))

    @property
    def drafting_stage(self) -> int | None:
        """The stage with which the drafter shares a device; None where it has one of its own, or the engine's."""
        return next((i for i, stage in enumerate(self.stages) if self.drafter in stage.devices), None)

    def route(self) -> list[tuple[str, str]]:
        """The hops of a batch: engine to first stage, stage to stage, last stage to engine."""
        stops = [(stage.devices[0], stage.last_device) for stage in self.stages]
        enters = [first for first, _ in stops] + [self.engine]
        leaves = [self.engine] + [last for _, last in stops]
        return list(zip(leaves, enters, strict=True))

    def hops(self) -> list[tuple[str, str]]:
        """Every pair of devices that exchange messages: the route, inside the stages, engine and drafter."""
        inside = [pair for stage in self.stages for pair in stage.inner_hops]
        return self.route() + inside + ([(self.engine, self.drafter)] if self.drafter else [])
