"""Replaces transformers' state-carrying modules by mixers over slots, if a sample shows that both compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from penstock.models.fused.agreement import agree, sample_of, widened
from penstock.models.gate import refusal
from penstock.models.loader import quiet
from penstock.models.recurrent.delta_net import DeltaNet, kimi_linear, olmo_hybrid, qwen3_5, qwen3_next
from penstock.models.recurrent.mamba2 import Mamba2
from penstock.models.recurrent.mixer import Host, Mixer
from penstock.models.recurrent.short_convolution import ShortConvolution
from penstock.stage.visibility import BatchView, RequestView

ROWS: Final = 5
"""How many rows the sample has: more than a convolution reaches back."""

MIXERS: Final[Mapping[str, Callable[[Any, Host], Mixer]]] = {
    "Qwen3NextGatedDeltaNet": partial(DeltaNet, project=qwen3_next),
    "Qwen3_5GatedDeltaNet": partial(DeltaNet, project=qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": partial(DeltaNet, project=qwen3_5),
    "OlmoHybridGatedDeltaNet": partial(DeltaNet, project=olmo_hybrid),
    "KimiLinearDeltaAttention": partial(DeltaNet, project=kimi_linear),
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}
"""Name of transformers' class -> mixer."""


@torch.inference_mode()
def install(config: Any, layers: Sequence[nn.Module], host: Host) -> None:
    """Replace the mixers of these layers, in place. Raises ConfigError if one computes something unexpected."""
    for layer in layers:
        for name, own in list(layer.named_children()):
            if make := MIXERS.get(type(own).__name__):
                check_alike(config, make, own, host)
                mixer = make(own, host)
                host.mixers.append(mixer)
                setattr(layer, name, mixer)


def check_alike(config: Any, make: Callable[[Any, Host], Mixer], own: Any, host: Host) -> None:
    """Raise ConfigError unless a mixer gives the same results as ``own`` for some sample rows, both in float32."""
    wide = widened(own)
    weight = next(one for one in wide.parameters() if one.dim() == 2 and one.shape[1] == config.hidden_size)
    trial = host.like(min(ROWS, host.capacity))
    sample = sample_of(weight, trial.capacity)
    with quiet():  # it would advise to install kernels, and is about to be replaced
        expected = wide(hidden_states=sample)
    mixer = make(wide, trial)
    trial.mixers.append(mixer)
    trial.begin(_chain(trial.capacity))
    if not agree(mixer(sample), expected):
        raise refusal(config, f"transformers' {type(own).__name__} computes something that this release does not know")


def _chain(count: int) -> BatchView:
    """A batch of one request with ``count`` rows in the first slots."""
    order = np.arange(count)
    request = RequestView(0, order, order, order, np.tri(count, dtype=bool))
    return BatchView(order * 0, order, order, order, order * 0, [request], order - 1)
