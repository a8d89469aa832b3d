"""A GGUF file's entries as a transformers configuration: every one is understood, or refused by name."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from penstock.checkpoint.gguf_blocks import FLOATS, floats
from penstock.checkpoint.gguf_header import (
    FLOAT32,
    MAGIC,
    UINT32,
    VERSIONS,
    Header,
    TensorInfo,
    check_purpose,
    numbers,
    refusal,
    value_of,
)
from penstock.core import ConfigError
from penstock.files import problem_in, said, scratch_folder, shown

# ------------------------------------------------------------------------------------------------------------- accepted
# Decides whether a GGUF file can be run: every entry about the model has to be understood.

REMEDY: Final = "give the checkpoint that the file was made of instead"
IMPORTANT: Final = ("tokenizer.ggml.suppress_tokens",)
"""Entries that are not named after the architecture but change what the model says."""
GIVEN: Final = {
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "embedding_length_out",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
"""Entries about the model that ``config_table`` takes over because transformers does not."""

NEUTRAL: Final = {
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.output_scale": (0.0, 1.0),
    "attention.value_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0,),
}
"""Entry that is not taken into account -> the values with which it changes nothing; for others see ``NOTHING``."""
NOTHING: Final = (0, 0.0, False, "", None)
"""Values with which any other entry changes nothing."""

SILENT: Final = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
"""Entries about the model that change no number: the vocabulary's size is that of the embedding."""


def check_accepted(header: Header) -> None:
    """Raise ConfigError unless the file holds a whole language model of which every entry is understood."""
    check_purpose(header)
    check_understood(header)


def check_understood(header: Header) -> None:
    """Raise ConfigError for an entry about the model that is not taken into account: it might change token ids."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    mapped = {key for key, name in GGUF_CONFIG_MAPPING[header.architecture].items() if name is not None}
    for key in header.entries:
        name = key.removeprefix(f"{header.architecture}.")
        if (name == key and key not in IMPORTANT) or name in mapped | GIVEN | SILENT:
            continue
        value = value_of(header, key)
        if (value is None and header.count(key)) or value not in NEUTRAL.get(name, NOTHING):
            raise problem_in(header.path, key, f"is {shown(value)}, which cannot be taken into account here: {REMEDY}")


def contradiction(header: Header, name: str, problem: str) -> ConfigError:
    """The error that refuses an entry about the model."""
    return problem_in(header.path, f"{header.architecture}.{name}", problem)


def number(header: Header, name: str, kind: type = int) -> Any:
    """The value of an entry about the model, also of an array of equal values; None where there is none.

    Raises ConfigError unless the value is of this kind.
    """
    key = f"{header.architecture}.{name}"
    value = value_of(header, key)
    if key in header.entries and type(value) is not kind:
        wanted = {int: "a whole number", float: "a number with a fraction", bool: "true or false"}
        raise contradiction(header, name, f"is {shown(value)}; it has to be {wanted[kind]}")
    return value


# --------------------------------------------------------------------------------------------------------------- rotary
# The scaling of a GGUF file's rotary embeddings, as transformers' ``rope_parameters``.
#
# llama.cpp divides frequencies by a factor in the file (``linear``, also where no type is named), by YaRN's ramp, or by
# the factors in a tensor. In all cases it multiplies cosines and sines by ``rope.scaling.attn_factor``.

FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors with phi3's divisors of the frequencies, for short texts and for long ones."""
LLAMA_FACTORS: Final = "rope_freqs.weight"
"""The tensor with llama 3's divisors of the frequencies, for every length."""
ROPE_TENSORS: Final = (*FACTORS, LLAMA_FACTORS)
MOST_FACTORS: Final = 100_000
"""Numbers of the longest rope tensor that is read: one for two values of a head, of which models have some 256."""
DEFAULT_BASE: Final = 10000.0
"""llama.cpp's base of the rotary frequencies where the file states none."""
TWO_BASES: Final = "gemma3"
"""The architecture whose sliding layers have a base of their own, which is never scaled."""
SCALED_APART: Final = ("gemma2",)
"""Architectures whose sliding layers are scaled by the factor, whatever the type."""
TYPES: Final = ("none", "linear", "yarn", "longrope")
"""Types of scaling that can be read."""
KINDS_OF_FACTORS: Final = {"llama": ("longrope",), "phi3": TYPES}
"""Architecture -> types of scaling that may have factors for short and long texts."""


def add_rope(header: Header, table: dict[str, Any], head_width: int) -> None:
    """Set the rotary fields of ``table``, whose heads have ``head_width`` numbers, as llama.cpp turns them."""
    rope = table.get("rope_parameters")
    if not isinstance(rope, dict):
        raise refusal(header, "without rotary embeddings, which its architecture has")
    turned = number(header, "rope.dimension_count")
    if turned is not None and turned != head_width:
        if "partial_rotary_factor" not in rope or turned > head_width:
            wanted = f"is {turned}; it has to be the {head_width} numbers of a head"
            raise contradiction(header, "rope.dimension_count", wanted)
        if turned < 2 or turned % 2:  # numbers rotate in pairs, and llama.cpp never rotates none
            raise contradiction(header, "rope.dimension_count", f"is {turned}; it has to be even and above 0")
        table["partial_rotary_factor"] = rope["partial_rotary_factor"] = turned / head_width
    scaled = rope.get("full_attention", rope)  # gemma3 scales only its full-attention layers
    scaled["rope_theta"] = base = above_0(header, "rope.freq_base", DEFAULT_BASE)
    add_sliding_base(header, rope, base)
    count = (turned or head_width) // 2
    # Divisors of single frequencies, in tensors, go before the one that the metadata state for all.
    scaled.update(lists(header, table, count) or one_factor(header, table, count))


def add_sliding_base(header: Header, rope: dict[str, Any], base: float) -> None:
    """Set the base of the sliding layers, which current converters always write."""
    is_apart = header.architecture == TWO_BASES
    sliding = above_0(header, "rope.freq_base_swa", DEFAULT_BASE if is_apart else base)
    if is_apart:
        rope["sliding_attention"]["rope_theta"] = sliding
    elif sliding != base:
        raise contradiction(header, "rope.freq_base_swa", f"is {sliding}; all its layers turn by {base}")


def one_factor(header: Header, table: dict[str, Any], count: int) -> dict[str, Any]:
    """The scaling that the metadata give for all frequencies together."""
    kind, factor, attention = kind_of(header), factor_of(header), attention_factor(header)
    if kind == "yarn":
        if factor < 1:
            raise contradiction(header, "rope.scaling.factor", f"is {factor}; of yarn it has to be 1 or more")
        original = number(header, "rope.scaling.original_context_length") or table["max_position_embeddings"]
        for name, usual in (("yarn_beta_fast", 32.0), ("yarn_beta_slow", 1.0)):
            if (stated := number(header, f"rope.scaling.{name}", float)) not in (None, usual):
                raise contradiction(header, f"rope.scaling.{name}", f"is {stated}; only {usual} can be read")
        spread = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": spread * attention,
        }
    if kind == "longrope":
        raise contradiction(header, "rope.scaling.type", f'is "longrope", and there are no {" and ".join(FACTORS)}')
    # transformers' linear scaling has no attention factor; longrope with one divisor for all frequencies has.
    if attention != 1.0:
        same = [factor] * count
        return longrope(same, same, table["max_position_embeddings"], attention)
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def lists(header: Header, table: dict[str, Any], count: int) -> dict[str, Any]:
    """The scaling that tensors of the file give for single frequencies; empty where there are none.

    transformers' longrope divides by a list as well. Llama 3's list is the same for every length.
    """
    held = [name for name in ROPE_TENSORS if name in header.tensors]
    if not held:
        return {}
    kind, factor, attention = kind_of(header), factor_of(header), attention_factor(header)
    if kind == "yarn":
        raise contradiction(
            header, "rope.scaling.type", f'is "yarn", and there are {", ".join(held)}: only one of both'
        )
    if held == [LLAMA_FACTORS] and header.architecture == "llama" and kind != "longrope":
        same = [one * factor for one in positive_numbers(header, LLAMA_FACTORS, count)]
        return longrope(same, same, table["max_position_embeddings"], attention)
    if held != list(FACTORS) or kind not in KINDS_OF_FACTORS.get(header.architecture, ()):
        raise refusal(header, f"with {', '.join(held)}, which {header.architecture} does not turn by here")
    original = number(header, "rope.scaling.original_context_length")
    if not original:
        raise refusal(header, "without rope.scaling.original_context_length, up to which its short factors hold")
    table["original_max_position_embeddings"] = original
    short, long = ([one * factor for one in positive_numbers(header, name, count)] for name in FACTORS)
    return longrope(short, long, original, attention)


def longrope(short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
    """``rope_parameters`` of transformers' longrope, which divides each frequency by its factor."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def kind_of(header: Header) -> str:
    """The type of scaling; a factor without a type is linear."""
    kind = header.value(f"{header.architecture}.rope.scaling.type", "linear")
    if kind not in TYPES:
        raise contradiction(header, "rope.scaling.type", f"is {shown(kind)}; {', '.join(TYPES)} can be read")
    return str(kind)


def factor_of(header: Header) -> float:
    """The divisor of the frequencies; ``scale_linear`` is its older name."""
    names = [name for name in ("rope.scaling.factor", "rope.scale_linear") if number(header, name, float)]
    factor = above_0(header, names[0], 1.0) if names else 1.0
    if kind_of(header) != "none" or factor == 1.0:
        return factor
    if header.architecture in SCALED_APART:
        raise contradiction(header, names[0], f"is {factor}, and rope.scaling.type is none: take one of both out")
    return 1.0


def attention_factor(header: Header) -> float:
    """The factor of cosines and sines; 1 where the file states none."""
    stated = above_0(header, "rope.scaling.attn_factor", 1.0)
    if stated != 1.0 and header.architecture == TWO_BASES:
        raise contradiction(header, "rope.scaling.attn_factor", f"is {stated}; {header.architecture} has none")
    return stated


def above_0(header: Header, name: str, default: float) -> float:
    """The value of an entry about the model, ``default`` without it. Raises ConfigError unless it is above 0."""
    value = number(header, name, float)
    if value is not None and not 0 < value < math.inf:
        raise contradiction(header, name, f"is {value}; it has to be a number above 0")
    return default if value is None else float(value)


def positive_numbers(header: Header, name: str, count: int) -> list[float]:
    """The ``count`` numbers of a rope tensor. Raises ConfigError for other sizes, and unless all are above 0."""
    info = header.tensors[name]
    if info.kind not in FLOATS or len(info.shape) != 1 or info.shape[0] > MOST_FACTORS:
        raise problem_in(header.path, name, f"is {info.kind.name} {list(info.shape)}; it has to be a list of floats")
    found: list[float] = floats(info).double().tolist()
    if len(found) != count or not all(0 < one < math.inf for one in found):
        raise problem_in(header.path, name, f"is {found[:8]}; it has to be {count} numbers above 0")
    return found


# ---------------------------------------------------------------------------------------------------------------- sizes
# Checks the counts and sizes in a GGUF file's metadata: they fit each other, and the shapes of the tensors.
#
# llama.cpp divides by some of them, and a zero there ends its process. Here an error names the entry.

MOST_COUNTED: Final = 100_000
"""The highest number of layers, heads and the like in the metadata; models have hundreds."""
MOST_NUMBER: Final = 1 << 31
"""The highest width or context length in the metadata, far above any model's."""
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
PATTERN: Final = "attention.sliding_window_pattern"
RMS_EPS: Final = "attention.layer_norm_rms_epsilon"
HIDDEN: Final = "embedding_length"
INNER: Final = "feed_forward_length"
HEADS: Final = "attention.head_count"
KV_HEADS: Final = "attention.head_count_kv"
KEYS: Final = "attention.key_length"
VALUES: Final = "attention.value_length"
NEEDED: Final = ("context_length", HIDDEN, INNER, HEADS)
"""Entries that every model has."""
ABOVE_0: Final = (*NEEDED, KV_HEADS, KEYS, VALUES)
"""Entries that are above 0 where the file has them."""
OF_LAYER: Final = re.compile(r"blk\.[0-9]+\.(\w+)\.(weight|bias)")
DOUBLE_UP: Final = "phi3"
"""The architecture whose ``ffn_up`` holds the rows of ``ffn_gate``, too."""

Side = tuple[int, tuple[str, ...]]
"""The size of a tensor's dimension, and the entries that it comes from."""


def check_sizes(header: Header) -> None:
    """Raise ConfigError for counts and sizes of no model, or of another one than the file's tensors make up."""
    check_counted(header)
    heads, kv_heads = (number(header, name) or number(header, HEADS) for name in (HEADS, KV_HEADS))
    if heads % kv_heads:
        raise contradiction(
            header, HEADS, f"is {heads}; it has to be a multiple of {header.architecture}.{KV_HEADS}, {kv_heads}"
        )
    sides = sides_of_tensors(header)
    for name in (EMBEDDING, *sorted(header.tensors.keys() - {EMBEDDING})):
        if name in header.tensors:
            check_shape(header, header.tensors[name], sides)


def check_counted(header: Header) -> None:
    """Raise ConfigError if an entry about the model counts more than any model has, or more layers than exist."""
    for key in header.entries:
        if not key.startswith(f"{header.architecture}."):
            continue
        most = MOST_COUNTED if key.endswith(("_count", "_count_kv")) else MOST_NUMBER
        value = value_of(header, key)
        if value is None and not key.endswith(PATTERN):
            raise problem_in(header.path, key, "is a list; models whose layers differ cannot be read")
        if type(value) is int and not 0 <= value <= most:
            raise problem_in(header.path, key, f"is {value}; there may be 0 to {most}")
    layers = number(header, "block_count")
    held = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if not layers or layers != len(held):
        raise contradiction(header, "block_count", f"is {layers}; the file has {len(held)} layers")
    for name in NEEDED:
        if number(header, name) is None:
            raise contradiction(header, name, "is missing; every model states it")
    for name in ABOVE_0:
        if number(header, name) == 0:
            raise contradiction(header, name, "is 0; it has to be above 0")
    if not 0 < (number(header, RMS_EPS, float) or 0) < 1:
        raise contradiction(header, RMS_EPS, f"is {number(header, RMS_EPS, float)}; it has to be a number above 0")


def sides_of_tensors(header: Header) -> dict[str, tuple[Side, ...]]:
    """Part of a layer -> the sizes of its weight [out, in], or of its vector. A bias has the first of them."""
    heads = number(header, HEADS)
    kv_heads = number(header, KV_HEADS) or heads
    is_stated = number(header, KEYS) is not None
    width = number(header, KEYS) if is_stated else number(header, HIDDEN) // heads
    of_width = (KEYS,) if is_stated else (HIDDEN, HEADS)
    hidden: Side = (number(header, HIDDEN), (HIDDEN,))
    inner: Side = (number(header, INNER), (INNER,))
    ups = 2 if header.architecture == DOUBLE_UP else 1
    queries: Side = (heads * width, (HEADS, *of_width))
    keys: Side = (kv_heads * width, (KV_HEADS, HEADS, *of_width))
    joint: Side = (queries[0] + 2 * keys[0], keys[1])
    vectors = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    return {
        "attn_q": (queries, hidden),
        **dict.fromkeys(("attn_k", "attn_v"), (keys, hidden)),
        "attn_qkv": (joint, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": ((ups * inner[0], inner[1]), hidden),
        "ffn_down": (hidden, inner),
        **dict.fromkeys(vectors, (hidden,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((width, of_width),)),
    }


def check_shape(header: Header, info: TensorInfo, sides: dict[str, tuple[Side, ...]]) -> None:
    """Raise ConfigError, with the entries and the tensor, if a tensor has other sizes than the entries give it."""
    part = OF_LAYER.fullmatch(info.name)
    if info.name in (EMBEDDING, HEAD):
        wanted: tuple[Side, ...] = ((tensor_shape(header, EMBEDDING)[0], ()), sides["attn_q"][1])
    elif part is not None and part[1] in sides:
        wanted = sides[part[1]][:1] if part[2] == "bias" else sides[part[1]]
    else:
        return
    if len(info.shape) != len(wanted):
        raise problem_in(header.path, info.name, f"is {list(info.shape)}; it has to have {len(wanted)} dimensions")
    for place, (size, names) in enumerate(wanted):
        if info.shape[place] != size:
            stated = {name: number(header, name) for name in names}
            others = [f"{header.architecture}.{name} {one}" for name, one in stated.items() if one is not None]
            shape = [one for one, _ in wanted]
            said = ", ".join(others) or f"{EMBEDDING} {list(tensor_shape(header, EMBEDDING))}"
            raise problem_in(header.path, info.name, f"is {list(info.shape)}; by {said} it would be {shape}")


def tensor_shape(header: Header, name: str) -> tuple[int, ...]:
    """The shape of a tensor that no model lacks. Raises ConfigError if the file has none of this name."""
    if name not in header.tensors:
        raise refusal(header, f"without {name}, so it is no whole model")
    return header.tensors[name].shape


def sizes_in(header: Header) -> str:
    """The whole numbers about the model, for an error message."""
    about = (key for key in header.entries if key.startswith(f"{header.architecture}."))
    return ", ".join(f"{key} {header.value(key)}" for key in about if type(header.value(key)) is int)


# --------------------------------------------------------------------------------------------------------------- config
# The configuration in a GGUF file, as a table for transformers' config.json.
#
# transformers translates the entries that it knows. Entries that it leaves out although they change the numbers are
# added here: the heads' width, sliding windows, soft caps, and the scaling of rotary frequencies.

TOKEN_ID: Final = "_token_id"
"""The end of the names of entries that hold a token's id."""
TOKEN_IDS: Final = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
"""Field of the configuration -> the role of the token in the file."""
TAKEN_OVER: Final = ("vocab_size", "rope.dimension_count")
"""Entries that transformers would read otherwise than llama.cpp; the embedding and ``add_rope`` tell these values."""
ROUNDING: Final = 1e-6
"""Greatest difference between a number in the file (float32) and the same one computed here. float32 rounds numbers
below 1 by at most 3e-8, and the scales of neighbouring widths up to 512 differ by 4e-5."""
ATTENTION_CAP: Final = "attn_logit_softcapping"
SOFT_CAPS: Final = {
    ATTENTION_CAP: {"gemma2": 50.0},
    "final_logit_softcapping": {"gemma2": 30.0, "gemma3": 0.0},
}
"""Soft cap -> architecture -> llama.cpp's value where the file has none; 0 is no cap."""
SLIDING_LAYERS: Final = {"gemma2": 2, "gemma3": 6}
"""Architecture -> n: every n-th layer attends to everything if the file does not say which do."""
DEFAULT_WINDOWS: Final = {"gemma2": 4096}
"""Architecture -> the window's size in tokens where the file states none."""
BIASES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "llama": {
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    },
    **{name: {"attention_bias": ("attn_q", "attn_k", "attn_v")} for name in ("qwen3", "gemma2", "gemma3")},
}
"""Architecture -> field of the configuration -> parts whose layers have biases if it is set."""
WINDOWED: Final = ("gemma2", "gemma3", "phi3")
"""Architectures that may have sliding windows."""
LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the one size (27B) that scales its scores by hidden size / heads instead of the heads' width."""


def config_table(header: Header) -> dict[str, Any]:
    """The fields of config.json. Raises ConfigError for entries that contradict each other or cannot be translated."""
    check_sizes(header)
    table = translated(header)
    table.pop("_name_or_path", None)
    table["vocab_size"] = tensor_shape(header, EMBEDDING)[0]
    table["tie_word_embeddings"] = HEAD not in header.tensors
    for name, role in TOKEN_IDS.items():  # the classes have defaults, which may lie beyond the file's vocabulary
        table[name] = header.value(f"tokenizer.ggml.{role}{TOKEN_ID}")
    add_heads(header, table)
    add_window(header, table)
    add_gemma(header, table)
    add_biases(header, table)
    add_rope(header, table, head_width(table))
    return table


def translated(header: Header) -> dict[str, Any]:
    """The entries about the model as transformers translates them, from a file without vocabulary and tensors."""
    from transformers import AutoConfig

    with scratch_folder() as folder:
        own = {f"{header.architecture}.{name}" for name in TAKEN_OVER}
        about = [key for key in header.entries if key.startswith(f"{header.architecture}.") or key.endswith(TOKEN_ID)]
        arrays = [key for key in about if header.count(key)]
        about = [key for key in about if key not in own and key not in arrays]
        more = [vocabulary_entry(header)]
        more += [single_entry(key, value_of(header, key)) for key in arrays if value_of(header, key) is not None]
        (folder / "header.gguf").write_bytes(entries_alone(header, about, more))
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf", trust_remote_code=False)
        except Exception as error:
            raise ConfigError(f"model: {header.path} describes no model: {said(error)}; {sizes_in(header)}") from error
    found: dict[str, Any] = config.to_dict()
    return found


def vocabulary_entry(header: Header) -> bytes:
    """An entry with the vocabulary's size. Without it transformers looks for the tokens, and warns."""
    key = f"{header.architecture}.vocab_size".encode()
    size = min(tensor_shape(header, EMBEDDING)[0], MOST_NUMBER)
    return struct.pack("<Q", len(key)) + key + struct.pack("<II", UINT32, size)


def single_entry(key: str, value: Any) -> bytes:
    """An entry with the one value of an array whose values are all the same."""
    kind, packed = (UINT32, struct.pack("<I", value)) if type(value) is int else (FLOAT32, struct.pack("<f", value))
    return struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<I", kind) + packed


def entries_alone(header: Header, keys: Iterable[str], more: Sequence[bytes] = ()) -> bytes:
    """A GGUF file of these entries and the architecture; ``more`` are further entries, packed already."""
    raw = header.bytes()
    entries = [header.entries[key] for key in ("general.architecture", *keys)]
    kept = [*(raw[entry.start : entry.end] for entry in entries), *more]
    return MAGIC + struct.pack("<IQQ", VERSIONS[-1], 0, len(kept)) + b"".join(kept)


def add_heads(header: Header, table: dict[str, Any]) -> None:
    """Add numbers and widths of heads, which llama.cpp derives from each other where the file leaves some out."""
    heads = table["num_attention_heads"]
    table["num_key_value_heads"] = number(header, "attention.head_count_kv") or heads
    width = number(header, "attention.key_length") or table["hidden_size"] // heads
    if table.get("head_dim") is not None or width != table["hidden_size"] // heads:
        table["head_dim"] = width
    values = number(header, "attention.value_length") or table["hidden_size"] // heads
    if values != width:
        raise contradiction(header, "attention.value_length", f"is {values}; it has to be the keys' {width}")
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        if number(header, name) not in (None, width):
            raise contradiction(header, name, f"is {number(header, name)}; it has to be the others' {width}")
    for name, wanted in (("rope.dimension_count_swa", width), ("embedding_length_out", table["hidden_size"])):
        if number(header, name) not in (None, wanted):
            raise contradiction(header, name, f"is {number(header, name)}; it has to be {wanted}")
    scale = number(header, "attention.scale", float)
    if scale and abs(scale - width**-0.5) > ROUNDING:
        raise contradiction(header, "attention.scale", f"is {scale}, which cannot be taken into account here")


def head_width(table: dict[str, Any]) -> int:
    """Numbers of a head, by the fields of config.json."""
    return int(table.get("head_dim") or table["hidden_size"] // max(1, table["num_attention_heads"]))


def add_window(header: Header, table: dict[str, Any]) -> None:
    """Add the sliding window, and the layers that have it."""
    window = number(header, "attention.sliding_window")
    if window and header.architecture not in WINDOWED:
        raise contradiction(header, "attention.sliding_window", f"is {window}; {header.architecture} has none")
    if header.architecture not in SLIDING_LAYERS:
        if f"{header.architecture}.{PATTERN}" in header.entries:
            raise contradiction(header, PATTERN, f"is there; {header.architecture} has none")
        if window:
            table["sliding_window"] = window
        return
    usual = DEFAULT_WINDOWS.get(header.architecture, 0) if window is None else window
    slides = sliding_layers(header, table["num_hidden_layers"]) if usual else [False] * table["num_hidden_layers"]
    if usual and not any(slides):
        raise contradiction(header, PATTERN, "leaves no layer with a window, and attention.sliding_window is one")
    table["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if usual:
        table["sliding_window"] = usual


def sliding_layers(header: Header, layers: int) -> list[bool]:
    """Whether each layer has the sliding window: all but every n-th, or as a list in the file says."""
    key = f"{header.architecture}.{PATTERN}"
    if header.count(key):
        found = numbers(header, key)
        if found is None or len(found) < layers:
            raise problem_in(header.path, key, f"is a list of {header.count(key)}; the model has {layers} layers")
        return [bool(one) for one in found[:layers]]
    every = number(header, PATTERN)
    every = SLIDING_LAYERS[header.architecture] if every is None else every
    # The last of every n layers attends to everything; 0 gives every layer the window.
    return [every == 0 or layer % every < every - 1 for layer in range(layers)]


def add_gemma(header: Header, table: dict[str, Any]) -> None:
    """Add llama.cpp's values of soft caps and of the scaling of scores."""
    for name, usual in SOFT_CAPS.items():
        stated = number(header, name, float)
        if header.architecture not in usual:
            if stated:
                raise contradiction(header, name, f"is {stated}; {header.architecture} has none")
            continue
        cap = usual[header.architecture] if stated is None else stated
        if cap < 0 or (cap == 0 and name == ATTENTION_CAP):
            raise contradiction(header, name, f"is {cap}; it has to be a number above 0")
        table[name] = cap or None
    if header.architecture in LARGEST_GEMMA:
        largest = table["num_hidden_layers"] == LARGEST_GEMMA[header.architecture]
        per_head = table["hidden_size"] // max(1, table["num_attention_heads"])
        table["query_pre_attn_scalar"] = per_head if largest else head_width(table)


def add_biases(header: Header, table: dict[str, Any]) -> None:
    """Set the fields for biases from the tensors that exist; biases that some layers lack are zeros."""
    for field, parts in BIASES.get(header.architecture, {}).items():
        table[field] = any(name.endswith(f"{part}.bias") for name in header.tensors for part in parts)
