"""What stages are to hold, and what a stage's process is told: plain data, sent to the fork server as JSON."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from penstock.emulation.stage import StageEmulation
from penstock.messages import MOST, MOST_LAYERS, Address, FilePath, Index, Label
from penstock.transport.security import LinkSecurity

MOST_THREADS: Final = 1024


class TapSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Hidden states that a stage sends a drafter: of these layers, to this inbox, under the drafter's session."""

    layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    address: Address
    session: Label


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage is to hold: layers [first, last) of the checkpoint in ``model``."""

    model: FilePath
    first: Index
    last: Index
    capacity: Index
    dtype: Label
    device: Label
    host: Label = ""
    """Where the stage runs, by the name that its launcher goes by; empty: on the engine's own host."""
    quantization: Annotated[str, msgspec.Meta(max_length=4, pattern=r"\A(?:none|int8|int4)\Z")] = "none"
    """What the weights are held as."""
    max_model_len: Index
    vocab_size: Index
    """The target's, a drafter's too."""
    gives_back: bool = False
    """Whether layers that look back only so far keep nothing that is out of reach: where no requests share slots."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)] = 1
    """That compute, where the stage has a process of its own."""
    tap: TapSpec | None = None
    target: FilePath = ""
    """A learned drafter's target, whose features it reads; ``model`` is then the drafter's checkpoint."""
    tokenizer: FilePath = ""
    """The checkpoint whose tokens a request's grammar speaks of, if it is not ``model``: a draft model's target."""
    emulation: StageEmulation | None = None

    @property
    def label(self) -> str:
        if self.target:
            return self.model
        return f"layers {self.first}-{self.last - 1}" if self.last > self.first else "no layers"


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a stage process needs to start: its plan, and its place in a running pipeline.

    ``process`` is the name by which its launcher knows the process for as long as that lives. ``bind`` is the address
    its inbox listens on (a tcp port of * lets the system choose), ``engine`` the address of the engine's inbox. With
    ``security`` connections over tcp are those of TLS; in a ``private_network`` plain ones may leave the host. On
    another host its agent fills in ``bind`` and ``security``, which are the host's own. A process that runs keeps them
    where it is told to be a stage of another pipeline.
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
