"""Block drafters written down plainly in numpy from their papers' and files' words, row by row, for the tests.

One layer of DFlash: queries of the block's rows; keys and values of the context and of the rows, by the same matrices.
DFlash 2 also adds to each row, before and after both halves of a layer, what is left of the rows before it. Nothing
here is shared with the modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tests.speculators import HEADS, KEY_HEADS

Arrays = Mapping[str, np.ndarray]


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """One head's vector [d], turned by its position."""
    half = len(x) // 2
    angle = position / theta ** (np.arange(half) / half)
    one, other = x[:half], x[half:]
    return np.concatenate([one * np.cos(angle) - other * np.sin(angle), other * np.cos(angle) + one * np.sin(angle)])


def heads_of(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(count, -1)


def block(
    t: Arrays,
    embedding: np.ndarray,
    states: np.ndarray,
    positions: Sequence[int],
    tokens: Sequence[int],
    first: int,
    *,
    causal: Sequence[bool],
    windows: Sequence[int | None],
    theta: float,
    eps: float,
    partial: np.ndarray | None = None,
) -> np.ndarray:
    """The normed states [rows, D] of a block of ``tokens``, masks among them, whose first stands at position ``first``.

    ``states`` [context, F] are the target's, side by side, of the tokens at ``positions`` before the block. ``partial``
    [shown, F] are those of the block's first rows, with zeros for layers that they have not passed.
    """
    context = rms(states @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    x = embedding[list(tokens)].astype(np.float64)
    if partial is not None:
        x[: len(partial)] += rms(partial @ t["partial.weight"].T, t["partial_norm.weight"], eps)
    places = [first + i for i in range(len(tokens))]
    for layer, (blind, window) in enumerate(zip(causal, windows, strict=True)):
        name = f"layers.{layer}"
        normed = rms(x, t[f"{name}.input_layernorm.weight"], eps)
        entering = convolution(t, f"{name}.attention_conv", 0, normed, normed)
        attended = attention(
            t, f"{name}.self_attn", entering, places, context, list(positions), blind, window, theta, eps
        )
        x = x + convolution(t, f"{name}.attention_conv", 1, normed, attended)
        normed = rms(x, t[f"{name}.post_attention_layernorm.weight"], eps)
        inner = convolution(t, f"{name}.mlp_conv", 0, normed, normed)
        gate, up = inner @ t[f"{name}.mlp.gate_proj.weight"].T, inner @ t[f"{name}.mlp.up_proj.weight"].T
        left = (gate / (1 + np.exp(-gate)) * up) @ t[f"{name}.mlp.down_proj.weight"].T
        x = x + convolution(t, f"{name}.mlp_conv", 1, normed, left)
    return rms(x, t["norm.weight"], eps)


def convolution(t: Arrays, name: str, side: int, entering: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """DFlash 2's sum over each of a block's ``rows`` and those before it, before (``side`` 0) or after a sublayer (1).

    Channel c of the row k places before counts by the base kernel plus a correction from what entered the sublayer in
    the row itself. Without convolutions the rows stay as they are.
    """
    if f"{name}.base_kernel" not in t:
        return rows
    base, projection = t[f"{name}.base_kernel"], t[f"{name}.kernel_projection.weight"]
    taps, width = base.shape[1:]
    groups = len(projection) // (2 * taps)
    out = np.zeros_like(rows)
    for row in range(len(rows)):
        correction = projection @ entering[row]
        for tap in range(min(taps, row + 1)):
            for channel in range(width):
                shared = correction[(side * taps + tap) * groups + channel // (width // groups)]
                out[row, channel] += (base[side, tap, channel] + shared) * rows[row - tap, channel]
    return out


def attention(
    t: Arrays,
    name: str,
    rows: np.ndarray,
    places: list[int],
    context: np.ndarray,
    before: list[int],
    causal: bool,
    window: int | None,
    theta: float,
    eps: float,
) -> np.ndarray:
    """The output [rows, D] of a block's rows, at ``places``, over the context, at ``before``, and each other."""

    def projected(which: str, x: np.ndarray) -> np.ndarray:
        return x @ t[f"{name}.{which}_proj.weight"].T + t.get(f"{name}.{which}_proj.bias", 0.0)

    every, at = np.concatenate([context, rows]), before + places

    def normed(which: str, head: np.ndarray) -> np.ndarray:
        weight = t.get(f"{name}.{which}_norm.weight")
        return head if weight is None else rms(head, weight, eps)

    keys = [
        [rotated(normed("k", k), p, theta) for k in heads_of(x, KEY_HEADS)]
        for x, p in zip(projected("k", every), at, strict=True)
    ]
    values = [heads_of(x, KEY_HEADS) for x in projected("v", every)]
    outputs = []
    for row, place in zip(projected("q", rows), places, strict=True):
        seen = [
            i
            for i, p in enumerate(at)
            if not (causal and p > place) and not (window is not None and place - p >= window)
        ]
        heads = []
        for h, query in enumerate(heads_of(row, HEADS)):
            turned, group = rotated(normed("q", query), place, theta), h * KEY_HEADS // HEADS
            scores = np.array([turned @ keys[i][group] for i in seen]) / math.sqrt(len(query))
            weights = np.exp(scores - scores.max())
            heads.append(sum(w * values[i][group] for w, i in zip(weights / weights.sum(), seen, strict=True)))
        outputs.append(np.concatenate(heads))
    return np.stack(outputs) @ t[f"{name}.o_proj.weight"].T + t.get(f"{name}.o_proj.bias", 0.0)


def peagle(
    t: Arrays,
    embedding: np.ndarray,
    tokens: Sequence[int],
    states: Sequence[np.ndarray | None],
    first: int,
    *,
    theta: float,
    eps: float,
    normed_residual: bool,
) -> np.ndarray:
    """The normed states [rows, D] of P-EAGLE's rows, one after another: ``tokens`` from position ``first`` on, and the
    target's states [F] of the token before each, None where they are not known."""
    features = np.stack([t["mask_hidden"].reshape(-1) if state is None else state for state in states])
    if "input_norm.weight" in t:
        features = rms(features, t["input_norm.weight"], eps)
    if "fc_norm.0.weight" in t:
        parts = np.split(features, 3, axis=1)
        features = np.concatenate([rms(part, t[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], axis=1)
    features = features @ t["fc.weight"].T
    normed = rms(features, t["layers.0.hidden_norm.weight"], eps)
    embedded = rms(embedding[list(tokens)], t["layers.0.input_layernorm.weight"], eps)
    entering, x = np.concatenate([embedded, normed], axis=1), normed if normed_residual else features
    places, layer = [first + i - 1 for i in range(len(tokens))], 0
    while f"layers.{layer}.mlp.up_proj.weight" in t:
        name = f"layers.{layer}"
        if layer:
            entering = rms(x, t[f"{name}.input_layernorm.weight"], eps)
        nothing = np.empty((0, entering.shape[1]))
        x = x + attention(t, f"{name}.self_attn", entering, places, nothing, [], True, None, theta, eps)
        inner = rms(x, t[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = inner @ t[f"{name}.mlp.gate_proj.weight"].T, inner @ t[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{name}.mlp.down_proj.weight"].T
        layer += 1
    return rms(x, t["norm.weight"], eps)


def markov(t: Arrays, hidden: np.ndarray, token: int) -> np.ndarray:
    """Logits that DSpark's Markov head adds to those of a row in state ``hidden`` [D], by the token before [v]."""
    latent = t["markov_head.markov_w1.weight"][token]
    if "markov_head.gate_proj.weight" in t:
        entering = np.concatenate([hidden, latent])
        gate = t["markov_head.gate_proj.weight"] @ entering + t["markov_head.gate_proj.bias"]
        latent = latent / (1 + np.exp(-gate))
    return t["markov_head.markov_w2.weight"] @ latent


def selector(t: Arrays, logits: np.ndarray, hidden: np.ndarray, token: int, best: Sequence[int]) -> np.ndarray:
    """Logits over the target's vocabulary after DFlash 2's selector: the ``best`` by the token before, -inf for others.

    S(a, b) = U(b) + <A[a] * (H h), B[b]>, where ``hidden`` [D] is the state h and ``token`` the one before, a.
    """
    found = np.full(len(logits), -np.inf)
    gate = t["candidate_selector.predecessor_codebook"][token] * (
        t["candidate_selector.hidden_projection.weight"] @ hidden
    )
    for b in best:
        found[b] = logits[b] + gate @ t["candidate_selector.successor_codebook"][b]
    return found
