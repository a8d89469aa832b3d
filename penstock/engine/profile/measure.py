"""Measures the layers of a model on a device, and the memory that they take."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import Any, Final

from penstock.checkpoint.look import key_groups
from penstock.cluster.spec import LayerKind, LayerTimes, ModelPrice
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.build import stage_plans
from penstock.engine.options import EngineOptions
from penstock.engine.profile.solve import layer_times, parts_of
from penstock.engine.profile.store import DeviceKey, DeviceProfile, ProfileStore, digest_of
from penstock.engine.resolve import Resolved, resolve_options
from penstock.files import DTYPE_BYTES
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fleet import FleetExecutor
from penstock.hosts.placement import HERE, device_on, in_gb, in_plans
from penstock.hosts.weights import Held
from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, Sampling
from penstock.pipeline.base import Executor, StagePlan, StartedPipeline

# ----------------------------------------------------------------------------------------------------------------- text
# Batches of one text for stages that serve nobody else: tokens that stay, and rows that are only tried.

REQUEST: Final = 1
"""The number of the only request."""


class MeasuredText:
    """A text that repeats the ``given`` tokens, or has arbitrary ones below ``vocab_size``; slots are its positions.

    ``advance`` and ``attempt`` give batches, which have to be submitted in the order in which they were asked for.
    """

    def __init__(self, vocab_size: int, given: Sequence[int] = ()) -> None:
        self.tokens = 0
        """Tokens that have entered for good."""
        self._vocab_size = vocab_size
        self._given = given
        self._told = 0
        self._stream = 0
        self._nodes = 0

    def advance(self, rows: int) -> Batch:
        """A batch of the text's next tokens. No token is picked, as for all pieces of a prompt but the last."""
        batch = self._batch(rows)
        self.tokens += rows
        return batch

    def attempt(self, rows: int) -> Batch:
        """A batch of drafted rows behind the text, each the next one's parent, with a pick for every one. The next
        batch takes their slots."""
        batch = self._batch(rows)
        batch.wanted = list(range(rows))
        return batch

    def _batch(self, count: int) -> Batch:
        batch = Batch(stream=self._stream, rows=Rows(), alive=list(range(count)))
        if not self._stream:
            batch.opened.append(Opened(REQUEST, Sampling()))
        if self._told < self.tokens:
            batch.committed.append(CommittedSlots(REQUEST, list(range(self._told, self.tokens))))
            self._told = self.tokens
        for position in range(self.tokens, self.tokens + count):
            self._nodes += 1
            token = self._given[position % len(self._given)] if self._given else 31 * self._nodes % self._vocab_size
            batch.rows.append(REQUEST, self._nodes, position, position - 1 if position else NO_SLOT, position, token)
        self._stream += 1
        return batch


# -------------------------------------------------------------------------------------------------------------- measure
# Measures a model's layers on a device: real stages there compute batches of several sizes and lengths of text.
#
# Stages compute one batch at a time, so that layers which two of them hold disturb nothing.

ROWS: Final = (1, 4, 16, 64, 256)
"""Numbers of rows of the batches that are measured. They are powers of four, from one token to a piece of a prompt;
times between them are interpolated."""
CONTEXTS: Final = (0, 512, 2048)
"""Numbers of tokens of the text before these rows. Times between them are interpolated."""
CHUNK: Final = 256
"""Upper limit of a batch that only makes the text longer, in tokens. The largest batch that is measured has as many."""
REPEATS: Final = 3, 15
"""Least and greatest number of measurements of a batch, after one that warms up and does not count. The median of three
ignores one that was disturbed."""
ENOUGH_S: Final = 2.0
"""Seconds of measurements after which the least number will do. Slow stages are thus measured three times, quick ones
fifteen."""

OnStep = Callable[[int, int], None]
"""A callback, called with the number of measurements that are done and that of all."""


def contexts_within(longest: int) -> tuple[int, ...]:
    """The contexts that leave room for the largest batch within a text of ``longest`` tokens."""
    return tuple(context for context in CONTEXTS if not context or context + ROWS[-1] <= longest)


def measured_times(
    executor: Executor,
    plans: Sequence[StagePlan],
    kinds: Sequence[int],
    contexts: Sequence[int],
    on_step: OnStep,
    tokens: Sequence[int] = (),
) -> LayerTimes:
    """Start the stages of ``parts_of``, measure, and stop them. Raises PipelineError if one cannot start or is lost.

    ``kinds``: the kind of each of the model's layers. ``tokens``: the text that is computed; empty for arbitrary
    tokens. The time of a mixture of experts depends on it.
    """
    pipeline = executor.begin(plans, "profile")
    try:
        while not pipeline.joined():
            executor.wait(pipeline.due)
        text = MeasuredText(plans[0].vocab_size, tokens)
        return times_of(Bench(executor, pipeline), plans, kinds, contexts, on_step, text)
    finally:
        pipeline.close()


class Bench:
    """Stages that compute one batch at a time."""

    def __init__(self, executor: Executor, pipeline: StartedPipeline) -> None:
        self._executor = executor
        self._pipeline = pipeline

    def seconds(self, batch: Batch) -> list[float]:
        """Seconds that each stage computes for a batch."""
        self._until(lambda: self._pipeline.ready)
        self._pipeline.submit(batch)
        found = self._pipeline.poll()
        while not found:
            self._executor.wait(self._pipeline.due)
            found = self._pipeline.poll()
        return [span.end - span.start for span in found[0].spans]

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._executor.wait(self._pipeline.due)
            self._pipeline.poll()


def times_of(
    bench: Bench,
    plans: Sequence[StagePlan],
    kinds: Sequence[int],
    contexts: Sequence[int],
    on_step: OnStep,
    text: MeasuredText,
) -> LayerTimes:
    """The times of the layers of each stage in ``plans``, milliseconds, at every size in ROWS behind every context."""
    steps, done = len(contexts) * len(ROWS), 0
    grid: list[list[list[float]]] = [[] for _ in ROWS]
    for context in contexts:
        while text.tokens < context:
            bench.seconds(text.advance(min(CHUNK, context - text.tokens)))
        for i, rows in enumerate(ROWS):
            taken = attempts(bench, text, rows)
            grid[i].append([1e3 * median(stage) for stage in zip(*taken, strict=True)])
            done += 1
            on_step(done, steps)
    return layer_times(grid, [range(plan.first, plan.last) for plan in plans], kinds, ROWS, contexts)


def attempts(bench: Bench, text: MeasuredText, rows: int) -> list[list[float]]:
    """[attempts][stages]: seconds of drafted rows. Every attempt goes through all stages, so that what else the device
    has to do for a while slows all of them."""
    bench.seconds(text.attempt(rows))
    fewest, most = REPEATS
    found: list[list[float]] = []
    while len(found) < fewest or (len(found) < most and sum(map(sum, found)) < ENOUGH_S):
        found.append(bench.seconds(text.attempt(rows)))
    return found


# ------------------------------------------------------------------------------------------------------------ footprint
# Device memory that each stage needs at least, as far as that is known before anything is loaded.

WHOLE_NUMBERS: Final = {"int8": 1.0, "int4": 0.5}
"""Bytes per weight of a quantised matrix, without its scales."""


def needed_bytes(setup: Resolved) -> list[int]:
    """Bytes of each stage: weights, KV cache, and per-slot states of layers that carry a state."""
    numbers = numbers_by_part(setup.checkpoint.weights.sizes())
    width = WHOLE_NUMBERS.get(setup.quantization, float(DTYPE_BYTES[setup.options.dtype]))
    kept = slot_bytes(setup)
    return [
        round(width * (sum(numbers.get(layer, 0) for layer in range(first, last)) + beside(numbers, i, setup.stages)))
        + sum(kept[first:last])
        for i, (first, last) in enumerate(setup.layers)
    ]


def needed_by_rank(setup: Resolved) -> list[int]:
    """Bytes of each rank, stage by stage: an equal share of the stage's, and the first one's embedding."""
    numbers = numbers_by_part(setup.checkpoint.weights.sizes())
    width = WHOLE_NUMBERS.get(setup.quantization, float(DTYPE_BYTES[setup.options.dtype]))
    found = []
    for stage, (needed, group) in enumerate(zip(needed_bytes(setup), setup.groups, strict=True)):
        alone = min(needed, round(width * numbers.get("embedding", 0))) if stage == 0 and len(group) > 1 else 0
        share = -(-(needed - alone) // len(group))
        found += [share + alone, *[share] * (len(group) - 1)]
    return found


def drafter_bytes(setup: Resolved) -> int:
    """Bytes of the drafter: weights, KV cache and, of a learned one, the target's states. 0 without weights."""
    if setup.draft is not None:
        whole = ((0, setup.draft.num_layers),)
        alone = replace(setup, checkpoint=setup.draft, quantization=setup.draft_quantization, layers=whole)
        return needed_bytes(alone)[0]
    speculator = setup.speculator
    if speculator is None:
        return 0
    dtype, numbers = DTYPE_BYTES[setup.options.dtype], numbers_by_part(setup.checkpoint.weights.sizes())
    lent = dict.fromkeys(speculator.lent - speculator.tensors.keys(), numbers.get("embedding", 0))
    own = {name: stored.size for name, stored in speculator.tensors.items()}
    # An embedding stays floats, the target's and the drafter's own; a head is packed with the drafter's weights.
    embedding = own.pop("embed_tokens.weight", lent.get("embed_tokens.weight", 0))
    packed = sum(own.values()) + lent.get("lm_head.weight", 0)
    kept = len(set(speculator.reads)) * setup.checkpoint.hidden_size
    if speculator.depth:
        kept += 2 * speculator.depth * kv_width(speculator.layer or setup.checkpoint.config)
    width = WHOLE_NUMBERS.get(setup.draft_quantization, float(dtype))
    return round(width * packed) + dtype * (embedding + setup.capacity * kept)


def slot_bytes(setup: Resolved) -> list[int]:
    """Bytes that each layer keeps in its slots: keys and values, state, or both."""
    config, dtype = setup.checkpoint.config, DTYPE_BYTES[setup.options.dtype]
    kv = 2 * kv_width(config) * dtype
    attends, carries = attention_slots(setup), carrying(config)
    whole = setup.quantization if setup.options.device == "cpu" else "none"
    carried = near_slots(setup) * state_bytes(config, dtype, whole) if any(carries) else 0
    return [kv * slots + carried * state for slots, state in zip_longest(attends, carries, fillvalue=False)]


def kept_for_sharing(setup: Resolved) -> int:
    """Bytes, over all stages, that prefix caching alone takes when all slots are taken."""
    alone = replace(setup, options=replace(setup.options, enable_prefix_caching=False))
    return sum(slot_bytes(setup)) - sum(slot_bytes(alone))


def attention_slots(setup: Resolved) -> list[int]:
    """Slots for which each layer holds keys and values; 0 for a layer without attention."""
    from penstock.models.attention import windowed

    config, layers = setup.checkpoint.config, setup.checkpoint.num_layers
    near = windowed(config, layers)
    return [
        attends * (near_slots(setup) if near[layer] else setup.capacity)
        for layer, attends in enumerate(attending(config, layers))
    ]


def near_slots(setup: Resolved) -> int:
    """Slots that layers with a limited reach hold at least: without prefix caching, those that one text needs."""
    from penstock.models.attention import reach_of

    reach = reach_of(setup.checkpoint.config)
    return setup.capacity if setup.options.enable_prefix_caching or reach is None else min(setup.capacity, reach)


def beside(numbers: Mapping[int | str, int], stage: int, stages: int) -> int:
    """Weights (a count) that a stage holds beside its layers: the embedding, or the head, which may be the same one."""
    embedding, rest = numbers.get("embedding", 0), numbers.get("rest", 0)
    if stage == stages - 1:
        return (rest or embedding) + (embedding if stages == 1 and rest else 0)
    return embedding if stage == 0 else 0


def numbers_by_part(sizes: Mapping[str, int]) -> dict[int | str, int]:
    """Weights (counts) of each layer, by index, of the "embedding", and of the "rest": norm and head."""
    from penstock.checkpoint.tensors import layer_of

    numbers: dict[int | str, int] = {}
    for name, size in sizes.items():
        layer = layer_of(name)
        part = layer if layer is not None else outside_part(name)
        numbers[part] = numbers.get(part, 0) + size
    layers = [part for part in numbers if isinstance(part, int)]
    each = numbers.pop("for every layer", 0) // max(1, len(layers))
    return numbers | {layer: numbers[layer] + each for layer in layers}


def outside_part(name: str) -> str:
    from penstock.checkpoint.architectures import is_outside

    if is_outside(name):
        return "for every layer"
    return "embedding" if "embed" in name else "rest"


def attending(config: Any, layers: int) -> list[bool]:
    """Whether each layer keeps keys and values."""
    from penstock.checkpoint.architectures import ATTENTION_TYPES, carries, layer_types, readers

    types = layer_types(config)
    others = readers(config) if carries(config) else range(0)
    return [index not in others and kind in ATTENTION_TYPES for index, kind in enumerate(types)] or [True] * layers


def kv_width(config: Any) -> int:
    """Elements of one row's keys in one layer, and as many of its values. A latent counts half for each."""
    if rank := getattr(config, "kv_lora_rank", None):
        return (int(rank) + int(config.qk_rope_head_dim)) // 2
    width = getattr(config, "head_dim", None) or config.hidden_size // int(config.num_attention_heads)
    return key_groups(config) * int(width)


def carrying(config: Any) -> list[bool]:
    """Whether each layer carries a state; empty where none does."""
    from penstock.checkpoint.architectures import RECURRENT_TYPES, layer_types

    return [kind in RECURRENT_TYPES for kind in layer_types(config)]


def state_bytes(config: Any, dtype: int, quantization: str) -> int:
    """Bytes that a layer which carries a state keeps of one row; int4 weights on a CPU need the state in float64."""
    from penstock.models.recurrent import row_size

    return row_size(config).bytes(dtype, 8 if quantization == "int4" else 4)


# ---------------------------------------------------------------------------------------------------------------- price
# A checkpoint's price list, from the sizes of its tensors: memory and arithmetic of its layers, bytes of a row.


MOST_KINDS: Final = 4
"""Number of kinds up to which layers are told apart. Where there are more, as where every layer has a width of its own,
they are not. Each is one more unknown that the stages' times have to tell."""


def price_of(setup: Resolved) -> ModelPrice:
    """The price list of the target as it is held; a layer's weights set its arithmetic. Its own sizes are the mean of
    all layers', those of its kinds each kind's."""
    checkpoint, number = setup.checkpoint, DTYPE_BYTES[setup.options.dtype]
    numbers = numbers_by_part(checkpoint.weights.sizes())
    embedding, rest = numbers.get("embedding", 0), numbers.get("rest", 0)
    layers, config = checkpoint.num_layers, checkpoint.config
    keeping = sum(attending(config, layers)) / layers
    kinds, pattern = kinds_of(setup, [numbers.get(i, 0) for i in range(layers)])
    return ModelPrice(
        layers=layers,
        hidden_size=checkpoint.hidden_size,
        layer_parameters=max(1, sum(numbers.get(i, 0) for i in range(layers)) // layers),
        head_parameters=max(rest, embedding),
        embedding_parameters=embedding,
        bytes_per_parameter=WHOLE_NUMBERS.get(setup.quantization, float(number)),
        activation_bytes=float(number),
        key_value_size=kv_width(config),
        cache_bytes=(number if kinds else number * keeping) if keeping else None,
        kinds=kinds,
        pattern=pattern,
    )


def kinds_of(setup: Resolved, weights: Sequence[int]) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of the target's layers, and the kind of each; both empty where all are alike or cannot be told apart.

    ``weights``: how many weights each layer has. Layers whose rows carry more than hidden states (Gemma 3n's) are not
    told apart: a profile cannot hold one of them without those before it.
    """
    from penstock.checkpoint.architectures import carries, layer_types
    from penstock.models.attention import reach_of, windowed

    config, layers = setup.checkpoint.config, setup.checkpoint.num_layers
    attends, near = attending(config, layers), windowed(config, layers)
    states = carrying(config) or [False] * layers
    looks = [*zip(layer_types(config) or [""] * layers, weights, attends, near, states, strict=True)]
    found = list(dict.fromkeys(looks))
    pattern = tuple(map(found.index, looks))
    if not 1 < len(found) <= MOST_KINDS or carries(config):
        return (), ()
    state, reach = 0, reach_of(config)
    if any(states):
        whole = setup.quantization if setup.options.device == "cpu" else "none"
        state = state_bytes(config, DTYPE_BYTES[setup.options.dtype], whole)
    kept = near_slots(setup) if near_slots(setup) < setup.capacity else None
    kinds = tuple(
        LayerKind(
            layer_parameters=max(1, count),
            attention_size=None if keeps else 0,
            key_value_size=None if keeps else 0,
            reach=reach if window else None,
            state_bytes=float(state) if carried else 0.0,
            held_slots=kept if window or carried else None,
        )
        for _, count, keeps, window, carried in found
    )
    return kinds, pattern


# -------------------------------------------------------------------------------------------------------------- devices
# The devices that a model may be split over, and the times of its layers there.

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A host's device, with the whole model as it would be held there."""

    name: str
    """The host's name."""
    beside: tuple[str, ...]
    """The devices of the host that are candidates, this one among them."""
    facts: HostFacts
    setup: Resolved
    key: DeviceKey

    @property
    def device(self) -> str:
        return self.setup.devices[0]

    @property
    def label(self) -> str:
        """The candidate's own name: the host's, with the device where the host has several candidates."""
        return self.name if len(self.beside) == 1 else f"{self.name}/{self.device}"

    @property
    def free(self) -> int | None:
        """Free bytes of the device's memory; None if the host does not say.

        Of several GPUs that of the fullest: a plan that has stages on some of them does not say on which.
        """
        found = [self.facts.device(device) for device in self.beside]
        free = [one.free for one in found if one is not None and one.free is not None]
        return min(free) if len(free) == len(self.beside) else None


@dataclass(frozen=True)
class Candidates:
    """Devices by their labels, in the order in which hosts are named, and the model's price list."""

    devices: dict[str, Candidate]
    price: ModelPrice

    @property
    def names(self) -> list[str]:
        return list(self.devices)

    @property
    def hosts(self) -> list[str]:
        """The host of each."""
        return [one.name for one in self.devices.values()]

    @property
    def capacity(self) -> int:
        """Tokens that every stage has room for."""
        return next(iter(self.devices.values())).setup.kv_slots


def candidates_on(options: EngineOptions, names: list[str], living: Mapping[str, HostFacts]) -> Candidates:
    """The devices that the options ask for: one on each host, or a GPU for each time that it is named.

    Raises ConfigError for a host with none, for one with several GPUs that is named once, and for GPUs of a host that
    differ.
    """
    from penstock.models.packing import check_device

    # As one stage, whose formats are those that the engine would resolve for all of these hosts.
    alone = replace(
        options,
        hosts=None if names == [HERE] else ",".join(names),
        cluster=None,
        layer_split=None,
        pipeline_parallel_size=1,
        speculative_config=None,
    )
    whole = resolve_options(alone, living)
    digest = digest_of(whole.checkpoint.source)
    found: dict[str, Candidate] = {}
    named, hosts = Counter[str](), {name: own_facts("") if name == HERE else living[name] for name in names}
    asked = {name: asked_devices(name, hosts[name], options.device, names.count(name)) for name in hosts}
    for name in names:
        facts, device = hosts[name], asked[name][named[name]]
        named[name] += 1
        if name == HERE:
            check_device(device)
        threads = options.threads or (facts.cores if device == "cpu" else 1)
        setup = replace(
            whole, hosts=(in_plans(name),), devices=(device,) * 2, threads=(threads,) * 2, speculative_slots=0
        )
        candidate = Candidate(name, asked[name], facts, setup, key_of(name, facts, setup, digest))
        found[candidate.label] = candidate
    return Candidates(found, price_of(whole))


def asked_devices(name: str, facts: HostFacts, device: str, times: int) -> tuple[str, ...]:
    """The devices of a host that is named so many times."""
    if times == 1 and device == "cuda" and len(facts.gpus) > 1:
        raise FieldError(
            "layer_split",
            f"plans one device for each time that a host is named, and {name} has {len(facts.gpus)} GPUs: name it as "
            f"often (hosts {','.join([name] * len(facts.gpus))}), name a GPU with device, or state the layers",
        )
    found = tuple(device_on(name, facts, device, place, times) for place in range(times))
    models = {known.model for one in found if (known := facts.device(one)) is not None}
    if len(models) > 1:  # which of them a stage gets is not planned
        raise FieldError(
            "layer_split",
            f"plans for GPUs of a host that are alike, and {name} has {' and '.join(sorted(models))}: run a worker for "
            "each, with its own CUDA_VISIBLE_DEVICES and port, or state the layers",
        )
    return found


def key_of(name: str, facts: HostFacts, setup: Resolved, digest: str, stage: int = 0) -> DeviceKey:
    """The key of a stage's times: everything that they depend on. ``digest`` is the checkpoint's."""
    device = setup.devices[stage]
    found = facts.device(device)
    return DeviceKey(
        host=name,
        node=facts.name,
        device=device,
        device_model="" if found is None else found.model,
        threads=setup.threads[stage],
        model=digest,
        dtype=setup.options.dtype,
        quantization=setup.quantization,
        numerics=setup.options.numerics,
        penstock=facts.versions.penstock,
        torch=facts.versions.torch,
    )


def profiled(
    candidate: Candidate, executor: Executor, store: ProfileStore, on_step: OnStep, tokens: Sequence[int] = ()
) -> LayerTimes:
    """Measure a candidate's layers and store the times. Raises ConfigError for too little memory, and PipelineError."""
    contexts = contexts_within(candidate.setup.max_model_len)
    setup = in_parts(candidate)
    if isinstance(executor, FleetExecutor) and candidate.name != HERE:
        offer = executor.offer(setup.checkpoint.source, setup.checkpoint.num_layers)
        executor.fleet.provide(offer, {candidate.name: [Held(*layers) for layers in setup.layers]})
    kinds = price_of(candidate.setup).layer_kinds
    times = measured_times(executor, stage_plans(setup), kinds, contexts, on_step, tokens)
    store.keep(DeviceProfile(key=candidate.key, times=times))
    return times


def in_parts(candidate: Candidate) -> Resolved:
    """The stages that are measured, with as many layers as there is memory for."""
    whole = candidate.setup
    kinds = price_of(whole).layer_kinds

    def parted(most: int) -> Resolved:
        parts = parts_of(kinds, most)
        return replace(
            whole,
            layers=parts,
            hosts=whole.hosts * len(parts),
            devices=(candidate.device,) * (len(parts) + 1),
            threads=(whole.threads[0],) * (len(parts) + 1),
        )

    if candidate.free is None:
        return parted(len(kinds))
    alone = needed_bytes(parted(1))
    one, left = alone[-2], candidate.free - sum(alone) + alone[-2]
    if left < one:
        have = f"host {candidate.name}: {candidate.device} has {in_gb(candidate.free)} free"
        layers = {4: "four"}.get(len(alone), str(len(alone)))
        raise ConfigError(
            f"{have}, and {layers} layers with the embedding and the head take {in_gb(sum(alone) - alone[-2] + one)}"
        )
    return parted(int(0.8 * left / one))
