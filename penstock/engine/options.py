"""Everything that ``LLM`` and the command line let a user set about an engine, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from penstock.cluster import Cluster, load_cluster, preset_names
from penstock.cluster.load import ON_ENGINE, ON_FIRST, ON_LAST, with_drafter_on
from penstock.config import (
    LIMITS,
    MODEL,
    PIPELINE,
    SHARING,
    SPECULATION,
    FieldError,
    Option,
    check,
    check_types,
    nearest,
)
from penstock.core import MOST_RANKS, MOST_THREADS
from penstock.files import DTYPES, FAST, NUMERICS, QUANTIZATIONS
from penstock.hosts.placement import asked_hosts
from penstock.library.names import PAIR, short_names
from penstock.library.shelf import place_of
from penstock.speculation import SpeculativeConfig, parse_speculative

DEVICES: Final = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
"""Matches the values of ``device``: the processor, one GPU by its number, or all GPUs of a host."""
SHORTEST_STAGE_TIMEOUT: Final = 5.0
"""Lower limit of ``stage_timeout``, in seconds: several heartbeats, of which a busy host may delay one or two."""
AUTO: Final = "auto"
"""The ``layer_split`` that has the layers of stages planned."""
DEMO: Final = Path(__file__).parent.parent / "demo"
"""The folder of the shipped pair of models."""

MODEL_NAME: Final = Option(
    "Short name, hub id, address, GGUF file or checkpoint folder; 'demo' is the pair of models that is shipped.",
    MODEL,
    values=(PAIR, *short_names()),
)
CLUSTER: Final = Option(
    "The devices, real or emulated: a preset, random-SEED, local-N, or a file ending in .toml.",
    PIPELINE,
    default="",
    values=tuple(preset_names()),
)

KEYS: Final = "~/.config/penstock/keys, if there are any"
"""Default of the options for a folder of keys, in the words of the help."""

ModelName = Annotated[str, MODEL_NAME]
Dtype = Annotated[
    str,
    Option(
        "Format of hidden states, and of weights held as floats: float32, bfloat16, float16, or auto, which is the "
        "checkpoint's where the processor is fast in it, else float32; on GPUs one of 16 bits.",
        MODEL,
        values=DTYPES,
    ),
]
Quantization = Annotated[
    str,
    Option(
        "Format that weights are held in, a draft model's too: int8 or int4, which are whole numbers, or none, which "
        "is floats; auto: whole numbers where the file holds them (GGUF, GPTQ, AWQ and others), else floats.",
        MODEL,
        values=QUANTIZATIONS,
    ),
]
Numerics = Annotated[
    str,
    Option(
        "exact: tokens and log-probabilities do not depend on drafts, stages or other requests, to the last bit; "
        "refused where a model's layers cannot have that. fast: rounding may decide between tokens that are nearly "
        "tied. auto: exact where the layers can have it.",
        MODEL,
        values=NUMERICS,
    ),
]
Stages = Annotated[
    int | None,
    Option(
        "Number of stages, each of which holds some of the layers.",
        PIPELINE,
        names=("--pipeline-parallel-size", "-pp"),
        default="as the cluster, the split or the hosts say, else 1",
    ),
]
Ranks = Annotated[
    int,
    Option(
        "Processes that share every layer of a stage, each computing a part of its outputs; for dense models on CPUs. "
        "At most as many as a layer has heads of keys and values, each on a host of its own where there are enough.",
        PIPELINE,
        names=("--tensor-parallel-size", "-tp"),
    ),
]
Threads = Annotated[
    int | None,
    Option(
        "Threads of each stage, shared by its ranks, and of a drafter with weights.",
        PIPELINE,
        default="the cores of each host, shared among its processes; 1 on GPUs and emulated devices",
    ),
]
Hosts = Annotated[
    str | None,
    Option(
        "Hosts of the stages, on which `penstock worker` runs; localhost is this one, and a host may be named once for "
        "each of its GPUs. join://HOST:PORT: workers come to this address of this host; ray or ray://HOST:PORT: a Ray "
        "cluster starts them.",
        PIPELINE,
        metavar="HOST[:PORT],...",
        default="as the cluster says, else this host",
    ),
]
DrafterOn = Annotated[
    str | None,
    Option(
        "Where a drafter with weights runs: engine, first-stage, last-stage, a host, which need not have a stage, or a "
        "cluster's device.",
        PIPELINE,
        metavar="PLACE",
        default="as the cluster says, else with the engine",
        values=(ON_ENGINE, ON_FIRST, ON_LAST),
    ),
]
KeysFolder = Annotated[
    str | None,
    Option("Folder of this host's keys, which `penstock keys` makes.", PIPELINE, metavar="FOLDER", default=KEYS),
]
Insecure = Annotated[
    bool, Option("Talk to other hosts without keys or encryption, for private networks only.", PIPELINE)
]
ReplicaCount = Annotated[
    int,
    Option(
        "Engines of the model, each with its own stages and an equal part of this host's cores and of --hosts. A "
        "request goes to the one with the fewest tokens to compute before its answer, and goes on at another if that "
        "one is lost.",
        PIPELINE,
        names=("--data-parallel-size", "-dp"),
    ),
]
SpeculativeSlots = Annotated[
    int | None,
    Option(
        "Most drafted tokens at a time; each takes KV memory on every stage and in the drafter.",
        SPECULATION,
        default="as many as the widest strategy can use, at least 1024",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The target model, and the format and device in which its layers are held."""

    model: ModelName = "demo"
    dtype: Dtype = "float32"
    quantization: Quantization = "auto"
    numerics: Numerics = "auto"
    device: Annotated[
        str,
        Option(
            "Where stages and drafter compute: cpu, cuda:N (one GPU), or cuda (spread over all GPUs).",
            MODEL,
            values=("cpu", "cuda"),
        ),
    ] = "cpu"
    max_model_len: Annotated[
        int | None,
        Option("Most tokens of prompt and output together.", MODEL, default="the checkpoint's, at most 4096"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The stages, and where they are."""

    pipeline_parallel_size: Stages = None
    tensor_parallel_size: Ranks = 1
    layer_split: Annotated[
        str | None,
        Option(
            "Number of layers of each stage; auto plans them for the hosts' speeds, and measures hosts that penstock "
            "profile has not.",
            PIPELINE,
            metavar="N,N,...|auto",
            default="auto for hosts that have been measured and differ, else an even split",
        ),
    ] = None
    cluster: Annotated[str | Cluster | None, CLUSTER] = None
    hosts: Hosts = None
    drafter_on: DrafterOn = None
    keys: KeysFolder = None
    insecure: Insecure = False
    threads: Threads = None
    stage_timeout: Annotated[
        float | None,
        Option(
            "Seconds without a sign of life after which a stage is lost, at least 5; one batch must take less. inf: no "
            "limit.",
            PIPELINE,
            default="five times its slowest batch, at least 10 s",
        ),
    ] = None
    """``math.inf`` suits a debugger in a stage."""
    recovery_timeout: Annotated[
        float,
        Option(
            "Seconds within which a lost stage has to be replaced, while requests wait; else they fail. 0: at once.",
            PIPELINE,
        ),
    ] = 300.0


@dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """How many requests run at a time, and how they share slots and batches."""

    max_num_seqs: Annotated[int, Option("Most requests that run at a time; others wait.", LIMITS)] = 16
    kv_slots: Annotated[
        int | None,
        Option(
            "Most tokens of all running requests and the prefix cache together; each takes memory on every stage.",
            SHARING,
            default="twice max_model_len, at least 4096",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Option("Keep the keys and values of tokens for later requests with the same beginning.", SHARING, default="on"),
    ] = True
    """Without it, layers with a window or a state keep only what is within their reach, which takes less memory."""
    prefill_chunk: Annotated[
        int | None,
        Option(
            "Most tokens of prompts in one batch.",
            SHARING,
            default="128, on a GPU 512; planned pieces where stages are profiled or emulated",
        ),
    ] = None
    prefill_stretch: Annotated[
        float,
        Option(
            "Factor, at least 1, by which tokens of prompts may lengthen a step while other requests decode.", SHARING
        ),
    ] = 2.0


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many engines of one model there are."""

    data_parallel_size: ReplicaCount = 1
    move_after: Annotated[
        float | None,
        Option(
            "Seconds without a result after which an engine's requests go on at another; one batch must take less. The "
            "engine may come back, and is lost after the stage timeout; inf: requests wait until then.",
            PIPELINE,
            metavar="SECONDS",
            default="three times its slowest trip through the stages, at least 1 s",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SharingOptions, ReplicaOptions, PipelineOptions, ModelOptions):
    """Everything that can be set about an engine: the keyword arguments of ``LLM`` and ``AsyncLLM``.

    Names are vLLM's where it has them. The constructor raises FieldError naming the field, and ConfigError for a
    cluster that cannot be read or does not hold together.
    """

    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = field(default_factory=dict)
    """Who drafts and what enters the pipeline: the arguments of ``SpeculativeConfig``. None is plain decoding.

    Default: ``{}``, which is what the command line and the server have: ``auto`` decides what enters, drafted by the
    target's own draft model if it is ``demo``, and by prompt lookup else. The files of a ``model`` without a ``method``
    say which kind of drafter it is.
    """
    speculative_slots: SpeculativeSlots = None
    transport: str = "ipc"
    """Transport between stages on this host: ipc (Unix sockets) or tcp (the loopback interface)."""
    engines_here: int = 1
    """Engines among which this host's cores are divided, this one included; ``Replicas`` sets it."""
    skip_tokenizer_init: bool = False
    """Start without a tokenizer: prompts are token ids, and outputs have no text."""

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", parse_speculative(self.speculative_config, self.model))
        if isinstance(self.cluster, str):
            object.__setattr__(self, "cluster", load_cluster(self.cluster))
        if isinstance(self.cluster, Cluster) and self.drafter_on is not None:
            object.__setattr__(self, "cluster", with_drafter_on(self.cluster, self.drafter_on))
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        known = ", ".join(QUANTIZATIONS)
        check(self.quantization in QUANTIZATIONS, "quantization", self.quantization, f"one of {known}")
        check(self.numerics in NUMERICS, "numerics", self.numerics, f"one of {', '.join(NUMERICS)}")
        check(DEVICES.fullmatch(self.device) is not None, "device", self.device, "cpu, cuda or cuda:N")
        check(self.transport in ("ipc", "tcp"), "transport", self.transport, "ipc or tcp")
        self._check_hosts()
        check_ranks(self.tensor_parallel_size, self)
        wanted = "left out with a cluster: its stages say which devices are ranks"
        ranks = self.tensor_parallel_size
        check(self.cluster is None or ranks == 1, "tensor_parallel_size", ranks, wanted)
        check_replicas(self)
        wanted = "left out with a cluster: its file says what stages hold, and penstock plan what they had better hold"
        check(self.cluster is None or self.layer_split != AUTO, "layer_split", self.layer_split, wanted)
        self._check_numbers()

    def _check_hosts(self) -> None:
        if self.hosts is None:
            return
        stated = self.pipeline_parallel_size is not None or not asked_hosts(self.hosts).come
        check(stated, "pipeline_parallel_size", None, "given where hosts join or Ray has them: how many stages")
        names = asked_hosts(self.hosts).names
        once = len(set(names)) == len(names) or self.device == "cuda"
        check(once, "hosts", self.hosts, "each host once, or with device cuda once for each of its GPUs")
        placed = isinstance(self.cluster, Cluster) and not self.cluster.emulated
        check(not placed, "hosts", self.hosts, "left out: the cluster says where its stages are")
        free = self.pipeline_parallel_size is None or self.layer_split != AUTO or asked_hosts(self.hosts).come
        wanted = "left out with layer_split auto: the plan says how many stages"
        check(free, "pipeline_parallel_size", self.pipeline_parallel_size, wanted)

    def _check_numbers(self) -> None:
        positive = (
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "data_parallel_size",
            "engines_here",
            "threads",
            "max_model_len",
            "max_num_seqs",
            "kv_slots",
            "prefill_chunk",
        )
        for name in positive:
            value = getattr(self, name)
            check(value is None or value >= 1, name, value, "a whole number, at least 1")
        for name, most in (("threads", MOST_THREADS), ("tensor_parallel_size", MOST_RANKS)):
            value = getattr(self, name)
            check(value is None or value <= most, name, value, f"a whole number, at most {most}")
        stretch = self.prefill_stretch
        check(stretch >= 1, "prefill_stretch", stretch, "a number, at least 1")
        timeout = self.stage_timeout
        check(
            timeout is None or timeout >= SHORTEST_STAGE_TIMEOUT,
            "stage_timeout",
            timeout,
            f"a number of seconds, at least {SHORTEST_STAGE_TIMEOUT:.0f}, or None",
        )
        recovery = self.recovery_timeout
        check(recovery >= 0, "recovery_timeout", recovery, "a number of seconds, 0 or above")
        slots = self.speculative_slots
        check(slots is None or slots >= 0, "speculative_slots", slots, "a whole number, 0 or above")


def check_ranks(size: int, options: EngineOptions) -> None:
    """Raise FieldError where a stage is to have ``size`` ranks on devices, or with numerics, that have none."""
    if size <= 1:
        return
    instead = "use pipeline_parallel_size"
    for name, value, holds in (
        ("device", options.device, options.device == "cpu"),
        ("layer_split", options.layer_split, options.layer_split != AUTO),
        ("numerics", options.numerics, options.numerics != FAST),
    ):
        if not holds:
            raise FieldError(
                "tensor_parallel_size",
                f"is {size}, and {name} is {value!r}: ranks share layers in exact numerics on processors alone, and in "
                f"equal stages; {instead}",
            )


def check_replicas(options: EngineOptions) -> None:
    """Raise FieldError where several engines are asked for in a place that cannot be divided among them."""
    count, after = options.data_parallel_size, options.move_after
    check(after is None or after > 0, "move_after", after, "a number of seconds above 0, or None")
    if count <= 1:
        check(after is None, "move_after", after, "left out with one engine: there is none to go on on")
        return
    name, problem = "data_parallel_size", f"is {count}, and"
    if isinstance(options.cluster, Cluster) and not options.cluster.emulated:
        raise FieldError(name, f"{problem} cluster {options.cluster.name} places one engine: name hosts instead")
    if options.hosts is None:
        if options.device == "cuda":
            raise FieldError(name, f"{problem} device cuda spreads one engine over all GPUs: use cuda:N, or hosts")
        return
    asked = asked_hosts(options.hosts)
    if asked.come:
        raise FieldError(name, f"{problem} hosts {options.hosts!r} has hosts come whose names are not known: name them")
    if len(asked.names) % count:
        raise FieldError(name, f"{problem} hosts names {len(asked.names)}; that has to be a multiple of it")


def check_names(options: Mapping[str, Any], of: str) -> None:
    """Raise FieldError for a keyword argument of the class ``of`` that is no option of an engine."""
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise FieldError(name, f"is not an option of {of}; {nearest(name, list(known))}")


def options_of(model: str | Path, options: Mapping[str, Any], of: str = "LLM") -> EngineOptions:
    """The options of an engine from the keyword arguments of a class. Raises FieldError, also for an unknown name."""
    check_names(options, of)
    return EngineOptions(model=model, **options)  # type: ignore[arg-type]  # a path becomes its text


def check_idle_timeout(seconds: float | None) -> None:
    """Raise FieldError unless an engine can be ended after so many idle seconds, or never (None)."""
    holds = seconds is None or (isinstance(seconds, int | float) and seconds > 0)
    check(holds, "idle_timeout", seconds, "a number of seconds above 0, or None")


def check_queue(most: int | None) -> None:
    """Raise FieldError unless so many requests may wait, or any number (None)."""
    check(most is None or (type(most) is int and most >= 1), "max_queue", most, "a whole number, at least 1, or None")


def check_single(count: int) -> None:
    """Raise FieldError if ``count`` engines are asked for where there is one."""
    if count > 1:
        raise FieldError("data_parallel_size", f"is {count}, and this is one engine: use penstock.Replicas")


def options_of_replicas(options: EngineOptions) -> list[EngineOptions]:
    """The options of each of ``data_parallel_size`` engines: the same, but for the hosts, which are cut in order.

    Threads are an engine's share of the cores. Slots and limits are each engine's own: divided, they would refuse
    requests that one engine takes. Raises FieldError where the part of the hosts does not suit the other options.
    """
    count = options.data_parallel_size
    groups: list[str | None] = [options.hosts] * count
    if options.hosts is not None and count > 1:
        names = asked_hosts(options.hosts).names
        each = len(names) // count
        groups = [",".join(names[first : first + each]) for first in range(0, len(names), each)]
    alone = {"data_parallel_size": 1, "move_after": None, "engines_here": count}
    return [replace(options, hosts=hosts, **alone) for hosts in groups]  # type: ignore[arg-type]


def model_folder(name: str, part: str) -> str:
    """The place of a model as it is typed: that of ``part`` ("target" or "draft") for "demo", the shipped pair.

    A model that is not on this host is fetched. Raises PenstockError, in one line, where that fails.
    """
    return str(DEMO / part) if name == PAIR else place_of(name)
