"""The layers of one stage behind the stage core's interface: rows to hidden states or picks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.checkpoint.architectures import carries, layer_types, made_by, refusal, row_width, streams
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.tensors import Listener
from penstock.core import ConfigError
from penstock.files import AUTO, EXACT, FAST, REFERENCE, torch_dtype
from penstock.messages import Candidates, SampledToken, Sampling
from penstock.models.attention import (
    Arenas,
    Attend,
    Plan,
    SlotAttention,
    WindowedAttention,
    attending,
    fast_attention,
    follow_positions,
    plain_kernel,
    precise_kernel,
    reach_of,
)
from penstock.models.carried import CarryingBase, LatentAttention, keep_cutoffs, keep_latents
from penstock.models.compiled.attention import CompiledAttention
from penstock.models.compiled.dot import GROUP, LANES
from penstock.models.compiled.float_blocks import QUAD
from penstock.models.compiled.layer import CompiledBase, CompiledNorm, can_compile, compiled, inexact
from penstock.models.form import FormRecord, build, form_of
from penstock.models.fused import FusedLayer, RMSNorm, rms_norm
from penstock.models.graphs import MET_BEFORE, CudaGraphs, FramePlan, Graphs, Recorder
from penstock.models.linear import weight_bytes, works
from penstock.models.loader import hold_in_memory, quantize_own, read_module, refusing
from penstock.models.mixers import MixerGroup, install
from penstock.models.packing import (
    all_cores,
    check_computed,
    check_covered,
    check_numerics,
    exact_ends,
    in_halves,
    move,
    pack,
    pack_sliced,
    quantize_ends,
    release,
    room_for,
    share_tied,
)
from penstock.models.probe import ProbedAttention, check_calls, check_entry, check_mixers, fuse, pin_rope
from penstock.models.recurrent import FoldedState, State, SteppedState
from penstock.models.shares import ALONE, Columns, GatheredHead, Ranks, cut_rows, narrow, uncut
from penstock.stage.grammar import GrammarMasks, Grammars
from penstock.stage.sampler import contexts_of, pick_tokens, rank_candidates
from penstock.stage.visibility import BatchView, NearSlots, part_of, view_of


@dataclass
class FinalStates:
    """A base model's output for its head, with the fields that heads of transformers look up."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None
    shared_kv_states: None = None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class NormOnly(nn.Module):
    """Replaces the base model where only norm and head are to run; ``inputs_embeds`` are the final states."""

    def __init__(self, norm: nn.Module, base: Any) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head_multiplier = getattr(base, "lm_head_multiplier", 1.0)  # Falcon-H1's head looks it up here

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **options: Any) -> FinalStates:
        return FinalStates(last_hidden_state=self.norm(inputs_embeds))


class StageModel:
    """Layers [first, last) of a model over arenas of ``capacity`` slots; implements ``stage.driver.Layers``.

    The first stage embeds tokens. Norm and head run in ``pick``, for the wanted rows only, through the causal language
    model's own forward, so that soft caps and logit scales are applied. ``module`` is what ``read_module`` returned.

    Layers are compared, joined and packed on the CPU, and moved to ``device`` one after another, so that no device ever
    holds more than the weights, nor the CPU's memory all layers in a form of their own.
    """

    grammars: GrammarMasks
    """The grammars of requests; whoever makes a stage sets them."""
    _graphs: Graphs | None = None
    """The recorded steps of a GPU stage; None elsewhere, and where steps cannot be recorded."""
    _head: GatheredHead | None = None
    """The head of a tensor parallel stage; None without ranks, and where the stage has no head."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: Any,
        first: int,
        last: int,
        *,
        capacity: int,
        dtype: str,
        device: str,
        quantization: str,
        numerics: str = AUTO,
        gives_back: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        parts = checkpoint.parts
        self.ranks = ranks
        # The size of the vocabulary for candidates; a target's may differ from its draft model's.
        self.drafted = checkpoint.vocab_size
        self.checkpoint = checkpoint
        self.first, self.last = first, last
        self.dtype = dtype
        self.device = torch.device(device)
        self._base = getattr(module, parts.base)
        self._causal = module
        self._plain = plain = numerics == REFERENCE
        self._on_cpu = self.device.type == "cpu"
        self._precise = quantization != "none" and self._on_cpu
        self._sliced = "none" if self._on_cpu else quantization
        exact = numerics != FAST and not plain and self._on_cpu and works()
        # Latents come first: packing would replace ``kv_b_proj``, and fused layers do not have it.
        self._latents = {} if plain else keep_latents(getattr(self._base, parts.layers)[first:last])
        self._replace_ends(exact)  # before the layers: the norm leaves the base model here, which ``fuse`` expects
        own, types = getattr(self._base, parts.layers)[first:last], layer_types(checkpoint.config)[first:last]
        follow_positions(checkpoint.config, own, types)
        reach = reach_of(checkpoint.config)
        self._near = NearSlots(capacity, reach) if gives_back and reach is not None else None
        near_capacity = capacity if self._near is None else self._near.size
        self._mixers = MixerGroup(near_capacity, torch.device("cpu"), partial(new_state, plain, self._precise))
        install(checkpoint.config, own, self._mixers)
        self._replace_base(own)
        self.form = None if plain or not self._on_cpu else form_of(self._base, self._causal, self._norm)
        """The form of which a later start can build the stage; None where the layers have none."""
        self._loops = self._precise and not plain and dtype == "float32"
        self.exact = (exact or self._precise) and first == last
        """Whether a row's bits depend on nothing but what it sees, on every layer that is here."""
        if not self._on_cpu:
            self._leave_cpu()
        elif self._precise or not plain:
            self._pack(quantization, exact)
        if numerics == EXACT and not self.exact:
            raise inexact()
        makers = made_by(checkpoint.config) if carries(checkpoint.config) else None
        self._arenas = Arenas(capacity, makers)
        self._near_arenas = Arenas(near_capacity, makers)
        """The arenas of layers with a limited reach, where they free slots that are out of reach."""
        self._taps: list[int] = []
        self._hooks: list[RemovableHandle] = []
        self._tapped: dict[int, Tensor] = {}
        self._probe()  # last, since it runs a row through all that has been made, and clears it again

    def record_steps(self, recorder: Recorder) -> None:
        """Compute batches of few rows by recorded steps, unless layers have a state, whose batches the host plans."""
        if not (self._plain or self._loops or self._precise or self._mixers.members or self.first == self.last):
            capacity, dtype = self._arenas.capacity, torch_dtype(self.dtype)
            self._graphs = Graphs(self._frame_step, recorder, self.device, dtype, capacity)

    def _replace_ends(self, exact: bool) -> None:
        """Replace embedding, head and last norm, which runs with the head, for the wanted rows only."""
        config, parts = self.checkpoint.config, self.checkpoint.parts
        tokens = self._cut_head()
        # The head has lost the other ranks' tokens by now: what follows packs this rank's share alone.
        if self._precise or self._sliced != "none":
            tied = bool(config.tie_word_embeddings)
            quantize_ends(self._causal, self._base, parts.embed, tied=tied, sliced=not self._on_cpu)
            quantize_own(self._base, config, self.last - self.first)
        elif exact:
            exact_ends(self._causal, self._base, parts.embed)
        elif not self._plain and self._on_cpu:
            share_tied(self._causal, self._base, parts.embed)
        if tokens is not None:
            self._head = GatheredHead(self._causal.get_output_embeddings(), self.ranks, tokens)
            self._causal.set_output_embeddings(self._head)
        norm = getattr(self._base, parts.norm)
        if not self._plain:
            norm = rms_norm(norm)
        self._norm = norm if self.is_last else None
        if isinstance(norm, RMSNorm) and (exact or self._precise):
            norm = CompiledNorm(norm)
        setattr(self._causal, parts.base, NormOnly(norm, self._base))
        setattr(self._base, parts.norm, nn.Identity())

    def _replace_base(self, own: Sequence[Any]) -> None:
        """Replace the base model around the stage's ``own`` layers where another form serves these better."""
        config = self.checkpoint.config
        if carries(config):
            if not self._plain:
                keep_cutoffs(own)
            self._base = CarryingBase(self._base, config, self.first, self.last)
        elif not self._plain:
            self._base = fuse(self._base, self.checkpoint.parts, self.first, self.last, self._settle)

    def _cut_head(self) -> Columns | None:
        """Cut the head to this rank's tokens, in place; returns the tokens of all ranks, or None if nothing is cut."""
        head = self._causal.get_output_embeddings() if self.ranks.size > 1 and self.is_last else None
        if head is None:
            return None
        if type(head) is not nn.Linear:
            raise uncut("its head is no plain product")
        # Whole blocks of ``LANES`` outputs: compiled products compute no less.
        tokens = self.ranks.share(head.out_features, LANES)
        self._causal.set_output_embeddings(cut_rows(head, [tokens.own]))
        return tokens

    def _share(self) -> None:
        """Have the ranks compute with the first one's rows."""
        if not isinstance(self._base, CompiledBase):
            raise uncut("ranks share compiled layers of llama's form alone")
        self._base.ranks = self.ranks

    def hold_share(self) -> None:
        """Copy this rank's weights that are still mapped to files, and drop the embedding, which the first rank has."""
        if self.ranks.rank:
            setattr(self._base, self.checkpoint.parts.embed, nn.Identity())
        hold_in_memory(nn.ModuleList([self._base, self._causal]))

    def _settle(self, layer: nn.Module) -> None:
        """Cut a layer to the rank's outputs, or pack it for another device and move it there, in place."""
        if self.ranks.size > 1 and isinstance(layer, FusedLayer):
            narrow(layer, self.ranks)
        if not self._on_cpu:
            pack_sliced(layer, self._sliced)
            move(layer, self.device)

    def _leave_cpu(self) -> None:
        """Move what is not yet on the stage's device: layer by layer, then the ends."""
        layers = getattr(self._base, self.checkpoint.parts.layers)[self.first : self.last]
        for layer in layers:
            self._settle(layer)
        if self._sliced != "none":
            check_covered(layers, self._sliced)
        for ends in (self._base, self._causal):
            self._settle(ends)
        self._mixers.device = self.device
        release(self.device)

    def _pack(self, quantization: str, exact: bool) -> None:
        """Pack all linear layers, and compile the decoder layers where that is possible."""
        wanted, inputs = (not self._plain, GROUP) if self._precise else (exact, QUAD)
        compiles = wanted and can_compile(self._base, inputs)
        self._loops |= compiles
        pack(self._base, quantization, exact=compiles)
        pack(self._causal, quantization, exact=compiles)
        if self._precise:
            check_covered(getattr(self._base, self.checkpoint.parts.layers), quantization)
        self.exact |= compiles
        if compiles:
            self._base = compiled(self._base, torch_dtype(self.dtype))
        if self.ranks.size > 1:
            self._share()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record the steps that most batches need, so that the first ones take no longer than others.

        Call it behind ``tap``, before the first row.
        """
        # Near arenas number their slots by the batches that have come: frames recorded before would not fit.
        if self._graphs is None or self._near is not None:
            return
        for rows, slots in self._graphs.usual(tuple(self._taps)):
            view = view_of([0] * slots, range(slots - rows, slots))
            hidden = None if self.is_first else torch.zeros(rows, self.entering_width, dtype=torch_dtype(self.dtype))
            for _ in range(MET_BEFORE + 1):
                self.forward(view, hidden)
        self._zero()

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the hidden states of these layers for ``features``: 0 the embedding, k the output of layer k - 1.

        The number of layers means the states after the last layer's norm, as in transformers; one more means the same
        before the norm. Layers of an earlier call are no longer kept. Raises ConfigError if layers have several hidden
        states.
        """
        if streams(self.checkpoint.config) > 1 and any(index < self.checkpoint.num_layers for index in layers):
            raise refusal(self.checkpoint.config, "its layers have several hidden states, which no drafter reads")
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._taps = [], list(layers)
        self._tapped.clear()
        for index in self._taps:
            if index < self.checkpoint.num_layers:
                self._hooks.append(self._hook(index))

    def _hook(self, index: int) -> RemovableHandle:
        modules = getattr(self._base, self.checkpoint.parts.layers)
        # The first layer's input is the embedding as layers get it: scaled, in models that scale it.
        if index == 0:
            return modules[0].register_forward_pre_hook(lambda _, given: self._tapped.update({0: given[0]}))
        return modules[index - 1].register_forward_hook(lambda _, __, output: self._keep(index, output))

    @torch.inference_mode()
    def forget(self) -> None:
        """Forget all rows, requests and tapped layers, as after loading."""
        self._zero()
        self.tap(())
        self.grammars.forget_all()

    def _keep(self, index: int, output: Any) -> None:
        self._tapped[index] = output[0] if isinstance(output, tuple) else output

    @torch.inference_mode()
    def features(self, hidden: Tensor) -> Tensor:
        """The tapped states of the last ``forward``'s rows, side by side; ``hidden`` [N, D] is what it returned."""
        last = self.checkpoint.num_layers
        if last in self._taps:
            self._tapped[last] = getattr(self._causal, self.checkpoint.parts.base).norm(hidden)[None]
        if last + 1 in self._taps:
            self._tapped[last + 1] = hidden[None]
        return torch.cat([self._tapped[index][0] for index in self._taps], dim=-1)

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.checkpoint.num_layers

    @property
    def hidden_size(self) -> int:
        return self.checkpoint.hidden_size

    @property
    def entering_width(self) -> int:
        """How many numbers the previous stage sends for a row: its hidden state and what it carries beside that."""
        return row_width(self.checkpoint.config, self.first)

    @property
    def leaving_width(self) -> int:
        """How many numbers this stage sends on for a row."""
        return row_width(self.checkpoint.config, self.last)

    @property
    def vocab_size(self) -> int:
        return self.checkpoint.vocab_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of everything that is stored by slot."""
        return self._arenas.bytes + self._near_arenas.bytes + self._mixers.bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, each counted once."""
        return weight_bytes(nn.ModuleList([self._base, self._causal]))

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: Tensor | None) -> Tensor:
        """Compute the rows and store their keys and values.

        ``hidden`` is [N, entering width], None on the first stage, which embeds the tokens. Returns [N, leaving width],
        behind the last layer [N, D].
        """
        if hidden is not None and self.first == self.last:
            return hidden
        near = self._entered(view)
        # Tapped states follow the halves, if memory makes ``in_halves`` cut the batch: they are joined in its order.
        tapped: list[dict[int, Tensor]] = []

        def compute(rows: slice) -> Tensor:
            batch, places, entering = view, near, hidden
            if rows != everything:
                # Rows may be stored twice: what a failed attempt has left in their slots is overwritten.
                batch, places = part_of(view, rows), part_of(near, rows)
                entering = None if hidden is None else hidden[rows]
            found = self._recorded(batch, places, entering)
            if found is None:
                found = self._run(batch, places, entering, self._attention(batch, places))
            tapped.append(dict(self._tapped))
            return found

        everything = slice(0, len(view))
        parts = in_halves(compute, everything, self.device)
        if len(parts) == 1:
            return parts[0]
        self._tapped = {index: torch.cat([one[index] for one in tapped], dim=1) for index in tapped[0]}
        return torch.cat(parts)

    @torch.inference_mode()
    def follow(self, view: BatchView, asked: int) -> None:
        """Compute this rank's share of a batch, of which the first rank picks tokens after ``asked`` rows."""
        dtype = torch_dtype(self.dtype)
        self.forward(view, torch.zeros(len(view), self.hidden_size, dtype=dtype))
        if asked:
            assert self._head is not None, "only the last stage is asked for tokens"
            self._head(torch.zeros(1, asked, self.hidden_size, dtype=dtype))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, wanted: Sequence[int]) -> Tensor:
        """Last stage: float32 logits [n, V] after the rows in ``wanted``."""
        if not self.is_last:
            raise ConfigError(f"layers {self.first} to {self.last} have no head; only the last stage has")
        asking_nD = hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64).to(hidden.device))
        return self._causal(inputs_embeds=asking_nD[None], use_cache=False).logits[0].float()

    def pick(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        """Last stage: the target's next token after each row in ``wanted``."""
        positions, nodes = _places(view, wanted)
        contexts = contexts_of(view, wanted, samplings, self.grammars)

        def pick(some: slice) -> list[SampledToken]:
            logits_nV = self.logits(hidden, wanted[some])
            return pick_tokens(logits_nV, samplings[some], positions[some], nodes[some], contexts[some])

        return list(chain(*in_halves(pick, slice(0, len(wanted)), self.device)))

    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """Last stage of a drafter: ``count`` noise-ranked candidates after each row in ``wanted``."""
        positions, nodes = _places(view, wanted)
        contexts = contexts_of(view, wanted, samplings, self.grammars)

        def rank(some: slice) -> list[Candidates]:
            logits_nV = fitted(self.logits(hidden, wanted[some]), self.drafted)
            return rank_candidates(logits_nV, samplings[some], positions[some], nodes[some], count, contexts[some])

        return list(chain(*in_halves(rank, slice(0, len(wanted)), self.device)))

    def _entered(self, view: BatchView) -> BatchView:
        """The batch with places for slots, for layers that free slots out of reach; makes room for the places."""
        if self._near is None:
            return view
        near = self._near.enter(view)
        # Growing moves the near arenas, whose addresses the graphs hold.
        if self._graphs is not None and self._near.size != self._near_arenas.capacity:
            self._graphs.clear()
        self._near_arenas.grow(self._near.size)
        self._mixers.grow(self._near.size)
        return near

    def _recorded(self, view: BatchView, near: BatchView, hidden: Tensor | None) -> Tensor | None:
        """The result of a recorded step; None where a batch has none."""
        if self._graphs is None:
            return None
        found = self._graphs.run(view, near, self._near_arenas.capacity, hidden, tuple(self._taps))
        if found is None:
            return None
        output, self._tapped = found
        return output

    def _frame_step(
        self, tokens_1N: Tensor, positions_1N: Tensor, hidden: Tensor | None, far: FramePlan, near: FramePlan
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The step that is recorded: see ``graphs.Step``."""
        dtype = torch_dtype(self.dtype)
        around = fast_attention(self._arenas, far, dtype)
        attend = self._attending(around, fast_attention(self._near_arenas, near, dtype))
        output = self._compute(tokens_1N, positions_1N, hidden, attend)
        return output, dict(self._tapped)

    def _attention(self, view: BatchView, near: BatchView) -> Attend:
        close = None if self._near is None else self._over(self._near_arenas, near)
        return self._attending(self._over(self._arenas, view), close)

    def _attending(self, far: SlotAttention, near: SlotAttention | None) -> Attend:
        attend: Attend = LatentAttention(far, self._latents) if self._latents else far
        if self._near is None or near is None:
            return attend
        return WindowedAttention(attend, near, self._near.reach)

    def _over(self, arenas: Arenas, view: BatchView) -> SlotAttention:
        if self._plain:
            return SlotAttention(arenas, Plan(view, self.device, in_place=False), plain_kernel)
        if self._loops:
            return CompiledAttention(arenas, view, self.device)
        if self._precise:
            return SlotAttention(arenas, Plan(view, self.device, in_place=True), precise_kernel)
        return fast_attention(arenas, Plan(view, self.device, in_place=True), torch_dtype(self.dtype))

    def _run(self, view: BatchView, near: BatchView, hidden: Tensor | None, attend: Attend) -> Tensor:
        positions_1N = torch.from_numpy(view.positions)[None].to(self.device)
        tokens_1N = torch.from_numpy(view.tokens)[None].to(self.device)
        # State-carrying layers number their slots like the near arenas, which free those out of reach.
        self._mixers.begin(near)
        return self._compute(tokens_1N, positions_1N, hidden, attend)

    def _compute(self, tokens_1N: Tensor, positions_1N: Tensor, hidden: Tensor | None, attend: Attend) -> Tensor:
        """Run the rows through the layers."""
        # A target's vocabulary may be padded further than its draft model's; the padding is no token.
        tokens_1N = tokens_1N.clamp(max=self.checkpoint.vocab_size - 1)
        if hidden is not None:
            hidden = hidden.to(self.device, torch_dtype(self.dtype))
        with attending(attend):
            if isinstance(self._base, CarryingBase):
                return self._base(tokens_1N, positions_1N, hidden)
            inputs = {"input_ids": tokens_1N} if hidden is None else {"inputs_embeds": hidden[None]}
            output = self._base(**inputs, position_ids=positions_1N, use_cache=False)
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def _probe(self) -> None:
        """Run one row through slot 0. It makes the arenas, and checks that the architecture behaves as expected."""
        if self.first == self.last:
            return
        config, view = self.checkpoint.config, view_of([0], range(1))
        given = None if self.is_first else torch.full((1, self.entering_width), 0.5, dtype=torch_dtype(self.dtype))
        entered: list[Tensor] = []
        layer = getattr(self._base, self.checkpoint.parts.layers)[self.first]
        hook = layer.register_forward_pre_hook(lambda _, args: entered.extend(args[:1]))
        near = self._entered(view)
        probed = ProbedAttention(self._attention(view, near))
        self._run(view, near, given, probed)
        hook.remove()
        check_calls(config, self.first, self.last, probed)
        check_mixers(config, self.first, self.last, [mixer.calls for mixer in self._mixers.members])
        # A row that carries more than its hidden state is unpacked before the first layer.
        if given is not None and not isinstance(self._base, CarryingBase):
            check_entry(config, given.to(self.device), entered[0] if entered else None)
        self._zero()

    def _zero(self) -> None:
        """Clear everything that is stored by slot, as if no row had ever come."""
        for arenas in (self._arenas, self._near_arenas):
            arenas.zero()
        self._mixers.zero()
        if self._near is not None:
            self._near.forget()


def new_state(plain: bool, precise: bool, capacity: int) -> State:
    """The state of one layer by slot: the reference for ``plain``, float64 for ``precise``."""
    if plain:
        return SteppedState(capacity)
    return FoldedState(capacity, torch.float64 if precise else torch.float32)


def _places(view: BatchView, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """The positions of the tokens to be picked after the ``wanted`` rows, and these rows' nodes."""
    return [int(view.positions[i]) + 1 for i in wanted], [int(view.nodes[i]) for i in wanted]


def grammars_of(checkpoint: Checkpoint) -> Grammars:
    """Grammars over the checkpoint's tokenizer, with the engine's ends of texts."""
    return Grammars(checkpoint.path, checkpoint.vocab_size, checkpoint.eos_token_ids)


class Holding(TypedDict, total=False):
    """How a stage holds its layers."""

    gives_back: bool
    """Whether layers with a limited reach free slots that are out of reach; no two requests may share slots then."""
    ranks: Ranks
    """The stage's place among several ranks; it holds a share, and they gather rows once they have an exchange."""


def load_stage(
    path: str,
    first: int,
    last: int,
    *,
    capacity: int,
    dtype: str = "float32",
    device: str = "cpu",
    quantization: str = "none",
    max_model_len: int | None = None,
    tokenizer: str = "",
    numerics: str = AUTO,
    on_read: Listener | None = None,
    **holding: Unpack[Holding],
) -> StageModel:
    """Load layers [first, last) of the checkpoint ``path``: folder, GGUF file or hub id, with ``capacity`` slots.

    ``quantization`` is "none" or a format of ``packing.QUANTIZED``, ``numerics`` one of ``files.NUMERICS``, or
    REFERENCE for the slow reference path. ``max_model_len`` is needed only for rotary embeddings that depend on the
    length of a text. A draft model's grammars are those of its target, the checkpoint in ``tokenizer``. ``on_read`` is
    called with how many numbers have been read, and how many there are. Raises ConfigError for anything that cannot
    work.
    """
    # Here, too: another host's processor may lack what the engine's has.
    check_numerics(numerics, device)
    check_computed("quantization", quantization, device)
    checkpoint = open_checkpoint(path)
    target = open_checkpoint(tokenizer) if tokenizer else checkpoint
    record, shared = FormRecord(checkpoint, first, last, dtype, max_model_len), holding.get("ranks", ALONE).size > 1
    with contextlib.ExitStack() as files:
        # A record describes whole layers of a CPU stage, not a rank's share, nor the reference path's.
        form = record.read() if device == "cpu" and numerics != REFERENCE and not shared else None
        later = files if quantization != "none" else None
        if form is None:
            module = read_module(checkpoint, first, last, dtype, device, on_read, later, held=not shared)
        else:
            module = build(checkpoint, form, dtype, on_read, later)
        files.enter_context(refusing(checkpoint))
        files.enter_context(room_for(f"layers {first} to {last}", device))
        files.enter_context(all_cores(device))
        pin_rope(getattr(module, checkpoint.parts.base), checkpoint.config, max_model_len)
        stage = StageModel(
            checkpoint,
            module,
            first,
            last,
            capacity=capacity,
            dtype=dtype,
            device=device,
            quantization=quantization,
            numerics=numerics,
            **holding,
        )
        if shared:
            stage.hold_share()
    record.write(stage.form if form is None and not shared else None)
    if stage.device.type == "cuda":
        stage.record_steps(CudaGraphs(stage.device))  # now that weights have their final addresses, which graphs hold
    stage.drafted, stage.grammars = target.vocab_size, grammars_of(target)
    return stage


def fitted(logits_nV: Tensor, rows: int) -> Tensor:
    """Logits for a vocabulary of ``rows`` tokens: cut to it, or padded with -inf."""
    more = rows - logits_nV.shape[-1]
    return logits_nV[:, :rows] if more <= 0 else torch.nn.functional.pad(logits_nV, (0, more), value=-torch.inf)
