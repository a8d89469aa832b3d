"""The options of ``penstock train``, and what can be refused before anything is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, TypeVar

from penstock.checkpoint.look import check_built_for, check_version, glance
from penstock.cluster import Cluster
from penstock.config import DATA, MODEL, OUTPUT, TRAINING, FieldError, Option, check, check_positive, nearest
from penstock.engine.options import EngineOptions, ModelName, model_folder
from penstock.environment import CURVES, TRAINING_NEED, require
from penstock.lab.simulator import check_drafter, modelled_cluster
from penstock.lab.trainer.corpus import documents_of, files_of
from penstock.library.names import read_reference

# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock train``; whatever can be refused without reading a file is refused here.

T = TypeVar("T")

KINDS: Final = (
    "eagle",
    "eagle3",
    "medusa",
    "mtp",
    "spd",
    "early-exit",
    "dflash",
    "dspark",
    "headrace",
    "peagle",
    "draft",
)
BELONGS: Final = {
    "draft_vocab_size": ("eagle3", "medusa", "spd", "early-exit", "peagle"),
    "ttt_steps": ("eagle3", "mtp"),
    "heads": ("medusa",),
    "spec_layers": ("spd", "early-exit", "dflash", "dspark", "headrace", "peagle"),
    "block_size": ("dflash", "dspark", "headrace", "peagle"),
    "in_flight": ("dflash", "dspark", "headrace", "peagle"),
    "bidirectional": ("dflash", "dspark"),
    "markov_rank": ("dspark", "headrace"),
    "variant": ("spd",),
    "anchors": ("spd",),
    "stages": ("spd",),
    "post_state": ("spd",),
    "exit_layer": ("early-exit",),
    "layers": ("draft",),
}
"""The kinds that have an option, for options that not all have; None stands for the kind's default."""
VARIANTS: Final = ("anchors", "paper")
DTYPES: Final = ("float32", "bfloat16")
DEVICES: Final = ("cpu", "cuda")
"""Values of the options ``variant``, ``dtype`` and ``device``."""
TTT_STEPS: Final = 7
HEADS: Final = 5
SPEC_LAYERS: Final = 1
BLOCK_LAYERS: Final = 2
BLOCK_SIZE: Final = 8
IN_FLIGHT: Final = 4
MARKOV_RANK: Final = 256
DRAFT_LAYERS: Final = 2
DRAFT_VOCAB_SIZE: Final = 32000
STAGES: Final = (4, 8, 16)
"""Defaults for the options of these names: ``DRAFT_LAYERS`` for draft's ``layers``, ``BLOCK_LAYERS`` for the
``spec_layers`` of block drafters. ``TTT_STEPS`` is that of EAGLE-3's trainer, ``HEADS`` the most that Medusa's authors
found to help, and ``DRAFT_VOCAB_SIZE`` that of EAGLE-3's published modules. Larger ones of the others make a drafter
better and slower; more ``IN_FLIGHT`` leave fewer rows of a block to be drafted."""
SHORTEST: Final = 8
"""Smallest ``max_length``, in tokens. A chain of evaluation has seven steps behind its first token (``loop.CHAIN``)."""


def whole_numbers(field: str, text: str) -> tuple[int, ...]:
    """Read "4,8,16". Raises FieldError for anything that is no such list."""
    return listed(field, text, int, "whole numbers, like 4,8,16")


def numbers(field: str, text: str) -> tuple[float, ...]:
    """Read "0,0.7,1". Raises FieldError for anything that is no such list."""
    return listed(field, text, float, "numbers, like 0,0.7,1")


def listed(field: str, text: str, read: Callable[[str], T], wanted: str) -> tuple[T, ...]:
    """The entries of a list with commas, each read by ``read``. Raises FieldError unless all can be read."""
    try:
        return tuple(read(one) for one in text.split(","))
    except ValueError:
        raise FieldError(field, f"is {text!r}; it has to be a list of {wanted}") from None


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The kind of drafter, its target and data, and the settings of the training.

    Raises FieldError for a value out of range, an option of another kind, and options that exclude each other.
    """

    kind: Annotated[
        str,
        Option(
            "What to train: eagle, eagle3, medusa, mtp, spd, early-exit, dflash, dspark, headrace, peagle or draft.",
            metavar="KIND",
            positional=True,
        ),
    ]
    output: Annotated[
        Path,
        Option("Where the drafter goes. A run that was broken off there goes on.", OUTPUT, metavar="DIR", default=""),
    ]
    """Its subfolder ``training`` keeps the cache, the state and the curves."""
    data: Annotated[
        tuple[Path, ...],
        Option(
            "File, or folder of files: .jsonl with 'messages', 'conversations' or 'text'; others are plain text. May "
            "be repeated.",
            DATA,
            metavar="PATH",
            default="",
        ),
    ] = ()
    self_generate: Annotated[
        int | None,
        Option("Number of conversations of which the target writes both sides, in place of data.", DATA, default=""),
    ] = None
    """It needs a chat model, since it continues the chat template's opening of a user's message."""
    model: ModelName = EngineOptions.model
    dtype: Annotated[str, Option("float32, or bfloat16 for target, hidden states and autocast.", MODEL)] = "float32"
    """With bfloat16 the drafter computes in it too, but its weights stay float32."""
    device: Annotated[str, Option("cpu or cuda.", MODEL)] = "cpu"
    max_length: Annotated[int, Option("Most tokens of one sequence.", DATA)] = 2048
    """Plain text is cut into pieces of this length, and conversations lose everything after it."""
    regenerate: Annotated[bool, Option("Let the target write the answers anew.", DATA)] = False
    temperatures: Annotated[
        tuple[float, ...],
        Option(
            "Temperatures of what the target writes, taken in turns.",
            DATA,
            metavar="T,...",
            default="its generation_config's",
            parse=partial(numbers, "temperatures"),
        ),
    ] = ()
    """A drafter is best at the temperatures that it was trained at."""
    epochs: Annotated[int, Option("Number of times through the data.", TRAINING)] = 1
    max_steps: Annotated[
        int | None, Option("Number of steps after which the training ends.", TRAINING, default="as the epochs say")
    ] = None
    """The limit counts steps of the optimiser and applies even within an epoch."""
    learning_rate: Annotated[
        float | None,
        Option(
            "Highest learning rate, to which it rises before it falls to zero. Small targets need more than the "
            "default.",
            TRAINING,
            default="the kind's authors'",
        ),
    ] = None
    """The default of each kind is meant for targets of several billion parameters."""
    batch_tokens: Annotated[int, Option("Most tokens of one step.", TRAINING)] = 8192
    """The limit holds for all parts of a step on all devices together."""
    accumulate: Annotated[int, Option("Number of parts of a step, computed one after the other.", TRAINING)] = 1
    """More parts need less memory."""
    draft_vocab_size: Annotated[
        int | None,
        Option(
            "eagle3, medusa, spd, early-exit, peagle: number of tokens, the most frequent ones, that can be drafted.",
            TRAINING,
            default=f"{DRAFT_VOCAB_SIZE}, or all of fewer; medusa: all",
        ),
    ] = None
    ttt_steps: Annotated[
        int | None,
        Option(
            "eagle3, mtp: steps of the training-time test (EAGLE-3, section 3.2).", TRAINING, default=str(TTT_STEPS)
        ),
    ] = None
    heads: Annotated[int | None, Option("medusa: number of heads.", TRAINING, default=str(HEADS))] = None
    spec_layers: Annotated[
        int | None,
        Option(
            "spd, early-exit, dflash, dspark, headrace, peagle: number of the module's layers.",
            TRAINING,
            default=f"{SPEC_LAYERS}; dflash, dspark, headrace, peagle: {BLOCK_LAYERS}",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Option(
            "dflash, dspark, headrace, peagle: rows of a block, which one pass drafts.",
            TRAINING,
            default=str(BLOCK_SIZE),
        ),
    ] = None
    in_flight: Annotated[
        int | None,
        Option(
            "dflash, dspark, headrace, peagle: most tokens in flight that a block shows in training; 0: none, as "
            "published.",
            TRAINING,
            default=str(IN_FLIGHT),
        ),
    ] = None
    """A pipeline of n stages has up to n - 1 tokens in flight before the one that is asked about."""
    bidirectional: Annotated[
        bool, Option("dflash, dspark: rows of a block see later ones, too, as published.", TRAINING)
    ] = False
    markov_rank: Annotated[
        int | None, Option("dspark, headrace: rank of the Markov head.", TRAINING, default=str(MARKOV_RANK))
    ] = None
    variant: Annotated[
        str | None,
        Option("spd: anchors, for any number of stages, or paper, for one.", TRAINING, default=VARIANTS[0]),
    ] = None
    anchors: Annotated[
        tuple[int, ...] | None,
        Option(
            "spd: numbers of the target's hidden states that it reads; 0 is that before any layer.",
            TRAINING,
            metavar="0,STATE,...",
            default="0,1,2,4,... up to half, and the last",
            parse=partial(whole_numbers, "anchors"),
        ),
    ] = None
    stages: Annotated[
        tuple[int, ...] | None,
        Option(
            "spd: numbers of pipeline stages to train for; variant paper takes one.",
            TRAINING,
            metavar="N,...",
            default=f"{','.join(map(str, STAGES))} as far as there are layers",
            parse=partial(whole_numbers, "stages"),
        ),
    ] = None
    post_state: Annotated[bool, Option("spd of the paper: asked once a token has passed a stage.", TRAINING)] = False
    exit_layer: Annotated[
        int | None,
        Option(
            "early-exit: number of the target's hidden state that it reads.",
            TRAINING,
            default="a quarter of the layers",
        ),
    ] = None
    layers: Annotated[
        int | None, Option("draft: number of the model's layers.", TRAINING, default=str(DRAFT_LAYERS))
    ] = None
    seed: Annotated[int, Option("Seed of the training: the same one gives the same weights.", TRAINING)] = 0
    cluster: Annotated[
        str | None,
        Option("Estimate the speed-up on this emulated cluster: preset, random-SEED or a file.", OUTPUT, default=""),
    ] = None
    save_every: Annotated[int, Option("Steps between states and held-out figures.", OUTPUT)] = 100
    restart: Annotated[bool, Option("Begin anew where there is an earlier run.", OUTPUT)] = False
    """The target's hidden states are kept, since their key names the model and the data."""

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise FieldError(name, f"is {getattr(self, name)!r}; {nearest(getattr(self, name), known)}")
        self._check_data()
        check_positive(self, "epochs", "max_steps", "learning_rate", "accumulate", "draft_vocab_size", "ttt_steps")
        check_positive(self, "save_every", "heads", "spec_layers", "exit_layer", "layers", "markov_rank")
        check_positive(self, "in_flight", or_zero=True)
        check(self.block_size is None or self.block_size > 1, "block_size", self.block_size, "at least 2")
        check(self.max_length >= SHORTEST, "max_length", self.max_length, f"at least {SHORTEST}")
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        for name, kinds in BELONGS.items():
            if getattr(self, name) not in (None, False) and self.kind not in kinds:
                raise FieldError(name, f"belongs to {', '.join(kinds)}, not {self.kind}; remove it")
        self._check_spd()
        least = self.max_length * self.accumulate
        check(
            self.batch_tokens >= least, "batch_tokens", self.batch_tokens, f"at least max_length x accumulate, {least}"
        )
        check(not self.output.is_file(), "output", str(self.output), "a folder, or a name that is still free")

    def _check_data(self) -> None:
        """Raise FieldError for options about data that do not go together."""
        check_positive(self, "self_generate")
        if self.self_generate is None:
            check(bool(self.data), "data", "", "at least one file or folder, or give self_generate")
        elif self.data or self.regenerate:
            name = "data" if self.data else "regenerate"
            raise FieldError(name, "cannot go with self_generate, which writes both sides; remove one of them")
        if self.temperatures and self.self_generate is None and not self.regenerate:
            raise FieldError("temperatures", "belongs to self_generate and regenerate; remove it, or give one of these")
        sound = all(math.isfinite(one) and one >= 0 for one in self.temperatures)
        check(sound, "temperatures", self.temperatures, "numbers of 0 or above")

    def _check_spd(self) -> None:
        """Raise FieldError for options of spd that do not go together."""
        if self.variant is not None and self.variant not in VARIANTS:
            raise FieldError("variant", f"is {self.variant!r}; {nearest(self.variant, VARIANTS)}")
        for name in ("anchors", "stages"):
            given = getattr(self, name)
            rising = given is None or (bool(given) and all(one < other for one, other in pairwise(given)))
            check(rising, name, given, "a rising list of whole numbers")
        check(self.stages is None or self.stages[0] > 0, "stages", self.stages, "numbers above 0")
        begins = self.anchors is None or (self.anchors[0] == 0 and len(self.anchors) > 1)
        check(begins, "anchors", self.anchors, "0, what a token has that has passed no layer, and at least one more")
        if self.variant == "paper":
            if self.anchors is not None:
                raise FieldError("anchors", "belongs to variant anchors, not paper; remove it")
            found = "missing" if self.stages is None else f"{self.stages!r}"
            if self.stages is None or len(self.stages) != 1:
                raise FieldError("stages", f"is {found}; variant paper is trained for one number of stages, name it")
        elif self.post_state:
            raise FieldError("post_state", "belongs to variant paper, not anchors; remove it")


def check_within(options: TrainOptions, last: int, *names: str) -> None:
    """Raise FieldError if one of these options is above the target's ``last`` layer."""
    for name in names:
        given = getattr(options, name)
        if given is not None and (max(given) if isinstance(given, tuple) else given) > last:
            raise FieldError(name, f"is {given}; the target has {last} layers")


# ------------------------------------------------------------------------------------------------------------ preflight
# Checks of training options that need no more than a look at files, before torch is imported.

COUNTED: tuple[str, ...] = ("layers", "spec_layers", "exit_layer", "stages", "anchors")
"""Options that count the target's layers, or name one by its number."""


def check_run(options: TrainOptions) -> None:
    """Raise ConfigError for what is missing, holds no data, does not fit the target, or is not installed."""
    for path in options.data:
        for file in files_of(path):
            for _ in itertools.islice(documents_of(file), 1):
                pass
    if options.cluster is not None:
        drafting_cluster(options.cluster)
    check_version()
    check_built_for(options.device)
    if read_reference(options.model) is not None:
        require([TRAINING_NEED, CURVES])  # before anything is fetched
    target = glance(model_folder(options.model, "target"))
    check_target(options, target.vocab_size, target.num_layers)
    require([TRAINING_NEED, CURVES])


def check_target(options: TrainOptions, vocab_size: int | None, layers: int | None) -> None:
    """Raise FieldError for options above the target's sizes; None stands for a size that is not known."""
    size = options.draft_vocab_size
    if size is not None and vocab_size is not None and size > vocab_size:
        raise FieldError("draft_vocab_size", f"is {size}; the target knows {vocab_size} tokens")
    if layers is not None:
        check_within(options, layers, *COUNTED)


def drafting_cluster(name: str) -> Cluster:
    """An emulated cluster with a place for the drafter. Raises ConfigError for any other."""
    cluster = modelled_cluster(name)
    check_drafter(cluster)
    return cluster
