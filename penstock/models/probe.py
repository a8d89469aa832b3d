"""Trials of a freshly loaded stage: whether its layers do what a pipeline needs, and which fused ones agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.architectures import ATTENTION_TYPES, RECURRENT_TYPES, ModuleNames, layer_types, refusal
from penstock.models.attention import Attend, attending
from penstock.models.fused import (
    FusedBase,
    FusedLayer,
    agree,
    has_form,
    identical,
    in_float32,
    rotary,
    rotation_of,
    sample_of,
)

# ---------------------------------------------------------------------------------------------------------------- probe
# Tests what an architecture really does while one row runs through a freshly loaded stage.
#
# ``checkpoint.architectures`` judges by configuration. This test finds what a configuration does not tell, and what
# would give wrong tokens without any error: a mask of its own, a window that the attention is not told about, changed
# embeddings.

HANDLED: Final = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Arguments of an attention call that ``SlotAttention`` follows."""
HARMLESS: Final = frozenset({"position_ids", "cache_position", "position_embeddings", "joint"})
"""Arguments that may be tensors, and of which attention need know nothing."""


@dataclass(frozen=True)
class _Call:
    layer: int
    window: int | None
    problem: str


class ProbedAttention:
    """Records the attention calls of one forward pass while answering them."""

    def __init__(self, attention: Attend) -> None:
        self.attention = attention
        self.calls: list[_Call] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        causal = {"is_causal": getattr(module, "is_causal", True), **options}
        # transformers states ``is_causal`` on the module, or in the call, which goes first.
        self.calls.append(_Call(module.layer_idx, options.get("sliding_window"), problem_of(mask, causal)))
        return self.attention(module, query, key, value, mask, **options)

    def chosen(self, modules: Sequence[Any], sliding_window: int | None) -> Any:
        """See ``attention.chosen``."""
        self.calls += [_Call(module.layer_idx, sliding_window, "") for module in modules]
        answering: Any = self.attention
        return answering.chosen(modules, sliding_window)


def problem_of(mask: Any, options: dict[str, Any]) -> str:
    """Why an attention call cannot be answered here; empty if it can."""
    if mask is not None:
        return "it brings its own attention mask"
    if options.get("is_causal") is False:
        return "its attention is not causal"
    strange = {name for name, value in options.items() if isinstance(value, Tensor)} - HANDLED - HARMLESS
    return f"its attention takes {', '.join(sorted(strange))}, which is not understood" if strange else ""


def check_calls(config: Any, first: int, last: int, probed: ProbedAttention) -> None:
    """Raise ConfigError unless every attending layer of [first, last) made exactly one call that can be answered."""
    calls, types = probed.calls, layer_types(config)
    attending = [layer for layer in range(first, last) if not types or types[layer] in ATTENTION_TYPES]
    if [call.layer for call in calls] != attending:
        raise refusal(config, "not every layer attends exactly once")
    for call in calls:
        if call.problem:
            raise refusal(config, call.problem)
        if types and (types[call.layer] == "sliding_attention") != (call.window is not None):
            raise refusal(config, f"layer {call.layer} is {types[call.layer]}, but its window is {call.window}")


def check_mixers(config: Any, first: int, last: int, calls: Sequence[int]) -> None:
    """Raise ConfigError unless every state-carrying layer of [first, last) ran exactly once (``calls``)."""
    carrying = [kind for kind in layer_types(config)[first:last] if kind in RECURRENT_TYPES]
    if list(calls) != [1] * len(carrying):
        raise refusal(config, "not every layer that carries a state does so exactly once")


def check_entry(config: Any, given_ND: Tensor, entered: Tensor | None) -> None:
    """Raise ConfigError unless the first layer of a later stage got exactly what the stage before had sent."""
    if entered is None or not torch.equal(given_ND, entered.reshape(given_ND.shape)):
        raise refusal(config, "it changes the hidden states before its first layer")


# ----------------------------------------------------------------------------------------------------------------- rope
# Pins rotary embeddings whose frequencies depend on the length of a text to the longest text allowed.

LENGTH_DEPENDENT: Final = frozenset({"longrope", "dynamic"})
"""Kinds of rotary embedding whose frequencies depend on the length of a text."""


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rotary embedding in a model: one, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    return {str(entry.get("rope_type", "default")) for entry in entries}


def pin_rope(base: Any, config: Any, max_model_len: int | None) -> None:
    """Fix the frequencies of ``base`` to those of a text of ``max_model_len`` tokens, if they depend on its length.

    transformers chooses them by the largest position in the batch, so that one long request would change its
    neighbours' keys. Raises ConfigError in that case if ``max_model_len`` is not given.
    """
    kinds = rope_kinds(config) & LENGTH_DEPENDENT
    if not kinds:
        return
    if max_model_len is None:
        raise refusal(config, f"its {', '.join(sorted(kinds))} rope depends on the longest request: set max_model_len")
    for module in base.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            # A call with the last position lets transformers choose; the new type keeps it from choosing again.
            device = module.inv_freq.device
            module(torch.zeros(1, device=device), torch.tensor([[max_model_len - 1]], device=device))
            module.rope_type = "pinned"
        elif hasattr(module, "rope_type"):
            raise refusal(config, "its rope depends on the longest request, and differs from layer to layer")


# ------------------------------------------------------------------------------------------------------------- onlooker
# Watches a model's layers at work: the input of each, its call of the attention, and its output.


@dataclass
class Sight:
    """One layer's call as it was seen. ``turned`` is the rotary embedding of its rows: cosines and sines."""

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
    """Answers attention calls while it records them, as if every row saw only itself: the output is its own values."""

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
        # Layers do not nest, so that the last sight is the running layer's.
        self.sights.append(Sight(given[0], options.get("position_embeddings"), options))

    def _leave(self, _: nn.Module, __: Any, gave: Any) -> None:
        self.sights[-1].gave = gave[0] if isinstance(gave, tuple) else gave

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        sight = self.sights[-1]
        sight.asked = (query, key, value)
        sight.scoring = {name: options[name] for name in sorted(HANDLED & options.keys())}
        sight.problem = problem_of(mask, options)
        # A row that attends to itself alone gets its own value, once for each query head of a group.
        return value.repeat_interleave(len(query) // len(value), dim=0).transpose(0, 1)


# ----------------------------------------------------------------------------------------------------------------- fuse
# Replaces a stage's layers by fused ones if those compute the same, which is tested on a sample.
#
# An architecture may do more than its modules show: scale its residuals or its embedding, or rotate its heads in
# another way. Some rows therefore run through the original base model, and every fused layer has to give the same
# results for the same input, both in float32: rounding hides nothing there.

ROWS: Final = 3
"""How many rows the sample has. A single row would show neither the mask nor the turn between positions."""


@torch.no_grad()
def fuse(base: Any, parts: ModuleNames, first: int, last: int, settle: Callable[[nn.Module], None]) -> Any:
    """``base`` with its layers [first, last) fused; ``base`` itself if any of them has another form.

    The norm behind the layers has to be taken out before. ``base`` loses its layers. ``settle`` is called with each
    fused layer before the next one's weights are copied.
    """
    layers, embed = getattr(base, parts.layers), getattr(base, parts.embed)
    own = list(layers[first:last])
    # Modules that were built from a form bring their scorings along, and need no comparison.
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
    # Position 0 would show nothing: rotary embeddings turn nothing there. The positions serve as token ids, too.
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
    wide, given = in_float32(layer), sight.given.float()
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
