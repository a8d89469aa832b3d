"""SPD's module and the early exit before training: sizes, configuration, and initial tensors.

The format is yuyijiong/speculative_pipeline_decoding's, as read by ``models/speculators/spd_format.py``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from penstock.drafters.depths import layers_done
from penstock.models.checkpoint import Checkpoint
from penstock.models.loader import load_module
from penstock.models.speculators.spd_format import ANCHORS, PAPER
from penstock.trainer.kinds.base import Start, dtype_name, with_usual
from penstock.trainer.options import DRAFT_VOCAB_SIZE, SPEC_LAYERS, STAGES, VARIANTS, TrainOptions, check_within

NOISE: Final = 0.02
OPTIONAL: Final = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")
"""Tensors that the module's attention has only where the target's has them."""


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """Defaults: anchors 0, 1, 2, 4, ... up to half of the layers and the last; an exit after a quarter
    of the layers."""
    last = target.num_layers
    options = with_usual(options, spec_layers=SPEC_LAYERS, draft_vocab_size=min(DRAFT_VOCAB_SIZE, target.vocab_size))
    check_within(options, last, "spec_layers", "exit_layer")
    if options.kind == "early-exit":
        return with_usual(options, exit_layer=max(1, last // 4))
    doubled = [1 << i for i in range(last.bit_length()) if 1 << i <= last // 2]
    possible = tuple(stages for stages in STAGES if stages <= last)
    options = with_usual(options, variant=VARIANTS[0], stages=possible or (last,))
    if options.variant == "anchors":
        options = with_usual(options, anchors=(0, *doubled, last))
    check_within(options, last, "stages", "anchors")
    return options


def levels_read(options: TrainOptions, target: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """The states that each level's feature reads. The paper's level k reads 0, half of the layers
    passed, all (Eq. 1)."""
    if options.variant == "paper":
        assert options.stages is not None
        done = layers_done(target.even_split(options.stages[0]))
        return tuple(tuple(sorted({0, layers // 2, layers})) for layers in done)
    anchors = anchors_of(options)
    return tuple(anchors[: i + 1] for i in range(len(anchors)))


def anchors_of(options: TrainOptions) -> tuple[int, ...]:
    if options.anchors is not None:
        return options.anchors
    assert options.exit_layer is not None
    return (options.exit_layer,)


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    return tuple(sorted({state for level in levels_read(options, target) for state in level} - {0}))


def config(start: Start) -> dict[str, Any]:
    options, target, ids_v = start.options, start.target, start.draft_ids_v
    known = {} if ids_v is None else {"draft_token_ids": ids_v.tolist()}
    common = {
        "speculator": options.kind.replace("-", "_"),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": start.drafted,
        "num_spec_layers": options.spec_layers,
        "base_model_path": options.model,
        "torch_dtype": dtype_name(target),
        **known,
    }
    if options.variant == "paper":
        assert options.stages is not None
        deepest_first = [list(level) for level in reversed(levels_read(options, target)[1:])]
        own = {"num_stages": options.stages[0], "shallow_hidden_layer_indices": deepest_first}
        return {**common, "version": PAPER, **own, "post_state": options.post_state}
    anchors = anchors_of(options)
    return {**common, "version": ANCHORS, "aggr_feature_bound": list(anchors), "num_aggr_types": len(anchors)}


def fresh(start: Start) -> dict[str, Tensor]:
    """Layers and head copied from the target; a feature is nearly the deepest state that it reads."""
    options, levels = start.options, levels_read(start.options, start.target)
    assert options.spec_layers is not None
    deepest = len(levels) - 1
    tensors = {"lm_head.weight": start.head()}
    for i, level in enumerate(levels):
        shallow, name = "g0_proj" if i == 0 else f"stage_projs.{deepest - i}", f"aggr_projs.{i}"
        tensors[f"{shallow if options.variant == 'paper' else name}.weight"] = projection(start, len(level))
    for j in range(options.spec_layers):
        tensors |= layer(start, j)
        if options.variant == "paper":
            # Block i = 0 is the deepest; the newest tokens are no memory.
            names = (f"fixed_stage_per_layer_projs.{j}.{i}.weight" for i in range(deepest))
            tensors |= {name: projection(start, 1) for name in names}
    return tensors


def projection(start: Start, states: int) -> Tensor:
    """[D, states x D]: an identity for the last of the states, and a little noise for the others."""
    width = start.target.hidden_size
    others = torch.randn(width, (states - 1) * width, generator=start.generator) * NOISE
    return torch.cat([others, torch.eye(width)], dim=1)


def layer(start: Start, index: int) -> dict[str, Tensor]:
    """A copy of a target's layer where it is a Llama or Qwen layer, else a random one of its sizes.

    The copies are spread from the target's first layer, which can read a token's embedding, to its last, whose output
    the head can read; a single one is the last. With two layers this starts the demo target's module at a loss of 3.6
    after 50 steps, where its last two layers gave 5.3 and its first two 4.6.
    """
    prefix, target = f"spec_layers.{index}", start.target
    made = start.layer(prefix, target.hidden_size)
    made[f"{prefix}.input_layernorm.weight"] = torch.ones(target.hidden_size)
    last, others = target.num_layers - 1, (start.options.spec_layers or 1) - 1
    # Index 0 is the target's first layer and index ``others`` its last; a single one is the last.
    number = last - (others - index) * last // max(1, others)
    base = getattr(load_module(target, number, number + 1, "float32", "cpu"), target.parts.base)
    own = getattr(base, target.parts.layers)[number].state_dict()
    copied = {f"{prefix}.{name}": tensor.clone() for name, tensor in own.items()}
    optional = {f"{prefix}.self_attn.{name}" for name in OPTIONAL}
    alike = all(name in copied and copied[name].shape == tensor.shape for name, tensor in made.items())
    return copied if alike and set(copied) - set(made) <= optional else made
