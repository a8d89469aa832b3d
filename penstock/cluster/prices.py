"""Prices of models: parameters to read, operations per row, attention by context, bytes per row on a link.

A pass over a batch reads every weight once and does two operations (multiply, add) per weight and row. Attention takes
four per element of a row's queries and token that the row sees (scores, then the weighted sum of values). The keys and
values of every token that any row of the batch sees are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from penstock.config import check, check_positive


@dataclass(frozen=True, kw_only=True)
class ModelPrice:
    """A model's sizes; ``as_model`` in a cluster file names one of PRICES or holds these fields. Raises FieldError."""

    layers: int
    hidden_size: int
    layer_parameters: int
    """Weights of one layer that a pass reads; in a mixture of experts, only those that a batch touches."""
    head_parameters: int
    """Final norm and output projection, read by the last stage."""
    embedding_parameters: int = 0
    """The input embedding: memory on the first device, but no time, since a pass looks up a line per row."""
    bytes_per_parameter: float = 2.0
    activation_bytes: float = 2.0
    """Bytes of one element of a hidden state on a link."""
    attention_size: int | None = None
    """Elements of a row's queries in one layer, all heads together; None: hidden_size; 0: a model without attention."""
    key_value_size: int | None = None
    """Elements of a token's keys in one layer, and of its values; None: attention_size (every head has its own)."""
    cache_bytes: float | None = None
    """Bytes of one element of the KV cache; None: activation_bytes."""

    def __post_init__(self) -> None:
        check_positive(self, "layers", "hidden_size", "layer_parameters", "bytes_per_parameter", "activation_bytes")
        check_positive(self, "head_parameters", "embedding_parameters", or_zero=True)
        check_positive(self, "attention_size", "key_value_size", or_zero=True)
        check_positive(self, "cache_bytes")

    def weight_bytes(self, layers: int, *, head: bool) -> float:
        """Bytes of weights that a device with ``layers`` layers reads per pass."""
        return self.read_parameters(layers, head=head) * self.bytes_per_parameter

    def row_operations(self, layers: int, *, head: bool) -> float:
        """Floating-point operations per row on a device with ``layers`` layers."""
        return 2.0 * self.read_parameters(layers, head=head)

    def read_parameters(self, layers: int, *, head: bool) -> int:
        return layers * self.layer_parameters + (self.head_parameters if head else 0)

    def pair_operations(self, layers: int) -> float:
        """Floating-point operations of attention per pair of a row and a token that it sees."""
        return 4.0 * layers * self._attention_size

    def slot_bytes(self, layers: int) -> float:
        """Bytes of one token's keys and values on a device with ``layers`` layers."""
        elements = self._attention_size if self.key_value_size is None else self.key_value_size
        return 2.0 * layers * elements * (self.activation_bytes if self.cache_bytes is None else self.cache_bytes)

    @property
    def _attention_size(self) -> int:
        return self.hidden_size if self.attention_size is None else self.attention_size

    @property
    def embedding_bytes(self) -> float:
        return self.embedding_parameters * self.bytes_per_parameter

    @property
    def row_bytes(self) -> float:
        """Bytes of one row's hidden state between two stages."""
        return self.hidden_size * self.activation_bytes


def llama(
    *, layers: int, hidden: int, intermediate: int, key_value: int, vocabulary: int, bits: int, tied: bool = False
) -> ModelPrice:
    """Price a Llama-shaped model from its config.json.

    A layer: query and output projection (hidden x hidden), key and value (hidden x key_value), gate, up and down
    (hidden x intermediate), two norms. ``tied``: the head is the embedding, held once where one device has both.
    ``bits=4``: blocks of 64 weights share a 32-bit scale, 4.5 bits a weight (Dettmers et al., QLoRA, section 3), and
    hidden states have 16 bits. Head and embedding count likewise, though bitsandbytes leaves them in 16 bits.
    """
    check(bits in (4, 16, 32), "bits", bits, "4, 16 or 32")
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    return ModelPrice(
        layers=layers,
        hidden_size=hidden,
        layer_parameters=attention + 3 * hidden * intermediate + 2 * hidden,
        head_parameters=vocabulary * hidden + hidden,
        embedding_parameters=0 if tied else vocabulary * hidden,
        bytes_per_parameter=(4.5 if bits == 4 else bits) / 8,
        activation_bytes=max(bits, 16) / 8,
        key_value_size=key_value,
    )


def eagle(target: ModelPrice) -> ModelPrice:
    """Price an EAGLE head of a Llama-shaped target, in fp16 (Li et al., EAGLE, section 3; EAGLE-2 has the same).

    A layer like the target's behind ``fc`` (2 hidden -> hidden), whose bias makes up for the input norm that the layer
    lacks; then a copy of the target's output projection, without a norm, and of its embedding.
    """
    hidden = target.hidden_size
    return ModelPrice(
        layers=1,
        hidden_size=hidden,
        layer_parameters=target.layer_parameters + 2 * hidden * hidden,
        head_parameters=target.head_parameters - hidden,
        embedding_parameters=target.embedding_parameters,
        attention_size=target.attention_size,
        key_value_size=target.key_value_size,
    )


def medusa_head(target: ModelPrice) -> ModelPrice:
    """Price one Medusa head of a Llama-shaped target, in fp16 (Cai et al., Medusa, section 2.1.1).

    A residual block (hidden x hidden and a bias) and an output projection of its own. Each head drafts one depth, as a
    pass of the engine's drafter does, so that one head is the price of a pass.
    """
    hidden = target.hidden_size
    return ModelPrice(
        layers=1,
        hidden_size=hidden,
        layer_parameters=hidden * hidden + hidden,
        head_parameters=target.head_parameters - hidden,
        attention_size=0,
    )


# meta-llama/Llama-3.1-70B config.json: 80 x 855,654,400 + 2 x 1,050,673,152 + 8,192 = 70.55e9 parameters.
llama_70b = partial(llama, layers=80, hidden=8192, intermediate=28672, key_value=1024, vocabulary=128256)
# meta-llama/Llama-2-7b config.json: 32 x 202,383,360 + 2 x 131,072,000 + 4,096 = 6.738e9 parameters.
llama_7b = partial(llama, layers=32, hidden=4096, intermediate=11008, key_value=4096, vocabulary=32000)
# meta-llama/Llama-2-13b config.json: 40 x 317,204,480 + 2 x 163,840,000 + 5,120 = 13.016e9 parameters.
llama_13b = partial(llama, layers=40, hidden=5120, intermediate=13824, key_value=5120, vocabulary=32000)

PRICES: Final[dict[str, ModelPrice]] = {
    "llama-3.1-70b-fp32": llama_70b(bits=32),
    "llama-3.1-70b-bf16": llama_70b(bits=16),
    "llama-2-7b-fp16": llama_7b(bits=16),
    "llama-2-7b-4bit": llama_7b(bits=4),
    "llama-2-13b-4bit": llama_13b(bits=4),
    # meta-llama/Llama-3.2-1B config.json: 16 x 60,821,504 + 262,668,288 (tied) + 2,048 = 1.236e9 parameters.
    "llama-3.2-1b-fp32": llama(
        layers=16, hidden=2048, intermediate=8192, key_value=512, vocabulary=128256, bits=32, tied=True
    ),
    # TinyLlama/TinyLlama_v1.1 config.json: 22 x 44,044,288 + 2 x 65,536,000 + 2,048 = 1.100e9 parameters.
    "tinyllama-1.1b-fp16": llama(layers=22, hidden=2048, intermediate=5632, key_value=256, vocabulary=32000, bits=16),
    # JackFram/llama-160m config.json: 12 x 9,438,720 + 2 x 24,576,000 + 768 = 0.162e9 parameters.
    "llama-160m-fp16": llama(layers=12, hidden=768, intermediate=3072, key_value=768, vocabulary=32000, bits=16),
    # 202,383,360 + 2 x 4,096 x 4,096 = 235,937,792, and the target's 2 x 131,072,000 (yuhuili/EAGLE-llama2-chat-7B).
    "eagle-llama-2-7b-fp16": eagle(llama_7b(bits=16)),
    # 317,204,480 + 2 x 5,120 x 5,120 = 369,633,280, and the target's 2 x 163,840,000 (yuhuili/EAGLE-llama2-chat-13B).
    "eagle-llama-2-13b-fp16": eagle(llama_13b(bits=16)),
    # 855,654,400 + 2 x 8,192 x 8,192 = 989,872,128, and 2 x 1,050,673,152 (yuhuili/EAGLE-LLaMA3-Instruct-70B).
    "eagle-llama-3.1-70b-bf16": eagle(llama_70b(bits=16)),
    # 4,096 x 4,096 + 4,096 + 131,072,000 = 147,853,312 (FasterDecoding/medusa-vicuna-7b-v1.3, one of its heads).
    "medusa-head-llama-2-7b-fp16": medusa_head(llama_7b(bits=16)),
}
"""The models that cluster files may name, at the precision in the name."""
