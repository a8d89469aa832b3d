"""Loads a stage's layers, and cuts tensors that hold something for every layer."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.architectures import OUTSIDE, carries, is_outside, layer_types, model_class, per_layer_width
from penstock.checkpoint.checkpoint import Checkpoint, empty_fields, remember
from penstock.checkpoint.tensors import WEIGHT_TYPES, Listener, StoredTensor, Tensors, check_finite, counted, layer_of
from penstock.core import ConfigError, PenstockError
from penstock.files import AUTO, CONFIG_FILE, EXACT, problem_in, read_json, said, shortage, torch_dtype
from penstock.models.attention import ATTENTION, plug_in
from penstock.models.compiled.layer import has_own_form, have_form, inexact
from penstock.models.linear import read_later, works
from penstock.models.packing import Table, TableEmbedding
from penstock.models.shares import Ranks, cut_of, lacking, uncut

# ------------------------------------------------------------------------------------------------------------- own part
# Cuts tensors that hold something for every layer, so that a stage reads the entries of its own layers alone.


def own_tensors(stored: Tensors, config: Any, first: int, last: int) -> dict[str, StoredTensor]:
    """The ``stored`` tensors, with those of ``OUTSIDE`` cut to layers [first, last)."""
    if not carries(config):
        return dict(stored)
    # Layer k has the columns [k * width, (k + 1) * width) of the embedding, and these rows of the projection.
    width = per_layer_width(config)
    own, every = slice(first * width, last * width), slice(None)
    cuts = {"embed_tokens_per_layer.weight": (every, own), "per_layer_model_projection.weight": (own, every)}
    found = dict(stored)
    for name in filter(is_outside, stored):
        module_weight = ".".join(name.split(".")[-2:])
        if module_weight in cuts:
            found[name] = stored[name].cut(*cuts[module_weight])
    return found


def keep_own(base: Any, config: Any, first: int, last: int) -> None:
    """Cut the modules beside the layers to the entries of layers [first, last), in place.

    The methods of ``base`` then look up and project the embeddings of these layers alone.
    """
    if first > 0 and hasattr(base, "altup_projections"):
        base.altup_projections = nn.ModuleList()
    if last < config.num_hidden_layers and hasattr(base, "altup_unembed_projections"):
        base.altup_unembed_projections = nn.ModuleList()
    if not per_layer_width(config):
        return
    if first == last:
        for name in OUTSIDE:
            setattr(base, name, nn.Identity())
        return
    # transformers' methods go by the number of layers in the configuration.
    width = (last - first) * per_layer_width(config)
    base.config = copy.copy(config)
    base.config.num_hidden_layers = last - first
    table, projection = base.embed_tokens_per_layer, base.per_layer_model_projection
    table.embedding_dim = projection.out_features = width
    table.weight = nn.Parameter(table.weight.new_empty(table.num_embeddings, width), requires_grad=False)
    projection.weight = nn.Parameter(torch.empty_like(projection.weight)[:width], requires_grad=False)


def quantize_own(base: Any, config: Any, layers: int) -> None:
    """Store the per-layer embeddings of a stage's ``layers`` as int8, in place."""
    if per_layer_width(config) and layers:
        base.embed_tokens_per_layer = PerLayerTable(base.embed_tokens_per_layer, layers)


class PerLayerTable(nn.Module):
    """Drop-in for an embedding of several layers [V, layers * width], quantised as if each had its own table.

    A layer's embedding therefore does not depend on which layers share its stage.
    """

    def __init__(self, embedding: nn.Embedding, layers: int) -> None:
        super().__init__()
        self._layers = layers
        embedding.weight = nn.Parameter(embedding.weight.reshape(layers * embedding.num_embeddings, -1), False)
        self.lookup = TableEmbedding(Table(embedding.weight), embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """[..] -> [.., layers * width]"""
        # Row ``token * layers + layer`` of the reshaped table is one layer's embedding of a token.
        rows = ids[..., None] * self._layers + torch.arange(self._layers, device=ids.device)
        found: Tensor = self.lookup(rows).flatten(-2)
        return found


# --------------------------------------------------------------------------------------------------------------- loader
# Builds the transformers module of layers [first, last), and reads only these layers' tensors.

log = logging.getLogger(__name__)

EMBEDDING_FACTORS: Final = ("embedding_multiplier", "embedding_scale")
"""Attributes of base models that scale what enters the first layer."""
ROUTER: Final = re.compile(r"Top[kK]Router$")
"""Classes of transformers that choose the experts of a row."""
ROUTING: Final = (
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
)
"""Fields of a configuration that are shown where no row finds its experts."""
SIZED: Final = re.compile(r"(_size|_dim|_heads|_rank|_experts|_layers|_per_tok)$")
"""Fields of a configuration that shapes of tensors come from."""
OPTIONAL: Final = ("tie_word_embeddings", "attention_bias", "mlp_bias", "q_lora_rank", "first_k_dense_replace")
"""Fields of a configuration by which a model has tensors or not."""
HEADS: Final = ("lm_head.weight", "embed_out.weight", "head.weight")
"""Names that architectures store their head under."""
LAYER: Final = re.compile(r"\.\d+\.")
"""The part of a weight's name that says which layer it belongs to."""
NEVER_PACKED: Final = "kv_b_proj"
"""The linear layer whose weight ``carried.Latent`` takes apart."""
SAMPLE_SPREAD: Final = 0.02
"""The standard deviation of a sample's numbers: about that of trained weights, and transformers' default for fresh ones
(``initializer_range``)."""
LONGEST_VECTOR: Final = 1 << 20
"""Numbers of the longest vector that is read before any stage is started, to find NaN and infinity in it. A head's bias
has one for each token, of which known vocabularies have up to 900,000."""
MOST_COPIES: Final = 2
"""How many times the checkpoint's size a model may have: a tied embedding is stored once and held twice at first."""
SPARE: Final = 1 << 24
"""Numbers that a model may have beyond its checkpoint: frequencies of rotary embeddings, masks. They take 64 MiB in
float32."""


class PassThrough(nn.Module):
    """Replaces a part that belongs to another stage; returns its first argument."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


class ForeignLayer(nn.Module):
    """Replaces another stage's layer; returns the hidden states, in a tuple of ``returned`` elements unless that is 0.

    Attributes that its base model looks up in a layer stay: the kind in Nemotron-H, a vector that Falcon-H1 fills.
    """

    def __init__(self, layer: Any, returned: int) -> None:
        super().__init__()
        self.block_type = getattr(layer, "block_type", None)
        self._returned = returned
        mixer: Any = getattr(layer, "mamba", None)
        if hasattr(mixer, "mup_vector"):
            self.mamba = nn.Module()
            self.mamba.register_buffer("mup_vector", mixer.mup_vector, persistent=False)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden, *[None] * (self._returned - 1)) if self._returned else hidden


def load_module(checkpoint: Checkpoint, first: int, last: int, dtype: str, device: str) -> Any:
    """``read_module`` on its device."""
    return read_module(checkpoint, first, last, dtype, device).to(torch.device(device))


def read_module(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    dtype: str,
    device: str,
    on_read: Listener | None = None,
    files: contextlib.ExitStack | None = None,
    *,
    held: bool = True,
) -> Any:
    """The causal language model with layers [first, last) only; embedding, norm and head where they belong.

    It is on the CPU. If another ``device`` shall get it, weights that need no conversion stay mapped to their files.

    The first stage (``first`` 0) has the embedding, the last one (``last`` all layers) norm and head. Other stages'
    parts are ``PassThrough``s. ``on_read`` is told how much has been read. With ``files`` linear weights of layers
    are samples: packing reads each from its file, and ``files`` is to be open until then. Unless ``held``, weights
    may stay mapped to their files for now, on the CPU, too: ``hold_in_memory`` copies those that are needed. Raises
    ConfigError naming tensors that are missing, of the wrong shape, or not finite.
    """
    if not 0 <= first <= last <= checkpoint.num_layers:
        raise ConfigError(f"layers {first} to {last} of a model with {checkpoint.num_layers} layers")
    torch_format = torch_dtype(dtype)
    target = _checked_device(device)
    later = None if files is None else Later(torch_format, files)
    model = _load(checkpoint, first, last, on_read, later=later, dtype=torch_format, attn_implementation=ATTENTION)
    _drop_foreign(model, checkpoint, first, last)
    check_finite(str(checkpoint.source), ((name, one.detach()) for name, one in model.named_parameters()))
    if held and checkpoint.source.is_dir() and target.type == "cpu":
        hold_in_memory(model)
    return model.requires_grad_(False)


def hold_in_memory(model: Any) -> None:
    """Copy the weights, which safetensors only maps: a process that writes into the file would change them.

    Tied weights stay one tensor.
    """
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        # Tied weights share an address: the first of them is copied, and the others take that copy.
        if not tensor.is_meta and (place := tensor.data_ptr()):
            tensor.data = copies.setdefault(place, tensor.data if place in copies else tensor.data.clone())


def load_whole(checkpoint: Checkpoint, dtype: str) -> Any:
    """The causal language model with all layers and transformers' own attention. Raises like ``load_module``."""
    return _load(checkpoint, 0, checkpoint.num_layers, None, dtype=torch_dtype(dtype))


def _load(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    on_read: Listener | None,
    changed: Callable[[StoredTensor], StoredTensor] | None = None,
    later: Later | None = None,
    **options: Any,
) -> Any:
    """Load with tensors, not from the folder: transformers would choose among its files by itself."""
    plug_in()
    with contextlib.ExitStack() as own, quiet(), refusing(checkpoint):
        files = own if later is None else later.files
        slices = own_slices(checkpoint, first, last, files)
        # ``check_loads`` replaces the numbers by zeros here; all that follows is as in a real load.
        if changed is not None:
            slices = {name: changed(one) for name, one in slices.items()}
        state: Tensors = files.enter_context(counted(slices, on_read))
        if later is not None:
            state = later.standing_in(state)
        model, info = _staged_class(checkpoint, first, last, state, later).from_pretrained(
            None,
            config=checkpoint.transformers_config,
            state_dict=state,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
    if later is not None:
        later.note_in(model, str(checkpoint.source))
    _check_complete(checkpoint, first, last, info, model)
    return model


class Later:
    """Linear weights that are read from the files only when their layer is packed.

    The unpacked weights of more than one layer are thus never in memory at once. Until it is packed, a layer holds
    small sample tensors instead, with distinct values within the layer and the same values in all layers, from which
    ``probe.fuse`` recognises the layer's form. ``files`` have to stay open until all weights have been read.
    """

    def __init__(self, dtype: torch.dtype, files: contextlib.ExitStack) -> None:
        self.files = files
        self._dtype = dtype
        self._chosen: dict[str, str] = {}
        """Tensor -> the place within its layer."""
        self._samples: dict[tuple[str, torch.Size], Tensor] = {}
        self._stored: Tensors = {}
        self._lock = threading.Lock()  # transformers reads with several threads

    def standing_in(self, stored: Tensors) -> Tensors:
        """The ``stored`` tensors, each of which reads as a sample of its shape if it is chosen by then."""
        self._stored = stored
        return {name: replace(one, select=partial(self._select, name)) for name, one in stored.items()}

    def choose(self, model: Any, tied: bool) -> None:
        """Choose the weights of all plain linear layers that packing replaces, but not a head's that is ``tied``."""
        head = model.get_output_embeddings() if tied else None
        for place, module in model.named_modules():
            # Subclasses may compute something else, and are not packed.
            if type(module) is nn.Linear and module is not head and not place.endswith(NEVER_PACKED):
                self._chosen[f"{place}.weight"] = LAYER.sub(".", place, count=1)

    def note_in(self, model: nn.Module, file: str) -> None:
        """Have the layers read their weights as they are packed."""
        for name in self._chosen.keys() & self._stored.keys():
            linear: Any = model.get_submodule(name.removesuffix(".weight"))
            read_later(linear, name, self._stored[name], file)

    def _select(self, name: str, index: Any) -> Tensor:
        if name not in self._chosen:
            return self._stored[name][index]
        return self._sample(self._chosen[name], torch.Size(self._stored[name].shape))[index]

    def _sample(self, place: str, shape: torch.Size) -> Tensor:
        key = place, shape
        with self._lock:
            if key not in self._samples:
                # Another seed for each sample: projections of one shape must not be mistaken for each other.
                generator = torch.Generator().manual_seed(len(self._samples))
                sample = torch.randn(shape, generator=generator) * SAMPLE_SPREAD
                self._samples[key] = sample.to(self._dtype)
            return self._samples[key]


@contextlib.contextmanager
def refusing(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise ConfigError instead of any error of torch or transformers for a model that cannot be built or run."""
    try:
        yield
    except (PenstockError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if lack := shortage(error):
            raise PenstockError(f"model: {checkpoint.source} cannot be loaded ({said(error)}): {lack}") from error
        file = checkpoint.path / CONFIG_FILE
        problem = f"{said(error)}{empty_fields(read_json(file))}"
        if "Padding_idx" in problem:
            problem += f"; pad_token_id is {checkpoint.config.pad_token_id}, beyond the vocabulary: state another"
        raise ConfigError(f"model: {file} describes a model that cannot be built: {problem}") from error


def _checked_device(device: str) -> torch.device:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} is not usable here: {error}") from error
    return torch.device(device)


def own_slices(checkpoint: Checkpoint, first: int, last: int, files: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """The stage's tensors, not read yet."""
    # Tensors outside of the layers are embedding, norm and head: only the first and the last stage read them.
    at_an_end = first == 0 or last == checkpoint.num_layers

    def wanted(name: str) -> bool:
        layer = layer_of(name)
        return first <= layer < last if layer is not None else at_an_end or (carrying and is_outside(name))

    carrying = carries(checkpoint.config)
    found = checkpoint.weights.slices(filter(wanted, checkpoint.weights.names()), files)
    return own_tensors(found, checkpoint.config, first, last)


def _staged_class(checkpoint: Checkpoint, first: int, last: int, stored: Tensors, later: Later | None) -> Any:
    """The model's class with a constructor (on the meta device) that leaves out other stages' parts.

    ``stored`` are the stage's tensors: a model that they cannot fill is refused before it takes memory.

    A tied embedding and head are both kept on either end while loading, so that it does not matter which is stored.
    """
    cls, parts = model_class(checkpoint.transformers_config), checkpoint.parts
    is_first, is_last = first == 0, last == checkpoint.num_layers
    tied = bool(checkpoint.config.tie_word_embeddings) and (is_first or is_last)

    def build(self: Any, config: Any) -> None:
        cls.__init__(self, config)
        base = getattr(self, parts.base)
        layers = getattr(base, parts.layers)
        for i in range(len(layers)):
            if not first <= i < last:
                layers[i] = ForeignLayer(layers[i], parts.returned)
        if carries(config):
            keep_own(base, config, first, last)
        if not is_last:
            setattr(base, parts.norm, PassThrough())
        if not is_first and not tied:
            setattr(base, parts.embed, PassThrough())
        if not is_last and not tied:
            self.set_output_embeddings(PassThrough())
        if not tied:
            self.all_tied_weights_keys = {}
        check_fits(self, stored, f"layers {first} to {last} of {checkpoint.source.name!r}")
        if later is not None:
            later.choose(self, tied)

    # A class with a constructor of its own, since ``from_pretrained`` builds the model, on the meta device, by itself.
    # The original's name and module, by which transformers finds the weight conversions of an architecture.
    body = {"__init__": build, "__module__": cls.__module__, "_keys_to_ignore_on_load_missing": None}
    return type(cls.__name__, (cls,), body)


def check_fits(model: nn.Module, stored: Tensors, where: str) -> None:
    """Raise ConfigError if shapes differ, a weight is no float, or the model is far larger than its tensors.

    Some architectures store a tensor in parts or under another name; those shapes are compared at loading.
    """
    wanted = dict(model.named_parameters())
    for name in wanted.keys() & stored.keys():
        if (dtype := stored[name].dtype) not in WEIGHT_TYPES:
            raise ConfigError(f"model: {where}: {name} is stored as {dtype}; a weight has to be a float")
    shapes = {name: stored[name].shape for name in wanted.keys() & stored.keys()}
    if wrong := {name: shape for name, shape in shapes.items() if shape != tuple(wanted[name].shape)}:
        shaped = ((name, shape, wanted[name].shape) for name, shape in wrong.items())
        raise _wrong_shapes(where, shaped, model)
    size = sum(tensor.numel() for tensor in (*wanted.values(), *model.buffers()))
    held = sum(one.size for one in stored.values())
    if size > MOST_COPIES * held + SPARE:
        raise ConfigError(
            f"model: {where}: config.json describes {size} numbers, the shards hold {held}{_sizes(model)}"
        )


def _wrong_shapes(
    where: str, wrong: Iterable[tuple[str, Sequence[int], Sequence[int]]], model: nn.Module
) -> ConfigError:
    problems = sorted(f"{name} is {tuple(stored)}, config.json says {tuple(wanted)}" for name, stored, wanted in wrong)
    return ConfigError(f"model: {where}: wrong shape: {_some(problems)}{_sizes(model)}")


def _check_complete(checkpoint: Checkpoint, first: int, last: int, info: dict[str, Any], model: nn.Module) -> None:
    """Raise ConfigError for wrong shapes, and for missing tensors: transformers fills them with random numbers."""
    where = f"layers {first} to {last} of {checkpoint.source.name!r}"
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model: {where}: the checkpoint lacks {_some(missing)}: download or save it again{_asking(model)}"
        )
    if wrong := info["mismatched_keys"]:
        raise _wrong_shapes(where, wrong, model)


def _sizes(model: nn.Module) -> str:
    """Words for the end of an error about shapes: what they come from. Drafters' modules have no configuration."""
    stated = model.config.to_dict() if hasattr(model, "config") else {}
    named = [f"{name} {value}" for name, value in stated.items() if type(value) is int and SIZED.search(name)]
    return f" (of {', '.join(named)})" if named else ""


def _asking(model: nn.Module) -> str:
    """Words for the end of an error about missing tensors: fields of config.json that ask for some."""
    stated = model.config.to_dict()
    named = [f"{name} {stated[name]}" for name in OPTIONAL if name in stated]
    return f"; config.json has {', '.join(named)}"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _drop_foreign(model: Any, checkpoint: Checkpoint, first: int, last: int) -> None:
    base = getattr(model, checkpoint.parts.base)
    if first > 0:
        # A tied embedding was kept on both ends for loading; from here on each end has only its own part.
        setattr(base, checkpoint.parts.embed, PassThrough())
        for name in EMBEDDING_FACTORS:
            # granite scales the input of its first layer, which only the first stage may do.
            if hasattr(base, name):
                setattr(base, name, 1.0)
    if last < checkpoint.num_layers:
        model.set_output_embeddings(PassThrough())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and reports of missing tensors within the block: the caller raises for those."""
    from transformers import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# ----------------------------------------------------------------------------------------- before any stage is started


def hollow(tensor: StoredTensor) -> StoredTensor:
    """A tensor of the same shape and type whose numbers are zeros, which take no memory."""
    return replace(tensor, select=lambda index: torch.zeros(()).expand(tensor.shape)[index])


def check_loads(checkpoint: Checkpoint, numerics: str = AUTO, ranks: int = 1) -> None:
    """Raise ConfigError if a stage could not load its part: tensors are missing or do not fit, or vectors hold NaN.

    With ``numerics`` "exact" also if the layers have no form for that, and with several ``ranks`` if these cannot share
    the layers.

    The whole model is built from tensors that take no memory, so that transformers itself reports what it misses. Of a
    GGUF file that is done once (``checkpoint.known``).
    """
    options = {"dtype": torch.float32, "attn_implementation": ATTENTION}
    with contextlib.ExitStack() as files:
        found = checkpoint.weights.slices(checkpoint.weights.names(), files)
        check_head(checkpoint, found)
        if checkpoint.known is None or ranks > 1:
            model = _load(checkpoint, 0, checkpoint.num_layers, None, hollow, **options)
            check_routing(model, checkpoint)
            check_windows(model, checkpoint)
            layers = getattr(getattr(model, checkpoint.parts.base), checkpoint.parts.layers)
            check_form(layers, checkpoint, numerics)
            if ranks > 1:
                check_shares(layers, ranks)
        check_finite(str(checkpoint.source), vectors(found))


def check_form(layers: Sequence[nn.Module], checkpoint: Checkpoint, numerics: str) -> None:
    """Raise FieldError if layers shall be "exact" and have another form; a record is kept of a file with that form."""
    if have_form(layers):
        remember(checkpoint)
    elif numerics == EXACT:
        raise inexact()


def check_shares(layers: Iterable[Any], ranks: int) -> None:
    """Raise FieldError if ranks cannot share decoder layers, as transformers has built them."""
    if not works():
        raise uncut("this processor lacks the instructions of compiled layers")
    for layer in layers:
        if not has_own_form(layer):
            raise uncut("ranks share layers of llama's form alone, with RMS norms and silu")
        if problem := lacking(cut_of(Ranks(0, ranks), layer.self_attn, layer.mlp)):
            raise uncut(problem, ranks)


def check_routing(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if no row finds its experts: more are asked for than there are, or groups that do not fit."""
    router = next((one for one in model.modules() if ROUTER.search(type(one).__name__)), None)
    if router is None or len(inspect.signature(router.forward).parameters) != 1:
        return
    try:
        with torch.inference_mode():
            router(torch.zeros(1, checkpoint.hidden_size))
    except Exception as error:
        stated = {name: getattr(checkpoint.config, name) for name in ROUTING if hasattr(checkpoint.config, name)}
        fields = ", ".join(f"{name} {value}" for name, value in stated.items())
        raise problem_in(
            checkpoint.path / CONFIG_FILE, fields, f"do not fit each other, no token finds its experts: {said(error)}"
        ) from error


def check_windows(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if layers shall have a sliding window, and the model's attention has none."""
    layers = getattr(getattr(model, checkpoint.parts.base), checkpoint.parts.layers)
    for layer, kind in zip(layers, layer_types(checkpoint.config), strict=False):
        if kind == "sliding_attention" and not any(hasattr(one, "sliding_window") for one in layer.modules()):
            file, model_type = checkpoint.path / CONFIG_FILE, checkpoint.config.model_type
            raise problem_in(file, "layer_types", f"has {kind}, and a {model_type} (model_type) has no sliding window")


def check_head(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Warn if the head shall be the embedding, and is stored with other numbers: a stage takes those.

    Raises ConfigError if it is stored with another shape.
    """
    embedding = f"{checkpoint.parts.embed}.weight"
    inputs = [name for name in tensors if name == embedding or name.endswith(f".{embedding}")]
    heads = [name for name in tensors if name in HEADS]
    if not checkpoint.config.tie_word_embeddings or not inputs or not heads:
        return
    shapes = [tensors[name].get_shape() for name in (heads[0], inputs[0])]
    if shapes[0] != shapes[1]:
        raise problem_in(
            checkpoint.path / CONFIG_FILE,
            "tie_word_embeddings",
            f"is true, and {heads[0]} is {shapes[0]}, {inputs[0]} {shapes[1]}: take one of them out",
        )
    if not torch.equal(tensors[inputs[0]].read(), tensors[heads[0]].read()):
        log.warning(
            f"{checkpoint.source}: tie_word_embeddings is true, and {heads[0]} holds other numbers than {inputs[0]}: "
            f"{heads[0]} is the head, as in transformers; state tie_word_embeddings false, or take the tensor out"
        )


def vectors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The vectors that are short enough to be read before any stage is started, by name."""
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1 and tensor.size <= LONGEST_VECTOR:
            yield name, tensor.read()
