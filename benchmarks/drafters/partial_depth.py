"""A block drafter that reads the states of tokens in flight, as far as they have got, beside one that sees their ids.

    python -m benchmarks.drafters.partial_depth DATA WORK [--updates 1000] [--seeds 3] [--only NAME ...]

Both are DSpark's module for the demo target, causal and shown the tokens in flight, trained on the same steps of 1,024
tokens. A token that has passed some of the stages has the states of their layers already; SPD's module reads them
(arXiv 2605.30852, section 3.5). Here such a token's row starts from its embedding plus a projection of these states,
normed, where the layers that are still to come count as zero. In training a block's tokens are in a pipeline of a
random number of stages, half of the time one that they fill. Held-out tokens at T = 0 are looked for among the best
candidates with 0 to 4 tokens in flight, which fill a pipeline of one stage more, or stand in one of 8 or 16, or have no states
yet, so that the module with states has none to read.

A case that is in benchmarks/measured/drafters/partial_depth.json is not measured again with as many updates; a run that
was broken off goes on. Weights stay in WORK.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.drafters.like_for_like import AMONG, First, main, options_of
from benchmarks.shared import virtual
from penstock.lab.trainer.block import Blocks, BlockTrainee
from penstock.lab.trainer.loop import Bar, load_state, train
from penstock.lab.trainer.options import IN_FLIGHT
from penstock.lab.trainer.run import (
    STATE,
    cached_states,
    choose_vocabulary,
    fresh_drafter,
    held_out,
    make_run,
    planned,
    read_corpus,
    set_up,
    settings_of,
)
from penstock.lab.trainer.states import Batch, Loader
from penstock.models.speculators.base import TargetHead

HOW: Final = "Measured, with the demo target"
SHOWN: Final = "shown dspark"
"""The recipe of ``like_for_like`` that both cases are trained by."""
CASES: Final = ("ids", "states")
STAGES: Final = (8, 16)
"""Numbers of stages of pipelines that the tokens in flight do not fill."""
NONE_READ: Final = 10**9
"""Number of stages of a pipeline in which no token has states yet: the module with states, without any to read."""
MOST_STAGES: Final = 16
EASED: Final = 0.1
"""Scale of a fresh projection beside the embedding that it is added to."""


class PartialTrainee(BlockTrainee):
    """A block trainee whose rows of shown tokens start from embedding and states.

    ``reads`` are the hidden states that the context is made of, ``layers`` the target's number of layers; ``stages``
    says how many a token has to pass in evaluation, at least as many as the tokens in flight fill.
    """

    def __init__(self, module: Any, head: nn.Module, reads: tuple[int, ...], layers: int) -> None:
        super().__init__(module, head, IN_FLIGHT)
        width = module.hidden_size
        self.register_buffer("reads_T", torch.tensor(reads), persistent=False)
        self.layers = layers
        self.stages = 1
        self.partial = nn.Linear(len(reads) * width, width, bias=False)
        self.partial_norm = LlamaRMSNorm(width)
        nn.init.constant_(self.partial_norm.weight, EASED)
        self._drawn_stages_BA: Tensor | None = None
        self._beside_ND: Tensor | None = None
        module.embed_tokens.register_forward_hook(lambda _, __, rows_ND: rows_ND + self._beside_ND)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        try:
            return super().forward(batch, seed)
        finally:
            self._drawn_stages_BA = None

    def _drawn(self, batch: Batch, generator: torch.Generator) -> Blocks:
        blocks = super()._drawn(batch, generator)
        fewest_BA = blocks.shown_BA + 1
        share_BA = torch.rand(fewest_BA.shape, generator=generator).mul(2).sub(1).clamp(min=0).to(fewest_BA.device)
        self._drawn_stages_BA = fewest_BA + (share_BA * (MOST_STAGES + 1 - fewest_BA)).long()
        return blocks

    def _hidden(self, batch: Batch, blocks: Blocks) -> Tensor:
        stages_BA = self._drawn_stages_BA
        if stages_BA is None:
            stages_BA = (blocks.shown_BA + 1).clamp(min=self.stages)
        self._beside_ND = self._partial(batch, blocks, stages_BA).flatten(0, 2)
        return super()._hidden(batch, blocks)

    def _partial(self, batch: Batch, blocks: Blocks, stages_BA: Tensor) -> Tensor:
        """The addition to the embedding of each row [B, A, M, D]; zero for masks and for tokens that just enter."""
        passed_BAM = blocks.shown_BA[..., None] - blocks.offsets()
        done_BAM = passed_BAM.clamp(min=0) * self.layers // stages_BA[..., None]
        there_BAMT = (self.reads_T <= done_BAM[..., None]) & (passed_BAM > 0)[..., None]
        positions_BAM = (blocks.anchors_BA[..., None] + 1 + blocks.offsets()).clamp(max=batch.states_BLF.shape[1] - 1)
        every_B = torch.arange(len(positions_BAM), device=positions_BAM.device)[:, None, None]
        states_BAMF = batch.states_BLF[every_B, positions_BAM]
        kept_BAMF = (states_BAMF.unflatten(-1, (len(self.reads_T), -1)) * there_BAMT[..., None]).flatten(-2)
        return self.partial_norm(self.partial(kept_BAMF)) * there_BAMT.any(-1, keepdim=True)


def measured(asked: argparse.Namespace, _: virtual.Sizes, case: str, seed: int) -> dict[str, Any]:
    """Train a drafter, or finish what was begun, and look at it on held-out text."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    options, console = options_of(asked, SHOWN, seed), Console(quiet=True)
    options = replace(options, output=options.output.with_name(f"{options.output.name}-{case}"))
    setup = set_up(options, console)
    target, kind = setup.target, setup.kind
    reads = kind.reads(setup.options, target)

    def trainee(module: Any, head: nn.Module, *_: Any) -> BlockTrainee:
        if case == "ids":
            return BlockTrainee(module, head, IN_FLIGHT)
        return PartialTrainee(module, head, reads, target.num_layers)

    setup = replace(setup, kind=replace(kind, trainee=trainee))
    corpus = read_corpus(setup)
    vocabulary = choose_vocabulary(setup, corpus)
    settings = settings_of(setup, corpus, vocabulary)
    cache = cached_states(setup, corpus)
    run = make_run(setup, corpus, cache, fresh_drafter(setup, vocabulary, settings), vocabulary, planned(setup, corpus))
    own = {name: one for name, one in run.trainee.named_parameters() if name.startswith("partial")}
    run = replace(run, parameters={**run.parameters, **own})
    began = time.process_time()
    with Bar(console, 0, len(run.steps), kind.shown) as bar:
        train(run, load_state(setup.work / STATE, settings), bar)
    seconds = time.process_time() - began
    found: dict[str, Any] = {"processor_s": round(seconds, 1)}
    head = TargetHead(target, options.dtype, "cpu")
    loader = Loader(corpus, cache, reads, target.num_layers, "cpu")
    for stages in (1, *STAGES, NONE_READ) if case == "states" else (1,):
        run.trainee.stages = stages  # type: ignore[assignment]
        with torch.autocast("cpu", torch.bfloat16):
            steps = held_out(setup.options, corpus, loader, First(run.trainee, IN_FLIGHT + 1), head).by_step
        name = {1: "filled", NONE_READ: "none read"}.get(stages, f"{stages} stages")
        found[name] = [[round(step[count - 1], 4) for count in AMONG] for step in steps]
    return found


if __name__ == "__main__":
    main(__file__, measured, HOW, updates=1000, names=CASES)
