"""A first look at a checkpoint without torch: place, files, configuration, and how its layers are split."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.gguf_header import BLOCK_DRAFTER, FORKED, OTHERS, Header, check_purpose, read_header
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.environment import Need, install_command
from penstock.files import (
    CONFIG_FILE,
    NAMED_PIPE,
    check_folder,
    check_inside,
    is_named_pipe,
    printable,
    problem_in,
    read_json,
    shown,
)

# --------------------------------------------------------------------------------------------------------- weight files
# Finds the files of a folder that hold its weights, without opening any.

log = logging.getLogger(__name__)

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
"""Medusa's heads may be stored beside the model that they belong to."""
ADAPTER_FILE: Final = "adapter_config.json"
"""The file by which a folder is recognised as an adapter (LoRA)."""
REFUSED: Final = {
    "*.bin": (
        "has .bin weights only, which would have to be unpickled; convert it to safetensors: load it once with "
        "transformers and call save_pretrained"
    ),
    "**/*.onnx": "holds a model for ONNX Runtime, which cannot be split; give the safetensors that it was made of",
}
"""Pattern of files that a folder without safetensors may hold -> what to tell the user."""


def uses_index(path: Path) -> bool:
    """Whether the index says where the weights are. A single file beside it takes precedence, as in transformers."""
    return (path / INDEX_FILE).is_file() and not (path / SINGLE_FILE).is_file()


def warn_of_two(path: Path) -> None:
    """Warn if an index beside a single file names other files."""
    if not ((path / INDEX_FILE).is_file() and (path / SINGLE_FILE).is_file()):
        return
    try:
        named = sorted({file.name for file in indexed(path).values()})
    except ConfigError as error:
        named = [str(error)]
    if named != [SINGLE_FILE]:
        log.warning(
            f"{path} holds {SINGLE_FILE}, and {INDEX_FILE} names {', '.join(named[:3])}: {SINGLE_FILE} is taken, as "
            "transformers does; remove what is stale"
        )


def check_weights(path: Path) -> None:
    """Raise ConfigError unless the folder holds safetensors, saying what else it holds."""
    if (path / INDEX_FILE).is_file() or (path / SINGLE_FILE).is_file():
        return
    check_no_adapter(path)
    for files, reason in REFUSED.items():
        if any(path.glob(files)):
            raise ConfigError(f"model: {path} {reason}")
    raise ConfigError(f"model: neither {SINGLE_FILE} nor {INDEX_FILE} in {path}")


def check_no_adapter(path: Path) -> None:
    """Raise ConfigError for the folder of an adapter, which is no model by itself."""
    if (path / ADAPTER_FILE).is_file():
        base = read_json(path / ADAPTER_FILE).get("base_model_name_or_path")
        raise ConfigError(
            f"model: {path} is an adapter (LoRA) for {shown(base)}; merge it into that model once: load it with peft, "
            "call merge_and_unload and save_pretrained, and give the folder that comes of it"
        )


def check_complete(path: Path, wanted: Callable[[str], bool]) -> None:
    """Raise ConfigError if a file is missing that the index names for a ``wanted`` tensor."""
    if not uses_index(path):
        return
    for file in shards_of(path, wanted):
        if not file.is_file():
            raise missing_shard(file)


def missing_shard(file: Path) -> ConfigError:
    """The error for a shard that the index names and that is not there."""
    return ConfigError(f"model: shard {file.name} is missing from {file.parent}: download it again")


def shards_of(path: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The files that hold a ``wanted`` tensor by the index, in order. Raises ConfigError like ``indexed``."""
    return sorted({file for name, file in indexed(path).items() if wanted(name)})


def indexed(path: Path) -> dict[str, Path]:
    """Tensor -> file, by the index. Raises ConfigError for a file outside of the folder."""
    index = path / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise problem_in(index, "weight_map", f"is {shown(weight_map)}; it has to lead from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or file != Path(file).name:
            raise problem_in(
                index, f"weight_map.{name}", f"is {shown(file)}; it has to be a safetensors file in the same folder"
            )
    files = {file: path / file for file in set(weight_map.values())}
    for file in files.values():
        check_inside(path, file)
    return {name: files[file] for name, file in weight_map.items()}


# ------------------------------------------------------------------------------------------------------------ text part
# The text part of a multimodal checkpoint: its tensors, under the names that a language model alone has.

WRAPPERS: Final = frozenset(
    {"qwen3_5", "qwen3_5_moe", "gemma3", "gemma3n", "mistral3", "llama4", "gemma4", "gemma4_unified"}
)
"""Multimodal architectures whose text part, given only text, computes the same as the whole."""
WRAPPED: Final = "text_config"
"""The field of a multimodal configuration that holds the language model's."""
INSIDE: Final = "language_model"
"""The part of tensors' names that says that they belong to the language model."""
HEAD: Final = "lm_head"
MTP: Final = "mtp."
"""The prefix of Qwen's MTP heads: weights of drafters (``models/speculators/``), not of stages."""


def is_wrapper(stated: Mapping[str, Any]) -> bool:
    """Whether a configuration file describes a language model inside of another model."""
    model_type = stated.get("model_type")
    return isinstance(model_type, str) and model_type in WRAPPERS and isinstance(stated.get(WRAPPED), dict)


def text_name(name: str) -> str | None:
    """A language model's own name for this tensor; None for tensors of vision or audio towers, projectors and the like.

    Over the years transformers has written ``model.language_model.layers..`` and ``language_model.model.layers..``.
    """
    parts = name.split(".")
    if INSIDE in parts[:2]:
        parts.remove(INSIDE)
        return ".".join(parts)
    return name if parts[0] == HEAD else None


def is_read(stated: Mapping[str, Any], name: str) -> bool:
    """Whether a stage or a drafter may read this tensor of a checkpoint with that configuration file."""
    return not is_wrapper(stated) or text_name(name) is not None or name.startswith(MTP)


# --------------------------------------------------------------------------------------------------------------- places
# Finds a checkpoint without torch: a folder, a GGUF file, or the hub's cache.

SMALL: Final = ["*.json", "*.model", "*.jinja", "*.txt"]
"""Files that are fetched before the weights: configuration, tokenizer, chat template, index."""
GGUF: Final = ".gguf"


def resolve(model: str, revision: str | None = None) -> Path:
    """The path of a checkpoint: a local folder or GGUF file, or the folder of a hub id, from the cache or downloaded.

    Only the files that Penstock reads are downloaded.

    Raises ConfigError, which says what to do, if it is in none of these places.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if is_named_pipe(folder):
        raise ConfigError(f"model: {model!r} {NAMED_PIPE}")
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(f"model: {model!r} is a link that leads nowhere; give the place itself")
    if folder.suffix == GGUF:
        if not folder.is_file():
            raise ConfigError(f"model: there is no file {model!r}")
        return folder
    if folder.is_file():
        raise ConfigError(f"model: {model!r} is a file; give a checkpoint's folder, or a file ending in {GGUF}")
    if folder.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ConfigError(
            f"model: there is no folder {model!r}; give a checkpoint's folder, a {GGUF} file or an id like "
            "'Qwen/Qwen3-0.6B'"
        )
    described = _described(model, revision)
    return described if has_weights(described) else _download(model, described.name, weights_of(described))


def weights_of(described: Path) -> list[str]:
    """Names of a repository's weight files, from its small files. Raises ConfigError for a wrong index.

    Many repositories hold the same weights twice, for another library, and multimodal ones those of their towers.
    """
    if not (described / INDEX_FILE).is_file():
        return [SINGLE_FILE, MEDUSA_FILE]
    stated = read_json(described / CONFIG_FILE)
    return [file.name for file in shards_of(described, lambda name: is_read(stated, name))]


def has_weights(described: Path) -> bool:
    """Whether the weights are there: all files that an index names, or one of those that need no index."""
    if (described / SINGLE_FILE).is_file():
        return True
    there = [(described / name).is_file() for name in weights_of(described)]
    return all(there) if (described / INDEX_FILE).is_file() else any(there)


def _described(model: str, revision: str | None) -> Path:
    """The folder of a repository at a commit, with its small files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=SMALL, local_files_only=True))
    except LocalEntryNotFoundError:
        return _download(model, revision, SMALL)
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither a folder nor a valid hub id ({error})") from error


def _download(model: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except Exception as error:
        raise ConfigError(
            f"model: {model!r} is not in the local hub cache and could not be downloaded ({error}). Check the name, "
            "the network and, for a gated model, `hf auth login`; or download it elsewhere and give the folder's path"
        ) from error


# --------------------------------------------------------------------------------------------------------------- glance
# A quick look at a checkpoint: its files' names, its JSON and a GGUF file's header, without torch.
#
# It is enough to refuse most unsupported models within a fraction of a second, before anything else is loaded.

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
"""Beginnings of the names of a tokenizer's files."""
EMBEDDING: Final = "token_embd.weight"


DRAFT_MODEL: Final = "draft_model"
"""The method that drafts with a model of its own."""
MOST_HEADER: Final = 1 << 26
"""Bytes of the largest header of a safetensors file that is read: half a million tensors at 120 bytes each."""
UNSUPPORTED: Final = {"hydra": "Hydra", "mlp": "MLP"}
"""Beginnings of names in the configurations of unsupported drafters -> what the drafter is called."""
HEADRACE: Final = "headrace"
"""Penstock's own kind of block drafter: DSpark's layout, with a projection of the states of tokens in flight."""
BLOCK_NAMES: Final = {
    "dflash": "dflash",
    "qwen3dspark": "dspark",
    "dspark": "dspark",
    "peagle": "peagle",
    "jetspec": "jetspec",
    HEADRACE: HEADRACE,
}
"""Beginnings of names in the configurations of drafters that draft a block at a time -> the kind."""
BLOCK_READ: Final = ("dflash", "dspark", HEADRACE, "jetspec", "peagle")
"""Kinds of block drafters that are supported; each is a method. DFlash 2 is DFlash with further fields."""
MARKOV_TENSOR: Final = "markov_w1.weight"
"""The tensor of a GGUF file by which DSpark is told from DFlash."""
NAMED_BY: Final = ("speculators_model_type", "model_type", "architectures", "algorithm")
"""Fields by which a drafter's configuration may say what it is, in the order of asking."""
MEDUSA: Final = re.compile(r"blocks\.\d+\.layers\.\d+\.weight|\d+\.\d+\.linear\.weight")
"""Names of Medusa's tensors: vLLM's, and FasterDecoding's."""


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
    """The properties of a GGUF file's model."""
    embedding = header.tensors.get(EMBEDDING)
    counts = (header.value(f"{header.architecture}.{name}") for name in ("block_count", "context_length"))
    layers, positions = map(whole, counts)
    return Glance(layers, embedding.shape[0] if embedding is not None else None, positions)


def whole(value: object) -> int | None:
    """The value if it is a whole number, else None."""
    return value if type(value) is int else None


# ----------------------------------------------------------------------------------------------------------- drafters
# The method that a drafter's files ask for, told by its configuration and its tensors' names.


def method_of(model: str) -> str:
    """The method for drafting with a folder or file; "draft_model" unless something says otherwise.

    Raises FieldError, with the kind, for drafters that are not supported.
    """
    place = Path(model).expanduser()
    if place.is_file():
        if place.suffix == GGUF:
            return gguf_method(place)
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


def gguf_method(file: Path) -> str:
    """The method for drafting with a GGUF file. Raises FieldError for a block drafter in a layout that is not read."""
    try:
        header = read_header(file)
    except ConfigError:
        return DRAFT_MODEL  # loading it will say what is wrong
    if header.architecture in FORKED:
        raise FieldError("speculative_config.model", f"is {str(file)!r}, {OTHERS[header.architecture]}")
    if header.architecture != BLOCK_DRAFTER:
        return DRAFT_MODEL
    return "dspark" if MARKOV_TENSOR in header.tensors else "dflash"


def block_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of a drafter that drafts a block at a time, by its configuration alone; None if it is none.

    Kinds in ``BLOCK_READ`` can be run, the others are refused by their names.
    """
    inner = config.get("dflash_config")
    inner = inner if isinstance(inner, Mapping) else {}
    projector = inner.get("projector_type", config.get("projector_type"))
    if projector == "domino":
        return "Domino"
    if projector in ("dspark", HEADRACE):
        return str(projector)
    stated = flat([config.get("speculators_model_type"), config.get("architectures"), config.get("model_type")])
    named = [kind for name in stated for word, kind in BLOCK_NAMES.items() if name.lower().startswith(word)]
    if not named and not inner:
        # P-EAGLE's layout is EAGLE-3's, and its class may have that name.
        return "peagle" if config.get("parallel_drafting") or "ptd_token_id" in config else None
    kind = named[0] if named else "dflash"
    return "jetspec" if kind == "dflash" and inner.get("causal_head", config.get("causal_head")) else kind


def learned(config: Mapping[str, Any], names: frozenset[str], place: Path) -> str | None:
    """The method of a supported learned drafter; None if it is none."""
    # What a configuration states counts before names of tensors, which kinds may share.
    stated = config.get("speculator")
    if isinstance(stated, str):
        return stated
    if (kind := block_kind(config)) is not None:
        return kind if kind in BLOCK_READ else None
    if not {"mask_hidden", "model.mask_hidden"}.isdisjoint(names):
        return "peagle"
    if config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    # A target's own checkpoint may hold an MTP head beside its layers: that alone makes it no drafter.
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
    """Names in a drafter's configuration that say an unsupported kind, each with that kind."""
    if (kind := block_kind(config)) is not None and kind not in BLOCK_READ:
        yield named_by(config), kind
    stated: list[Any] = [config.get(field) for field in NAMED_BY]
    stated += [f"{key}" for key in config if key.endswith("_config")]
    for name in flat(stated):
        yield from ((name, kind) for word, kind in UNSUPPORTED.items() if re.match(word, name.lower()))


def named_by(config: Mapping[str, Any]) -> str:
    """The first name in a drafter's configuration that says what it is."""
    return next(flat([config.get(field) for field in NAMED_BY]), "dflash_config")


def flat(values: Iterable[Any]) -> Iterator[str]:
    """The texts among the values, those in lists included."""
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


# ---------------------------------------------------------------------------------------------------------------- split
# The layers of each stage: split evenly, or as the user writes.


def even_split(num_layers: int, stages: int, head_layers: float = 1.0) -> list[tuple[int, int]]:
    """Split ``num_layers`` into ``stages`` ranges [first, last) of nearly equal work.

    The last stage also holds the head, which weighs as much as ``head_layers`` layers. Stages get no layer only where
    there are too few, or where the head alone outweighs a fair share.
    """
    if stages < 1:
        raise ConfigError(f"pipeline_parallel_size is {stages}; it has to be at least 1")
    fair = (num_layers + head_layers) / stages
    # The head takes its share of the last stage's work, but leaves it a layer where there are enough.
    last = num_layers if stages == 1 else min(num_layers, max(0, round(fair - head_layers)))
    last = max(last, min(1, num_layers // stages))
    counts = [last]
    # Filled from the back with rounded-down shares, so that the first stages get what remains.
    for left in range(stages - 1, 0, -1):
        counts.insert(0, (num_layers - sum(counts)) // left)
    return _ranges(counts)


def parse_layer_split(text: str, num_layers: int) -> list[tuple[int, int]]:
    """Read a split like "4,6,6": the number of layers of each stage. Raises ConfigError unless it adds up."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"layer_split is {text!r}; it has to be numbers of layers like '4,6,6'") from None
    if any(count < 0 for count in counts):
        raise ConfigError(f"layer_split is {text!r}; a stage cannot hold a negative number of layers")
    if sum(counts) != num_layers:
        raise ConfigError(f"layer_split {text!r} adds up to {sum(counts)} layers; the model has {num_layers}")
    return _ranges(counts)


def key_groups(config: Any) -> int:
    """Groups of keys and values in each layer of a model with this configuration; 1 for one that has no heads."""
    heads = getattr(config, "num_attention_heads", 1)
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    """Counts of layers as ranges [first, last), one behind the other."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


# ---------------------------------------------------------------------------------------------------------- torch build
# Checks what the installed torch was built for, by its files: importing it takes seconds.

NO_GPU: Final = re.compile(r"^cuda\b[^=\n]*= None$.*^hip\b[^=\n]*= None$", re.MULTILINE | re.DOTALL)
"""Matches torch/version.py of a build for CPUs."""
VERSION: Final = re.compile(r"^__version__\b[^=\n]*= *['\"](([0-9]{1,9})\.([0-9]{1,9})[^'\"\n]*)", re.MULTILINE)
"""Matches the version there: the whole of it, major and minor."""
LEAST: Final = (2, 7)
"""The oldest torch that works, as pyproject.toml has it.

In 2.6 the import of transformers starts a GPU's driver, and no process that is forked then can use it.
"""


def check_version() -> None:
    """Raise ConfigError if the torch that is installed is too old; a version that is not found is not judged."""
    found = VERSION.search(stated_version())
    if found is not None and (int(found[2]), int(found[3])) < LEAST:
        needed = ".".join(map(str, LEAST))
        command = install_command([Need("Penstock needs", "torch", "")])
        raise ConfigError(f"torch {found[1]} is installed, and Penstock needs {needed} or later: {command}")


def check_built_for(device: str) -> None:
    """Raise FieldError for a GPU if torch was clearly built without any; other problems show once torch is imported."""
    if device.partition(":")[0] == "cuda" and "torch" not in sys.modules and NO_GPU.search(stated_version()):
        raise FieldError("device", f"is {device!r}, but this torch was built without CUDA; use cpu")


def stated_version() -> str:
    """The text of torch/version.py; empty if there is none."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
    return ""
