"""``penstock profile``: the times of a model's layers, measured on hosts or priced by a cluster file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress

from penstock.cluster import load_devices
from penstock.cluster.spec import Cluster, Device, Grid, LayerTimes, LinkBetween, ModelPrice, interpolated, mean_grid
from penstock.cluster.timing import chunk, held_by, stage_part
from penstock.config import MODEL, PIPELINE, FieldError, Option, check
from penstock.engine.opening import open_executor
from penstock.engine.options import Dtype, EngineOptions, Insecure, KeysFolder, Quantization, model_folder
from penstock.engine.profile.hosts import HostsProfile, completed, forgotten, known_profile
from penstock.engine.profile.measure import CONTEXTS, ROWS
from penstock.engine.profile.store import ProfileStore, profiles_folder
from penstock.engine.resolve import check_options
from penstock.hosts.placement import check_named
from penstock.lab.grid import read_prompts
from penstock.lab.report import Report, consoles
from penstock.pipeline.forkserver import fork_from_here
from penstock.planner.costs import candidates
from penstock.planner.partition import least_piece
from penstock.terminal import FiguresTable, progress_bar

# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock profile``, and those of ``penstock plan`` for real hosts.


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """A model, its dtype and quantization, and the hosts that it is measured on.

    Raises FieldError for hosts that join, or that Ray has, whose names are not known before.
    """

    model: str | None = None
    hosts: Annotated[
        str | None,
        Option(
            "Hosts on which `penstock worker` runs; localhost is this one.",
            PIPELINE,
            metavar="HOST[:PORT],...",
            default="",
        ),
    ] = None
    keys: KeysFolder = None
    insecure: Insecure = False
    dtype: Dtype = "float32"
    quantization: Quantization = "auto"
    device: Annotated[str, Option("cpu, cuda or cuda:N, on every host.", MODEL)] = "cpu"
    threads: Annotated[
        int | None, Option("Threads that a stage computes with.", PIPELINE, default="all cores of its host")
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "Most tokens of a text, up to which layers are measured.", MODEL, default="the checkpoint's, at most 4096"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_named(self.hosts)

    def check_unmeasured(self, instead: str) -> None:
        """Raise FieldError for an option, other than the model, that says how hosts are measured, where none is.

        ``instead``: the words that say what the figures come from.
        """
        for one in fields(HostsOptions):
            value = getattr(self, one.name)
            unset = one.name == "model" or value == one.default
            check(unset, one.name, value, f"left out with {instead}: nothing is measured")

    def engine_options(self) -> EngineOptions:
        """The options of an engine that would run the model on these hosts. Raises FieldError as ``EngineOptions``."""
        assert self.model is not None
        return EngineOptions(
            model=self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            max_model_len=self.max_model_len,
            hosts=self.hosts,
            keys=self.keys,
            insecure=self.insecure,
            threads=self.threads,
            speculative_config=None,
        )


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(HostsOptions):
    """A model and the hosts on which it is measured, by default this one; or a cluster file with prices.

    Raises FieldError where neither is named, and for options that measure nothing with a file.
    """

    model: Annotated[
        str | None,
        Option(
            "Checkpoint folder, GGUF file or hub id; with a cluster file a priced model's name.",
            MODEL,
            positional=True,
            default="",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            "Measure with these texts, one JSON object a line with 'prompt' or 'turns'. Only mixtures of experts take "
            "other times for other texts.",
            MODEL,
            metavar="FILE.jsonl",
            default="any tokens",
        ),
    ] = None
    cluster: Annotated[
        str | None, Option("Measure nothing: what the prices of this cluster file come to.", PIPELINE, default="")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster is not None:
            self.check_unmeasured("a cluster file")
            given = None if self.prompts is None else str(self.prompts)
            check(given is None, "prompts", given, "left out with a cluster file: nothing is measured")
        elif self.model is None:
            raise FieldError("model", "is missing: name the checkpoint to measure, or a cluster file")


# ---------------------------------------------------------------------------------------------------------------- hosts
# Measures the hosts, with a progress bar.


def hosts_profile(
    options: HostsOptions, console: Console, *, anew: bool = False, texts: Path | None = None
) -> HostsProfile:
    """The profile of the named hosts: only missing parts are measured, or everything if ``anew``.

    ``texts``: a file of prompts whose tokens are measured. Raises ConfigError for options, files and hosts that cannot
    be used.
    """
    engine = options.engine_options()
    check_options(engine)
    fork_from_here(model_folder(engine.model, "target"))
    tokens = [] if texts is None else tokens_of(engine.model, texts)
    with closing(open_executor(engine)) as host, progress_bar(console) as bar:
        known = known_profile(engine, host)
        return completed(forgotten(known) if anew else known, host, partial(Counted, bar), tokens)


def tokens_of(model: str, texts: Path) -> list[int]:
    """Token ids of a file's prompts, one after the other, cut to the longest text measured.

    Raises ConfigError for a file or a tokenizer that cannot be read.
    """
    from penstock.checkpoint.checkpoint import open_checkpoint
    from penstock.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(model_folder(model, "target")).path)
    longest = CONTEXTS[-1] + ROWS[-1]
    return list(chain.from_iterable(map(tokenizer.encode, read_prompts(texts, longest))))[:longest]


class Counted:
    """A task of the progress bar, called with the number of steps that are done and that of all steps."""

    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._task = bar.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


# --------------------------------------------------------------------------------------------------------------- priced
# A profile of devices that need not be there, from their prices in a cluster file.


def times_by_price(cluster: Cluster) -> dict[str, LayerTimes]:
    """Layer times by device. Raises FieldError for a device whose times are known only for its own layers."""
    model = cluster.as_model
    assert model is not None
    return {device.name: times_on(device, model, cluster.time_scale) for device in candidates(cluster)}


def times_on(device: Device, model: ModelPrice, time_scale: float) -> LayerTimes:
    """The device's milliseconds of a layer in a stage of many, by kind and as a mean; of a stage beside its layers; and
    of the head.
    """
    if device.measured is not None:
        return scaled(device.measured, time_scale)
    many, each = max(2, model.layers), [model.of_kind(kind) for kind in range(len(model.kinds))]

    def stage_ms(model: ModelPrice, layers: int, rows: int, context: int, *, head: bool = False) -> float:
        part = stage_part(device, model, range(layers), time_scale, head=head)
        return 1e3 * part.seconds(rows, chunk(rows, context))

    def layer_ms(model: ModelPrice, rows: int, context: int) -> float:
        # The difference of a long and a short stage leaves out the fixed time of a batch.
        return (stage_ms(model, many, rows, context) - stage_ms(model, 1, rows, context)) / (many - 1)

    def grid(model: ModelPrice) -> Grid:
        return tuple(tuple(layer_ms(model, rows, context) for context in CONTEXTS) for rows in ROWS)

    alike = each[0] if each else model
    return LayerTimes(
        rows=ROWS,
        contexts=CONTEXTS,
        layer_ms=mean_grid([grid(one) for one in each], model.counts(model.all_layers)) if each else grid(model),
        stage_ms=tuple(max(0.0, stage_ms(alike, 1, rows, 0) - layer_ms(alike, rows, 0)) for rows in ROWS),
        head_ms=tuple(max(0.0, stage_ms(alike, 1, rows, 0, head=True) - stage_ms(alike, 1, rows, 0)) for rows in ROWS),
        kind_ms=tuple(map(grid, each)),
    )


def scaled(times: LayerTimes, factor: float) -> LayerTimes:
    """The times multiplied by ``factor``."""

    def of_grid(grid: Grid) -> Grid:
        return tuple(tuple(factor * ms for ms in line) for line in grid)

    (stage_ms, head_ms), kind_ms = of_grid((times.stage_ms, times.head_ms)), tuple(map(of_grid, times.kind_ms))
    return replace(times, layer_ms=of_grid(times.layer_ms), stage_ms=stage_ms, head_ms=head_ms, kind_ms=kind_ms)


# ----------------------------------------------------------------------------------------------------------------- show
# A profile as tables on the terminal.


@dataclass(frozen=True)
class Profile:
    """A model's sizes, the times of its layers by device, links between hosts, and the slots that stages have."""

    model: ModelPrice
    times: dict[str, LayerTimes]
    links: list[LinkBetween]
    kv_slots: int


def report_of(profile: Profile) -> Report:
    """The tables of a profile, and the profile as a document."""
    tables = [*(device_table(profile, name) for name in profile.times), held_table(profile)]
    return Report(asdict(profile), [*tables, *([link_table(profile.links)] if profile.links else [])])


def device_table(profile: Profile, name: str) -> FiguresTable:
    """Milliseconds by the rows of a batch: a layer behind several contexts, a stage beside its layers, and the head.

    Where layers differ, each kind has its own lines, under the number of its first layer.
    """
    times, model = profile.times[name], profile.model
    table = FiguresTable(
        "rows",
        *(f"layer behind\n{context}, ms" for context in times.contexts),
        "stage beside,\nms",
        "head, ms",
        title=f"{name}: from {least_rows(times, model)} rows on 90% of the best rows per second",
    )
    for rows, layer, stage, head in zip(times.rows, times.layer_ms, times.stage_ms, times.head_ms, strict=True):
        table.add_row(str(rows), *(f"{ms:.3f}" for ms in layer), f"{stage:.3f}", f"{head:.3f}")
    for kind, grid in enumerate(times.kind_ms):
        count, first = model.counts(model.all_layers)[kind], model.layer_kinds.index(kind)
        for rows, layer in zip(times.rows, grid, strict=True):
            table.add_row(f"{rows}, {count} as layer {first}", *(f"{ms:.3f}" for ms in layer), "", "")
    return table


def least_rows(times: LayerTimes, model: ModelPrice) -> int:
    """Jupiter's b: the smallest number of rows that still uses the device well."""
    grid = times.of_stage(model.counts(model.all_layers), head=False)
    return least_piece(lambda rows: rows / interpolated(times.rows, times.contexts, grid, rows, 0), times.rows[-1])


def held_table(profile: Profile) -> FiguresTable:
    """Megabytes that a device holds for one layer and for the whole model."""
    model, slots = profile.model, profile.kv_slots
    table = FiguresTable("held, MB", "weights", f"KV of {slots} tokens")
    parts = {"a layer": (range(1), False, False), "the whole model": (model.all_layers, True, True)}
    if model.kinds:
        del parts["a layer"]
        firsts = map(model.layer_kinds.index, range(len(model.kinds)))
        parts = {f"layer {first}": (range(first, first + 1), False, False) for first in firsts} | parts
    for what, (layers, embedding, head) in parts.items():
        held = held_by(model, layers, slots, embedding=embedding, head=head)
        table.add_row(what, f"{held.weights / 1e6:.1f}", f"{held.cache / 1e6:.1f}")
    return table


def link_table(links: Sequence[LinkBetween]) -> FiguresTable:
    """Latency and rate of the links between hosts."""
    table = FiguresTable("link", "latency, ms", "Mbit/s")
    for link in links:
        table.add_row(" - ".join(link.ends), f"{link.latency_ms:.2f}", f"{1e3 * link.bandwidth_gbit_s:.0f}")
    return table


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock profile``: the command itself.


def run_profile(options: ProfileOptions, *, as_json: bool = False, console: Console | None = None) -> Profile:
    """Measure, store and print. Raises ConfigError for options that cannot work, PipelineError for a lost stage."""
    console, out = consoles(console)
    if options.cluster is not None:
        profile = profile_by_price(options)
    else:
        profile = measured_profile(options, console, quiet=as_json)
    report_of(profile).answer(out, sys.stdout if as_json else None)
    return profile


def profile_by_price(options: ProfileOptions) -> Profile:
    """The profile of the devices that a cluster file prices. Raises ConfigError as ``load_devices`` does."""
    assert options.cluster is not None
    cluster = load_devices(options.cluster, as_model=options.model)
    assert cluster.as_model is not None
    return Profile(cluster.as_model, times_by_price(cluster), [], cluster.kv_slots)


def measured_profile(options: ProfileOptions, console: Console, *, quiet: bool) -> Profile:
    """The profile measured anew on the hosts; unless ``quiet``, a line says where it is kept.

    Raises ConfigError and PipelineError.
    """
    found = hosts_profile(options, console, anew=True, texts=options.prompts)
    assert found.links is not None
    kept = ProfileStore(profiles_folder())
    if not quiet and all(kept.times(one.key) is not None for one in found.candidates.devices.values()):
        console.print(f"Kept in {profiles_folder()}, for `penstock plan --hosts` and layer_split auto.", soft_wrap=True)
    return Profile(found.candidates.price, found.times, found.links, found.candidates.capacity)
