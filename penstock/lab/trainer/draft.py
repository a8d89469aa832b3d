"""Training of a small model as a drafter, in the form of a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.architectures import check_supported, model_class
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.look import INDEX_FILE, SINGLE_FILE
from penstock.core import ConfigError
from penstock.lab.trainer.kinds import Kind, Start, Teaching, dtype_name, with_usual
from penstock.lab.trainer.options import DRAFT_LAYERS, TrainOptions, check_within
from penstock.lab.trainer.states import Batch
from penstock.models.loader import load_module, load_whole, quiet
from penstock.models.speculators.base import TargetHead
from penstock.models.stage_model import NormOnly

# ---------------------------------------------------------------------------------------------------------- draft files
# A small model as a Hugging Face checkpoint. It begins as the target without most of its layers.

BESIDE: Final = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the target's files that the small model takes: tokenizer, chat template and sampling defaults."""
OWN: Final = ("config.json", INDEX_FILE)
"""Files with these suffixes that describe only the target."""


class DraftFiles:
    """The files of small models (``kinds.Files``)."""

    file = SINGLE_FILE

    def begin(self, folder: Path, start: Start) -> None:
        """Write a model of evenly spaced layers of the target, between its embedding, norm and head."""
        target, layers = start.target, start.options.layers
        assert layers is not None
        picked = [round(i * (target.num_layers - 1) / max(1, layers - 1)) for i in range(layers)]
        save(small_model(target, picked), folder, target)

    def open(self, folder: Path, target: Checkpoint) -> Checkpoint:
        return open_checkpoint(str(folder))

    def load(self, opened: Checkpoint, target: Checkpoint, device: str) -> tuple[Any, dict[str, nn.Parameter]]:
        module = load_whole(opened, "float32")
        return module.to(device).requires_grad_(False), dict(module.named_parameters())

    def write(self, output: Path, opened: Checkpoint, module: nn.Module, target: Checkpoint) -> None:
        save(copy.deepcopy(module), output, target)


def save(module: Any, folder: Path, target: Checkpoint) -> None:
    """Write the model in the target's dtype, with the target's tokenizer. The module given is converted."""
    with quiet():
        module.to(getattr(torch, dtype_name(target))).save_pretrained(folder, max_shard_size="1TB")
    for file in target.path.iterdir():
        if file.suffix in BESIDE and file.name not in OWN:
            shutil.copy(file, folder / file.name)


def small_model(target: Checkpoint, picked: Sequence[int]) -> Any:
    """The target with only these of its layers, which are loaded one at a time."""
    config, parts, last = with_layers(target.transformers_config, picked), target.parts, target.num_layers
    made = model_class(config)(config)
    base = getattr(made, parts.base)
    first_end, last_end = (load_module(target, end, end, "float32", "cpu") for end in (0, last))
    getattr(base, parts.embed).load_state_dict(getattr(getattr(first_end, parts.base), parts.embed).state_dict())
    getattr(base, parts.norm).load_state_dict(getattr(getattr(last_end, parts.base), parts.norm).state_dict())
    made.get_output_embeddings().load_state_dict(last_end.get_output_embeddings().state_dict())
    for layer, number in zip(getattr(base, parts.layers), picked, strict=True):
        layer.load_state_dict(nearest_like(target, layer, number))
    return made


def with_layers(config: Any, picked: Sequence[int]) -> Any:
    """The configuration of a model with only these layers; lists that have an entry for each layer lose the others."""
    fields, layers = config.to_dict(), config.num_hidden_layers
    for name, value in fields.items():
        if "layer" in name and isinstance(value, list) and len(value) == layers:
            fields[name] = [value[number] for number in picked]
    return type(config).from_dict({**fields, "num_hidden_layers": len(picked)})


def nearest_like(target: Checkpoint, layer: nn.Module, wanted: int) -> dict[str, Tensor]:
    """The weights of the target's layer nearest to ``wanted`` that has the same tensors as ``layer``.

    In some models the first layers are dense and the others are not. Raises ConfigError if no layer has them.
    """
    needed = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    for number in sorted(range(target.num_layers), key=lambda one: abs(one - wanted)):
        base = getattr(load_module(target, number, number + 1, "float32", "cpu"), target.parts.base)
        found: dict[str, Tensor] = getattr(base, target.parts.layers)[number].state_dict()
        if {name: tensor.shape for name, tensor in found.items()} == needed:
            return found
    raise ConfigError("layers: of so few, one is like none of the target's to begin with; ask for more")


# ---------------------------------------------------------------------------------------------------------------- draft
# A small model of the target's own architecture, distilled from the target, for the method draft_model.
#
# Source: Zhou et al., DistillSpec (arXiv 2310.08461), with the target's distributions over given texts.


class DraftHead(TargetHead):
    """The final norm and head of a model in training, which share its weights."""

    def __init__(self, causal: Any, base: str) -> None:
        nn.Module.__init__(self)
        # A copy of the model's shell, with the same submodules but the base replaced: the norm alone, without layers.
        self._causal = copy.copy(causal)
        self._causal._modules = {**causal._modules, base: NormOnly(nn.Identity(), causal._modules[base])}


class DraftTrainee(nn.Module):
    """A trainee (``kinds.Trainee``) with a single step, since a small model drafts in the same way at every depth."""

    def __init__(self, module: Any, head: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self._base = check_supported(module.config).base
        self._own_head = DraftHead(module, self._base)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        (hidden_BnD,) = self.unroll(batch, 1)
        return Teaching(self.head, batch, None).divergence(hidden_BnD, self._own_head)

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        base = getattr(self.module, self._base)
        # All tokens but the last are read; the first row's draft is left out, as in the other kinds.
        yield base(input_ids=batch.tokens_BL[:, :-1], use_cache=False).last_hidden_state[:, 1:]

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self._own_head(hidden_nD)
        return logits_nV


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kind's defaults. Raises FieldError for more layers than the target's."""
    options = with_usual(options, layers=min(DRAFT_LAYERS, target.num_layers))
    check_within(options, target.num_layers, "layers")
    return options


DRAFT: Final = Kind(
    name="draft",
    learning_rate=1e-4,
    betas=(0.9, 0.999),
    clip=1.0,
    files=DraftFiles(),
    settle=settle,
    reads=lambda options, target: (),
    trainee=lambda module, head, options, target, draft_ids_v: DraftTrainee(module, head),
)
