"""Resolves an engine's options on this host: checks checkpoints and other files, and fills in every default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.checkpoint.look import Glance, check_built_for, check_version, glance, parse_layer_split, resolve
from penstock.cluster import Cluster, LinkTiming, StageTiming
from penstock.cluster.load import DRAFTER_ON, ON_ENGINE, ON_FIRST, ON_LAST
from penstock.config import FieldError, check
from penstock.core import ConfigError
from penstock.drafters.base import Weights
from penstock.drafters.learned import LearnedOptions, SmallModelOptions
from penstock.emulation.cluster import check_drafter
from penstock.engine.options import AUTO, DEMO, EngineOptions, check_ranks, model_folder
from penstock.hosts.facts import HostFacts, own_facts, shared_threads, usable_cores
from penstock.hosts.placement import (
    HERE,
    Groups,
    asked_hosts,
    check_gpus,
    devices_elsewhere,
    drafter_host,
    host_and_port,
    hosts_asked_for,
    hosts_for_drafter,
    hosts_of_ranks,
    threads_elsewhere,
)
from penstock.pipeline.base import RankPlace
from penstock.requests.slots import speculative_slots
from penstock.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import Checkpoint
    from penstock.models.speculators.base import SpeculatorCheckpoint

DEMO_DRAFTERS: Final = DEMO / "drafters"
"""The folder of the learned drafters that are shipped for the demo target."""
DEFAULT_MODEL_LEN: Final = 4096
"""Upper limit of a prompt with its answer, in tokens, where neither an option nor the model sets another. A longer one
takes more memory from the start, since there are slots for two such texts (``kv_slots``)."""


class PrefillTimes(NamedTuple):
    """Times of a prompt's pieces in each stage, and on each link from the engine through the stages and back."""

    stages: Sequence[StageTiming]
    links: Sequence[LinkTiming]


@dataclass(frozen=True)
class Resolved:
    """Options with every default filled in and every file looked at; nothing is left that can be refused later."""

    options: EngineOptions
    """The options, with the dtype and planned layers and hosts filled in."""
    checkpoint: Checkpoint
    """The target's checkpoint."""
    quantization: str
    """Format of the target's weights: none, int8 or int4."""
    draft: Checkpoint | None
    """The draft model's checkpoint; None where no small model drafts."""
    draft_quantization: str
    """Format of the drafter's weights: none, int8 or int4."""
    speculator: SpeculatorCheckpoint | None
    """The learned drafter's checkpoint; None where none drafts."""
    cluster: Cluster | None
    speculation: SpeculativeConfig | None
    """The drafter and the strategy; None decodes plainly."""
    layers: tuple[tuple[int, int], ...]
    """Layers [first, last) of each stage."""
    hosts: tuple[str, ...]
    """Host of each stage, as plans name it: this one is the empty string."""
    devices: tuple[str, ...]
    """Torch device of each stage; the drafter's comes last."""
    threads: tuple[int, ...]
    """Threads of each stage; the drafter's come last."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    kv_slots: int
    """Tokens of running requests and the prefix cache for which every stage has room."""
    speculative_slots: int
    """Drafted tokens for which every stage has room beside them."""
    prefill_times: PrefillTimes | None = None
    """Times of the stages, where all are real and have been measured; None otherwise."""
    ranks: tuple[tuple[RankPlace, ...], ...] = ()
    """The places of each stage's ranks, the first one's first; empty where every stage has one."""

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def groups(self) -> Groups:
        """The hosts of each stage's ranks, as plans name them."""
        placed = tuple(tuple(place.host for place in ranks) for ranks in self.ranks)
        return placed or tuple((host,) for host in self.hosts)

    @property
    def all_hosts(self) -> tuple[str, ...]:
        """The host of every rank, stage by stage."""
        return tuple(chain.from_iterable(self.groups))

    @property
    def drafts(self) -> bool:
        """Whether a drafter has weights, and so a device, threads and memory."""
        return self.draft is not None or self.speculator is not None

    @property
    def drafter_host(self) -> str:
        """Host of the drafter's weights, as plans name it."""
        return drafter_host(self.options.drafter_on, self.cluster, self.hosts) if self.drafts else ""

    @property
    def capacity(self) -> int:
        """Slots of every stage's arenas."""
        return self.kv_slots + self.speculative_slots

    @property
    def emulated(self) -> bool:
        """Whether stages take the times of modelled devices, however many of them compute."""
        return self.cluster is not None and self.cluster.emulated


def resolve_options(options: EngineOptions, living: Mapping[str, HostFacts] | None = None) -> Resolved:
    """Check device, checkpoints and cluster, and fill in defaults. Raises ConfigError for anything that cannot work.

    ``living``: facts of the other hosts that the options name, by host name.
    """
    check_options(options)
    from penstock.checkpoint.checkpoint import open_checkpoint
    from penstock.models.packing import check_numerics, weights_format

    speculation, cluster = options.speculative_config, options.cluster
    assert not isinstance(speculation, Mapping)
    assert not isinstance(cluster, str)
    checkpoint = open_checkpoint(model_folder(options.model, "target"))
    check_numerics(options.numerics, options.device)
    check_ranks_load(checkpoint, options)
    quantization = weights_format(options.quantization, options.device, checkpoint)
    options = replace(options, dtype=computed_in(options, checkpoint, quantization, living or {}))
    draft, speculator = drafter_checkpoints(options, checkpoint, speculation)
    check_layers(options, checkpoint.num_layers)
    layers = tuple(split_layers(options, checkpoint, cluster))
    groups = hosts_of_ranks(options.hosts, cluster, len(layers), options.tensor_parallel_size)
    drafts = draft is not None or speculator is not None
    if speculator is not None and speculation is not None:
        check_sent(speculator, placed_drafter(options, groups))
        speculation.drafter_options.check_speculator(speculator, layers)
    slots = options.speculative_slots
    most_rows = speculation.strategy_options.most_rows if speculation is not None else 0
    longest = options.max_model_len or min(positions_of(checkpoint), DEFAULT_MODEL_LEN)
    check(longest <= positions_of(checkpoint), "max_model_len", longest, f"at most {positions_of(checkpoint)}")
    return Resolved(
        options=options,
        checkpoint=checkpoint,
        quantization=quantization,
        draft=draft,
        draft_quantization=drafter_quantization(options, speculation, draft),
        speculator=speculator,
        cluster=cluster,
        speculation=speculation,
        layers=layers,
        max_model_len=longest,
        kv_slots=options.kv_slots or max(2 * longest, DEFAULT_MODEL_LEN),
        speculative_slots=speculative_slots(len(layers), most_rows) if slots is None else slots,
        **placement_fields(options, groups, living or {}, drafts=drafts),
    )


def check_ranks_load(checkpoint: Checkpoint, options: EngineOptions) -> None:
    """Raise ConfigError if the layers do not load, naming the field that asks for more ranks than can share them."""
    from penstock.models.loader import check_loads

    cluster = options.cluster
    if not isinstance(cluster, Cluster) or cluster.emulated:
        check_loads(checkpoint, options.numerics, options.tensor_parallel_size)
        return
    sizes = [len(stage.devices) for stage in cluster.stages]
    size, largest = max(sizes), sizes.index(max(sizes))
    try:
        check_ranks(size, options)
        check_loads(checkpoint, options.numerics, size)
    except FieldError as error:
        if error.field != "tensor_parallel_size":
            raise
        problem = f"name {size}, as ranks of one stage; tensor_parallel_size {error.problem}"
        raise FieldError(f"stages[{largest}].devices", problem) from error


def drafter_quantization(
    options: EngineOptions, speculation: SpeculativeConfig | None, draft: Checkpoint | None
) -> str:
    """Format of the drafter's weights: none, int8 or int4. ``draft``: the draft model's checkpoint, if there is one."""
    from penstock.models.packing import drafter_format, weights_format

    drafter = speculation.drafter_options if speculation is not None else None
    if isinstance(drafter, SmallModelOptions) and draft is not None:
        if drafter.quantization == "auto":
            return weights_format(options.quantization, options.device, draft)
        return weights_format(drafter.quantization, options.device, draft, "speculative_config.quantization")
    if isinstance(drafter, LearnedOptions):
        emulated = isinstance(options.cluster, Cluster) and options.cluster.emulated
        return drafter_format(drafter.quantization, options.device, options.dtype, emulated=emulated)
    return "none"


def computed_in(
    options: EngineOptions, checkpoint: Checkpoint, quantization: str, living: Mapping[str, HostFacts]
) -> str:
    """The dtype of hidden states, and of weights that are floats."""
    from penstock.models.packing import usable_dtype

    able = capabilities(options, living)
    return usable_dtype(options.dtype, options.device, checkpoint, quantization, able)


def capabilities(options: EngineOptions, living: Mapping[str, HostFacts]) -> list[tuple[int, int]]:
    """The compute capabilities, as far as drivers tell them, of the GPUs that stages may be on; spare hosts' too.

    Raises FieldError for a host that is named for more GPUs than it has.
    """
    assert not isinstance(options.cluster, str)
    if options.device == "cpu":  # and no driver is asked
        return []
    names = hosts_asked_for(options.hosts, options.cluster)
    names = (*names, *(name for name in hosts_for_drafter(options.drafter_on, options.cluster) if name not in names))
    known = {HERE: own_facts(""), **living} if HERE in names else living
    check_gpus(names, known)
    facts = [known[name] for name in dict.fromkeys(names) if name in known]
    gpus = [gpu for one in facts for gpu in one.devices if options.device in (gpu.device, gpu.device.partition(":")[0])]
    return [gpu.capability for gpu in gpus if gpu.capability is not None]


def devices_of(
    options: EngineOptions, hosts: Sequence[str], living: Mapping[str, HostFacts], drafter: str = ""
) -> tuple[str, ...]:
    """The device of each stage, then the drafter's, which is on the host ``drafter``.

    Raises ConfigError for a device that is not there.
    """
    from penstock.models.packing import check_device, drafting_device, placed

    places = [*hosts, drafter] if drafter in living else list(hosts)
    here = [stage for stage, host in enumerate(hosts) if not host]
    if here:
        check_device(options.device)
    devices = devices_elsewhere(places, living, options.device)
    own = placed(options.device, len(here)) if here else (drafting_device(options.device),)
    devices |= zip(here, own, strict=False)
    with_a_stage = {ON_FIRST: 0, ON_LAST: len(hosts) - 1}.get(options.drafter_on or "")
    if not drafter and with_a_stage is not None:
        devices[len(hosts)] = devices[with_a_stage]
    return (*(devices[stage] for stage in range(len(hosts))), devices.get(len(hosts), own[-1]))


def placement_fields(
    options: EngineOptions, groups: Groups, living: Mapping[str, HostFacts], *, drafts: bool
) -> dict[str, Any]:
    """The fields of ``Resolved`` that say where stages and their ranks are, for ranks on the hosts ``groups``."""
    cluster = options.cluster
    assert not isinstance(cluster, str)
    hosts, drafter = tuple(group[0] for group in groups), placed_drafter(options, groups) if drafts else None
    places: dict[str, Any] = {"hosts": hosts, "devices": devices_of(options, hosts, living, drafter or ""), "ranks": ()}
    *each, drafting = threads_of(options, cluster, tuple(chain.from_iterable(groups)), living, drafter)
    if len(each) > len(groups):
        threads = iter(each)
        ranks = tuple(tuple(RankPlace(host=host, threads=next(threads)) for host in group) for group in groups)
        if options.threads is not None:
            ranks = tuple(map(sharing_threads, ranks))
        places["ranks"], each = ranks, [sum(place.threads for place in group) for group in ranks]
    return places | {"threads": (*each, drafting)}


def placed_drafter(options: EngineOptions, groups: Groups) -> str:
    """The host of a drafter with weights, as plans name it, where stages' ranks are on the hosts ``groups``."""
    assert not isinstance(options.cluster, str)
    return drafter_host(options.drafter_on, options.cluster, [group[0] for group in groups])


def sharing_threads(group: tuple[RankPlace, ...]) -> tuple[RankPlace, ...]:
    """The ranks of a stage, where those of one host share the threads that each of them was given."""
    found = []
    for rank, place in enumerate(group):
        before, count = (sum(one.host == place.host for one in some) for some in (group[:rank], group))
        # Differences of multiples that are rounded down: the shares on a host add up to its threads.
        share = place.threads * (before + 1) // count - place.threads * before // count
        found.append(RankPlace(host=place.host, threads=max(1, share)))
    return tuple(found)


def threads_of(
    options: EngineOptions,
    cluster: Cluster | None,
    hosts: Sequence[str],
    living: Mapping[str, HostFacts],
    drafter: str | None,
) -> tuple[int, ...]:
    """Threads of each stage, or of each rank, then of a drafter with weights, which is on the host ``drafter``; None:
    there is none.

    One thread does where the processor's cores do not set the pace: on GPUs, and in an emulated cluster.
    """
    stages = len(hosts)
    if options.threads is not None:
        return (options.threads,) * (stages + 1)
    if options.device != "cpu" or (cluster is not None and cluster.emulated):
        return (1,) * (stages + 1)
    stated: list[int | None] = [None] * (stages + 1)
    if cluster is not None:
        names = [name for stage in cluster.stages for name in stage.devices] + [cluster.drafter]
        stated = [None if name is None else cluster.device(name).threads for name in names]
    places = [*hosts, drafter] if drafter is not None and (not drafter or drafter in living) else list(hosts)
    threads = threads_elsewhere(places, living, stated)
    here = [process for process, host in enumerate(places) if not host]
    # Every engine of the model has as many processes here, and the same share of the cores.
    sharing = [stated[process] for process in here] * options.engines_here
    threads |= zip(here, shared_threads(sharing, usable_cores()), strict=False)
    return tuple(threads.get(process, 1) for process in range(stages + 1))


def with_drafter_placed(setup: Resolved, living: Mapping[str, HostFacts]) -> Resolved:
    """The setup with the drafter's device and threads as its host has them now.

    Raises ConfigError if the host lacks the device.
    """
    if not setup.drafter_host:
        return setup
    now = placement_fields(setup.options, setup.groups, living, drafts=True)
    devices, threads = (*setup.devices[:-1], now["devices"][-1]), (*setup.threads[:-1], now["threads"][-1])
    return replace(setup, devices=devices, threads=threads)


def positions_of(checkpoint: Checkpoint) -> int:
    """Number of positions that the model states; DEFAULT_MODEL_LEN where it states none."""
    return int(getattr(checkpoint.config, "max_position_embeddings", None) or DEFAULT_MODEL_LEN)


def drafter_checkpoints(
    options: EngineOptions, checkpoint: Checkpoint, speculation: SpeculativeConfig | None
) -> tuple[Checkpoint | None, SpeculatorCheckpoint | None]:
    """The draft model's checkpoint or the learned drafter's, whichever drafts for the target's, ``checkpoint``.

    Raises ConfigError, naming ``speculative_config.model`` or ``.method``, for one that is not there, cannot be read,
    or does not fit the target.
    """
    from penstock.checkpoint.checkpoint import open_checkpoint
    from penstock.models.loader import check_loads

    draft = speculator = None
    weights = speculation.drafter_options.weights if speculation is not None else Weights.NONE
    if speculation is not None and weights is Weights.SPECULATOR:
        from penstock.models.speculators.open import open_speculator

        speculator = open_speculator(speculator_folder(options.model, speculation), checkpoint)
        check_method(speculation.method, speculator)
        with of_drafter():
            speculator.check_values(checkpoint)
    elif speculation is not None and weights is Weights.DRAFT_MODEL:
        draft = open_checkpoint(model_folder(str(speculation.drafter_options.model), "draft"))
        check_same_tokens(checkpoint, draft)
        with of_drafter():
            check_loads(draft)
    return draft, speculator


def check_sent(speculator: SpeculatorCheckpoint, host: str) -> None:
    """Raise FieldError for a learned drafter on another host that cannot be sent there as a whole."""
    wanted = "a folder with config.json and safetensors, which another host is sent as a whole"
    check(not host or not speculator.path.is_file(), "speculative_config.model", str(speculator.path), wanted)


def check_method(method: str, speculator: SpeculatorCheckpoint) -> None:
    """Raise FieldError unless the method is one for the speculator's kind of checkpoint."""
    if method not in speculator.methods:
        raise FieldError(
            "speculative_config.method", f"is {method!r}, the checkpoint is of kind {speculator.kind!r}: name that"
        )


def split_layers(options: EngineOptions, checkpoint: Checkpoint, cluster: Cluster | None) -> list[tuple[int, int]]:
    """The layers [first, last) of each stage: as stated, or split evenly, the head counting for the last stage.

    "auto" is an even split on one host; with others, ``planned`` in ``engine/opening.py`` has replaced it by a stated
    one.
    """
    stages = len(cluster.stages) if cluster else options.pipeline_parallel_size
    if options.layer_split not in (None, AUTO):
        ranges = parse_layer_split(options.layer_split, checkpoint.num_layers)
        if stages is not None and len(ranges) != stages:
            raise FieldError("layer_split", f"names {len(ranges)} stages, there are {stages}")
        return ranges
    stages = stages or stages_named(options)
    if cluster is not None and cluster.emulated and stages > checkpoint.num_layers:
        bounds = [round(i * checkpoint.num_layers / stages) for i in range(stages + 1)]
        return list(pairwise(bounds))
    return checkpoint.even_split(stages)


def stages_named(options: EngineOptions) -> int:
    """Number of stages where only ``hosts`` is given: one for each host, or for each tensor parallel group."""
    return max(1, len(hosts_asked_for(options.hosts, None)) // options.tensor_parallel_size)


# --------------------------------------------------------------------------------------------------------- at a glance


def draft_at_hand(options: EngineOptions) -> Glance | None:
    """A glance at a draft model on this machine; None where there is none here.

    Raises ConfigError if its files cannot be read.
    """
    name = drafting_checkpoint(options)
    return glance_at_draft(name) if name is not None and Path(name).expanduser().exists() else None


def check_options(options: EngineOptions, max_tokens: int | None = None) -> None:
    """Raise ConfigError for errors that names, JSON and file headers reveal. Imports no torch and takes little time.

    A draft model on this machine is looked at before a target that may have to be downloaded. ``max_tokens`` are the
    most that will be asked for, where that is known.
    """
    check_version()
    if options.hosts is None and options.cluster is None:
        check_built_for(options.device)
    if isinstance(options.cluster, Cluster):
        assert not isinstance(options.speculative_config, Mapping)
        check_cluster(options.cluster, options, options.speculative_config)
    check_drafter_on(options)
    draft, name = draft_at_hand(options), drafting_checkpoint(options)
    target = glance(model_folder(options.model, "target"))
    if draft is None and name is not None:
        draft = glance_at_draft(name)
    if draft is not None:
        check_rows(target, draft)
    check_speculator(options)
    if target.num_layers is not None:
        check_layers(options, target.num_layers)
    longest, positions = options.max_model_len, target.max_position_embeddings
    if longest is not None and positions is not None:
        check(longest <= positions, "max_model_len", longest, f"at most {positions}")
    room = longest or min(positions or DEFAULT_MODEL_LEN, DEFAULT_MODEL_LEN)
    wanted = f"below {room}, the most tokens of prompt and output together (max_model_len)"
    check(max_tokens is None or max_tokens < room, "max_tokens", max_tokens, wanted)


def check_drafter_on(options: EngineOptions) -> None:
    """Raise FieldError for a place that is no host's name, or is named for a drafter that runs on no device."""
    place, config, cluster = options.drafter_on, options.speculative_config, options.cluster
    if place in (None, ON_ENGINE) or (isinstance(cluster, Cluster) and cluster.emulated):
        return
    weights = config.drafter_options.weights if isinstance(config, SpeculativeConfig) else Weights.NONE
    if weights is Weights.NONE:
        who = f"method {config.method!r} has no weights and" if isinstance(config, SpeculativeConfig) else "nothing"
        what = "drafts beside the engine" if isinstance(config, SpeculativeConfig) else "drafts"
        raise FieldError(DRAFTER_ON, f"is {place!r}, and {who} {what}: leave it out, or name a drafter with weights")
    if not isinstance(cluster, Cluster) and place not in (ON_FIRST, ON_LAST):
        host_and_port(str(place), DRAFTER_ON)
        ray = options.hosts is not None and asked_hosts(options.hosts).ray
        check(not ray, DRAFTER_ON, place, f"{ON_ENGINE}, {ON_FIRST} or {ON_LAST}: Ray says which nodes there are")


def drafting_checkpoint(options: EngineOptions) -> str | None:
    """The draft model's folder, file or hub id, where one drafts."""
    config = options.speculative_config
    if not isinstance(config, SpeculativeConfig) or config.drafter_options.weights is not Weights.DRAFT_MODEL:
        return None
    return model_folder(str(config.drafter_options.model), "draft")


def glance_at_draft(name: str) -> Glance:
    with of_drafter():
        return glance(name)


@contextmanager
def of_drafter() -> Iterator[None]:
    """Have errors about a checkpoint, raised in the block, name the drafter's field."""
    try:
        yield
    except FieldError:
        raise
    except ConfigError as error:
        raise ConfigError(f"speculative_config.{error}") from error


def check_rows(target: Glance, draft: Glance) -> None:
    """Raise FieldError if one has no tokenizer and both state their vocabularies' sizes, which differ."""
    if target.has_tokenizer and draft.has_tokenizer:
        return
    if target.vocab_size is not None and draft.vocab_size is not None:
        check_same_rows(target.vocab_size, draft.vocab_size)


def check_same_rows(target: int, draft: int) -> None:
    """Raise FieldError unless both vocabularies have the same size."""
    if target != draft:
        raise other_tokens(f"has a vocabulary of {draft} tokens, the target {target}")


def check_same_tokens(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise FieldError unless both have the same tokens. Rows that only pad a vocabulary do not count.

    Where a checkpoint has no tokenizer, or one that does not load, the vocabulary sizes are compared.
    """
    one, other = (tokens_of(checkpoint) for checkpoint in (target, draft))
    if one is None or other is None:
        check_same_rows(target.vocab_size, draft.vocab_size)
        return
    rows = min(target.vocab_size, draft.vocab_size)
    for number in sorted(one.keys() | other.keys()):
        if number < rows and one.get(number) != other.get(number):
            known = [shown_token(tokens.get(number)) for tokens in (other, one)]
            raise other_tokens(f"has {known[0]} as token {number}, the target {known[1]}")
        if number >= rows and number in one and number < target.vocab_size:
            raise other_tokens(f"has {draft.vocab_size} rows, and the target's token {number} is {one[number]!r}")


def tokens_of(checkpoint: Checkpoint) -> dict[int, str] | None:
    """The tokens of a checkpoint by id, None where it has no tokenizer that loads."""
    from penstock.text.tokenizer import load_tokenizer

    try:
        return load_tokenizer(checkpoint.path).tokens()
    except ConfigError:
        return None


def shown_token(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


def other_tokens(problem: str) -> FieldError:
    """The error that refuses a draft model with another tokenizer."""
    return FieldError("speculative_config.model", f"{problem}: a draft model needs the target's tokenizer")


def check_speculator(options: EngineOptions) -> None:
    """Raise ConfigError if a learned drafter is wanted and is not there."""
    config = options.speculative_config
    if isinstance(config, SpeculativeConfig) and config.drafter_options.weights is Weights.SPECULATOR:
        folder = speculator_folder(options.model, config)
        if not Path(folder).expanduser().is_file():
            with of_drafter():
                resolve(folder)


def speculator_folder(target: str, speculation: SpeculativeConfig) -> str:
    """The learned drafter's folder or hub id. Raises FieldError where none is named and none is shipped."""
    if speculation.drafter_options.model is not None:
        return speculation.drafter_options.model
    shipped = sorted(file.parent.name for file in DEMO_DRAFTERS.glob("*/config.json")) if target == "demo" else []
    if speculation.method in shipped:
        return str(DEMO_DRAFTERS / speculation.method)
    if not speculation.drafter_options.of_target:
        hint = f"; with the target 'demo' come {', '.join(shipped)}" if shipped else ""
        raise FieldError(
            "speculative_config.model",
            f"is missing: method {speculation.method!r} needs the drafter's folder or name{hint}",
        )
    return model_folder(target, "target")


def check_layers(options: EngineOptions, layers: int) -> None:
    """Raise ConfigError for a split of another number of layers, and for stages on real devices that would get none."""
    cluster = options.cluster
    if options.layer_split not in (None, AUTO):
        parse_layer_split(options.layer_split, layers)
        return
    stages = len(cluster.stages) if isinstance(cluster, Cluster) else options.pipeline_parallel_size
    stages = stages or stages_named(options)
    if stages <= layers or (isinstance(cluster, Cluster) and cluster.emulated):
        return
    problem = f"the model has {layers} layers, and a stage needs one at least"
    if isinstance(cluster, Cluster):
        raise FieldError("cluster", f"{cluster.name} has {stages} stages; {problem}")
    if options.pipeline_parallel_size is None:
        raise FieldError("hosts", f"names {stages}; {problem}")
    raise FieldError("pipeline_parallel_size", f"is {stages}; {problem}")


def check_cluster(cluster: Cluster, options: EngineOptions, speculation: SpeculativeConfig | None) -> None:
    """Raise ConfigError where the cluster contradicts the options or asks for what this build cannot start."""
    size = options.pipeline_parallel_size
    if size is not None and size != len(cluster.stages):
        raise FieldError(
            "pipeline_parallel_size",
            f"is {size}, cluster {cluster.name} has {len(cluster.stages)} stages; leave it out",
        )
    if cluster.links.exclusive:
        raise FieldError(
            "cluster",
            f"{cluster.name} has links.exclusive, which only penstock simulate models: a stage's process does not know "
            "what others are sending; remove it",
        )
    if cluster.emulated:
        check_drafter(cluster, speculation)
