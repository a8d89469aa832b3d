"""The plan of a stage, and the specification of its process: plain data, sent to the fork server as JSON."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from penstock.dtypes import AUTO
from penstock.emulation.stage import StageEmulation
from penstock.messages import MOST, MOST_LAYERS, Address, FilePath, Index, Label
from penstock.transport.security import LinkSecurity

MOST_THREADS: Final = 1024


class TapSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden states that a stage sends a drafter: of these layers, to this inbox, under the drafter's session."""

    layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    address: Address
    session: Label


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that one stage holds: layers [first, last) of the checkpoint in ``model``."""

    model: FilePath
    first: Index
    last: Index
    capacity: Index
    dtype: Label
    device: Label
    host: Label = ""
    """The host on which the stage runs, as its launcher is named; empty for the engine's own."""
    gpu: Label = ""
    """The UUID of the GPU that ``device`` names; empty for a processor, and where the number has to do."""
    quantization: Annotated[str, msgspec.Meta(max_length=4, pattern=r"\A(?:none|int8|int4)\Z")] = "none"
    """The format in which the weights are held."""
    numerics: Annotated[str, msgspec.Meta(max_length=5, pattern=r"\A(?:auto|exact|fast)\Z")] = AUTO
    """Whether a row's bits may depend on the rows beside it; a stage that cannot be exact refuses "exact"."""
    max_model_len: Index
    vocab_size: Index
    """The target's vocabulary, for a drafter, too."""
    gives_back: bool = False
    """Whether layers with a limited reach free slots that are out of reach. Only where no requests share slots."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)] = 1
    """How many threads compute, where the stage has a process of its own."""
    tap: TapSpec | None = None
    target: FilePath = ""
    """The target whose features a learned drafter reads; ``model`` is then the drafter's checkpoint. Else empty."""
    tokenizer: FilePath = ""
    """The checkpoint with the tokenizer for grammars, if it is not ``model``: a draft model's target."""
    emulation: StageEmulation | None = None

    @property
    def label(self) -> str:
        if self.target:
            return self.model
        return f"layers {self.first}-{self.last - 1}" if self.last > self.first else "no layers"


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a stage process needs to start: its plan, and its place in a running pipeline.

    ``process`` is the name by which its launcher knows the process for as long as that lives. ``bind`` is the address
    on which its inbox listens (a tcp port of * lets the system choose), ``engine`` the address of the engine's inbox.
    With ``security`` tcp connections use TLS; in a ``private_network`` plain ones may leave the host. On another host
    its agent fills in ``bind`` and ``security``, which are the host's own. A running process keeps both when it joins
    another pipeline.
    """

    process: Label
    session: Label
    index: Index
    stages: Annotated[int, msgspec.Meta(ge=1, lt=MOST)]
    bind: Annotated[str, msgspec.Meta(max_length=256)]
    engine: Address
    plan: StagePlan
    security: LinkSecurity | None = None
    private_network: bool = False
