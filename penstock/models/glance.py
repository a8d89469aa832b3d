"""A quick look at a checkpoint: its files' names, its JSON and a GGUF file's header, without torch.

It is enough to refuse most unsupported models within a fraction of a second, before anything else is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, check_folder, printable, read_json, shown
from penstock.models.gguf.header import Header, read_header
from penstock.models.gguf.purpose import check_purpose
from penstock.models.places import GGUF, resolve
from penstock.models.text_part import WRAPPED, is_wrapper, text_name
from penstock.models.weight_files import MEDUSA_FILE, check_complete, check_no_adapter, check_weights

ENCODERS: Final = frozenset(
    {
        *("albert", "bert", "camembert", "clip_text_model", "convbert", "deberta", "deberta-v2", "distilbert"),
        *("electra", "esm", "ernie", "eurobert", "flaubert", "funnel", "layoutlm", "longformer", "mobilebert"),
        *("modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl"),
    }
)
"""Model types that read text and write none."""
NO_WRITER: Final = re.compile(r"For(MaskedLM|\w*Classification|QuestionAnswering|MultipleChoice|RewardModel)$")
"""Classes that score a text, whatever model they are built on."""
TOKENIZER: Final = re.compile(r"tokenizer|vocab\.|merges\.|spiece|sentencepiece|tekken")
"""How the names of a tokenizer's files begin."""
EMBEDDING: Final = "token_embd.weight"


DRAFT_MODEL: Final = "draft_model"
MOST_HEADER: Final = 1 << 26
"""The largest header of a safetensors file, in bytes."""
UNSUPPORTED: Final = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE", "hydra": "Hydra", "mlp": "MLP"}
"""Beginnings of names in the configurations of unsupported drafters -> what the drafter is called."""
NAMED_BY: Final = ("speculators_model_type", "model_type", "architectures", "algorithm")
MEDUSA: Final = re.compile(r"blocks\.\d+\.layers\.\d+\.weight|\d+\.\d+\.linear\.weight")


@dataclass(frozen=True)
class Glance:
    """Properties of a model that its files state; None for one that they do not state."""

    num_layers: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    has_tokenizer: bool = True
    """Whether there is a file that a tokenizer could be made of."""


def glance(model: str) -> Glance:
    """Look at a folder, a GGUF file or a hub id. Raises ConfigError for a model that cannot be run."""
    place = resolve(model)
    if place.is_file():
        header = read_header(place)
        check_purpose(header)
        return of_header(header)
    table = stated_config(place)
    check_weights(place)
    wrapped = is_wrapper(table)
    check_complete(place, lambda name: not wrapped or text_name(name) is not None)
    table = table[WRAPPED] if wrapped else table
    return Glance(
        num_layers=whole(table.get("num_hidden_layers")),
        vocab_size=whole(table.get("vocab_size")),
        max_position_embeddings=whole(table.get("max_position_embeddings")),
        has_tokenizer=any(TOKENIZER.match(file.name) for file in place.iterdir()),
    )


def stated_config(folder: Path) -> dict[str, Any]:
    """The table in config.json.

    Raises ConfigError for encoders, and where there is none, saying what the folder holds.
    """
    check_folder(folder)
    file = folder / CONFIG_FILE
    if not file.is_file():
        check_no_adapter(folder)
        files = sorted(folder.glob(f"*{GGUF}"))
        hint = f"; give the file itself: {printable(str(files[0]))}" if files else ""
        raise ConfigError(f"model: {folder} holds no config.json, so it is no Hugging Face checkpoint{hint}")
    table = read_json(file)
    check_writes(table, folder)
    return table


def check_writes(table: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if the configuration belongs to a model that writes no text."""
    named = table.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    scores = [name for name in classes if NO_WRITER.search(name)]
    model_type = table.get("model_type")
    encodes = isinstance(model_type, str) and model_type in ENCODERS and not table.get("is_decoder")
    if table.get("is_encoder_decoder") is True:
        raise ConfigError(
            f"model: {folder} holds an encoder-decoder ({shown(model_type)}), which has no single stack of layers to "
            "split; give a causal language model"
        )
    if encodes or (classes and len(scores) == len(classes)):
        what = f"an encoder ({shown(model_type)})" if encodes else shown(scores[0])
        raise ConfigError(
            f"model: {folder} holds {what}, which reads text and writes none; give a causal language model"
        )


def of_header(header: Header) -> Glance:
    embedding = header.tensors.get(EMBEDDING)
    counts = (header.value(f"{header.architecture}.{name}") for name in ("block_count", "context_length"))
    layers, positions = map(whole, counts)
    return Glance(layers, embedding.shape[0] if embedding is not None else None, positions)


def whole(value: object) -> int | None:
    return value if type(value) is int else None


# ----------------------------------------------------------------------------------------------------------- drafters


def method_of(model: str) -> str:
    """The method for drafting with a folder or file; "draft_model" unless something says otherwise.

    Raises FieldError, with the kind, for drafters that are not supported.
    """
    place = Path(model).expanduser()
    if place.is_file():
        place = place.parent if place.suffix == ".safetensors" else place
    if not place.is_dir():
        return DRAFT_MODEL
    try:
        config = read_json(place / CONFIG_FILE)
    except ConfigError:
        return DRAFT_MODEL  # loading it will say what is wrong
    names = frozenset(name for file in sorted(place.glob("*.safetensors")) for name in tensor_names(file))
    found = learned(config, names, place)
    if found is None:
        refuse_unsupported(config, place)
    return found or DRAFT_MODEL


def learned(config: Mapping[str, Any], names: frozenset[str], place: Path) -> str | None:
    """The method of a supported learned drafter; None if it is none."""
    stated = config.get("speculator")
    if isinstance(stated, str):
        return stated
    if config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    alone = not any(name.startswith("model.") for name in names)
    if alone and ((place / MEDUSA_FILE).is_file() or any(MEDUSA.fullmatch(name) for name in names)):
        return "medusa"
    if any(name.startswith("spec_layers.") for name in names):
        return "spd"
    if alone and any(name.startswith("mtp.") for name in names):
        return "mtp"
    return "eagle" if alone and "fc.weight" in names and not any(unsupported_names(config)) else None


def refuse_unsupported(config: Mapping[str, Any], place: Path) -> None:
    """Raise FieldError for a drafter of a kind that is known but not supported."""
    for name, kind in unsupported_names(config):
        raise FieldError(
            "speculative_config.model",
            f"is {str(place)!r}, a drafter of kind {kind} ({shown(name)}), which is not supported; use another one, or "
            "prompt lookup (method 'ngram')",
        )


def unsupported_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stated: list[Any] = [config.get(field) for field in NAMED_BY]
    stated += [f"{key}" for key in config if key.endswith("_config")]
    for name in flat(stated):
        yield from ((name, kind) for word, kind in UNSUPPORTED.items() if re.match(word, name.lower()))


def flat(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))


def tensor_names(file: Path) -> list[str]:
    """The names in a safetensors file's header; empty for a damaged file, which fails when it is read."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            return list(json.loads(opened.read(length))) if length <= MOST_HEADER else []
    except (OSError, ValueError, MemoryError, RecursionError):
        return []
