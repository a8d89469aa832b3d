"""Replaces decoder layers by fused ones where a trial shows that they compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.gate import Parts
from penstock.models.attention import attending
from penstock.models.fused import (
    FusedBase,
    FusedLayer,
    agree,
    has_form,
    identical,
    rotary,
    rotation_of,
    sample_of,
    widened,
)
from penstock.models.probe import HANDLED, problem_of

# ------------------------------------------------------------------------------------------------------------- onlooker
# Watches a model's layers at work: the input of each, its call of the attention, and its output.


@dataclass
class Sight:
    """One layer's call. ``turned`` is the rotary embedding for the rows: cosines and sines."""

    given: Tensor
    turned: Any
    options: dict[str, Any]
    """The other arguments of its call, by their names."""
    asked: tuple[Tensor, ...] = ()
    """Queries, keys and values."""
    scoring: dict[str, Any] = field(default_factory=dict)
    """The other arguments of its attention."""
    problem: str = "it attends to nothing"
    gave: Tensor = field(default_factory=lambda: torch.empty(0))

    def fits(self, turned: Any) -> bool:
        """Whether its heads were rotated over their whole width, by this embedding, and its attention is ordinary."""
        if not (isinstance(self.turned, tuple) and len(self.turned) == len(turned) == 2) or self.problem:
            return False
        query, _, value = self.asked
        whole = self.turned[0].shape[-1] == query.shape[-1] == value.shape[-1]
        return whole and all(map(identical, self.turned, turned))


class Onlooker:
    """Takes the place of the attention meanwhile, as if every row saw only itself."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []

    @contextlib.contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        hooks = [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in layers]
        hooks += [layer.register_forward_hook(self._leave) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, _: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.sights.append(Sight(given[0], options.get("position_embeddings"), options))

    def _leave(self, _: nn.Module, __: Any, gave: Any) -> None:
        self.sights[-1].gave = gave[0] if isinstance(gave, tuple) else gave

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        sight = self.sights[-1]
        sight.asked = (query, key, value)
        sight.scoring = {name: options[name] for name in sorted(HANDLED & options.keys())}
        sight.problem = problem_of(mask, options)
        return value.repeat_interleave(len(query) // len(value), dim=0).transpose(0, 1)


# ----------------------------------------------------------------------------------------------------------------- fuse
# Replaces a stage's layers by fused ones if those compute the same, which is tested on a sample.
#
# An architecture may do more than its modules show: scale its residuals or its embedding, or rotate its heads in
# another way. Some rows therefore run through the original base model, and every fused layer has to give the same
# results for the same input, both in float32: rounding hides nothing there.

ROWS: Final = 3
"""How many rows the sample has."""


@torch.no_grad()
def fuse(base: Any, parts: Parts, first: int, last: int, settle: Callable[[nn.Module], None]) -> Any:
    """``base`` with its layers [first, last) fused; ``base`` itself if any of them has another form.

    The norm behind the layers has to be taken out before. ``base`` loses its layers. ``settle`` is called with each
    fused layer before the next one's weights are copied.
    """
    layers, embed = getattr(base, parts.layers), getattr(base, parts.embed)
    own = list(layers[first:last])
    # Of bare modules, which are built from a form, that is known.
    scorings = getattr(base, "scorings", None) or scorings_of(base, own, embed if first == 0 else None)
    if scorings is None:
        return base
    fused = [FusedLayer(layer, scoring) for layer, scoring in zip(own, scorings, strict=True)]
    own.clear()
    for index, layer in enumerate(fused, first):
        layers[index] = layer  # frees the replaced layer before the next one's weights are copied
        layer.join()
        settle(layer)
    return FusedBase(embed, rotary(base.rotary_emb), layers, fused)


def scorings_of(base: Any, own: Sequence[Any], embed: Any | None) -> list[dict[str, Any]] | None:
    """The arguments of the attention of each of a stage's layers; None if any of them has another form.

    The first stage has an embedding, ``embed``.
    """
    if not own or not turns_alike(base) or clips(base) or not all(has_form(layer) for layer in own):
        return None
    sights = see(base, own, embed)
    if sights is None or not all(does_the_same(layer, sight) for layer, sight in zip(own, sights, strict=True)):
        return None
    return [sight.scoring for sight in sights]


def turns_alike(base: Any) -> bool:
    """Whether one rotary embedding serves all layers. Models with several kinds of layers pass the kind to it."""
    return isinstance(getattr(getattr(base, "rotary_emb", None), "rope_type", None), str)


def clips(base: Any) -> bool:
    """Whether large queries, keys and values are clipped (OLMo): a sample may contain none."""
    return getattr(base.config, "clip_qkv", None) is not None


def see(base: Any, own: Sequence[Any], embed: Any | None) -> list[Sight] | None:
    """Run some rows through ``base``, and watch its layers.

    None if it does more than embed, rotate and run the layers.
    """
    weight = own[0].self_attn.q_proj.weight
    positions_1N = torch.arange(1, ROWS + 1, device=weight.device)[None]
    if embed is None:
        entering = sample_of(weight, ROWS)
        inputs = {"inputs_embeds": entering}
    else:
        entering = embed(positions_1N)
        inputs = {"input_ids": positions_1N}
    onlooker = Onlooker()
    with onlooker.watching(own), attending(onlooker):
        left = base(**inputs, position_ids=positions_1N, use_cache=False).last_hidden_state
    sights = onlooker.sights
    # The output of each layer has to be the next one's input: otherwise the base model does something in between.
    passed = [entering, *(sight.gave for sight in sights)]
    met = [*(sight.given for sight in sights), left]
    try:
        turned = base.rotary_emb(entering, positions_1N)
    except IndexError:  # in some releases of transformers an embedding of several axes takes positions of each
        return None
    plain = all(map(identical, passed, met))
    return sights if plain and all(sight.fits(turned) for sight in sights) else None


def does_the_same(layer: Any, sight: Sight) -> bool:
    """Whether a layer asks the same of its attention, and gives the same, when it is fused: both in float32."""
    wide, given = widened(layer), sight.given.float()
    cos, sin = (turned.float() for turned in sight.turned)
    own = look(wide, given, **{**sight.options, "position_embeddings": (cos, sin)})
    fused = FusedLayer(wide, own.scoring)
    heads = fused.heads
    found = look(fused, given, rotation_of(cos, sin, heads.rotated, heads.groups))
    return agree(found.gave, own.gave, given) and all(map(agree, found.asked, own.asked))


def look(layer: nn.Module, *given: Any, **options: Any) -> Sight:
    """The layer's inputs, outputs and attention, watched during one call."""
    onlooker = Onlooker()
    with onlooker.watching([layer]), attending(onlooker):
        layer(*given, **options)
    (sight,) = onlooker.sights
    return sight
