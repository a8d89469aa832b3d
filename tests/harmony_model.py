"""A small model that has learned one answer of gpt-oss by heart: an analysis and a final message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.checkpoints import make_checkpoint
from tests.gguf_files import CONTROL, NORMAL, THETA, describe, finish, tensors_of

SPECIAL: Final = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"),
)
TOKENS: Final = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "qx")
"""The last one is there because a byte-level tokenizer has merges."""
QUESTION: Final = "2+2"
THOUGHT: Final = "two"
ANSWER: Final = "four"
PROMPT: Final = f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant"
REPLY: Final = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"
)
TEMPLATE: Final = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.role == 'assistant' %}<|channel|>final"
    "{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ENDS: Final = ("<|return|>", "<|endoftext|>", "<|call|>")
"""The ends that gpt-oss's generation_config.json names."""
MOST_STEPS: Final = 600
SURE: Final = 1.0
"""How far the logit of each learned token is above the others before learning stops."""


def tokenizer() -> Any:
    inner = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(TOKENS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>"
    )


def make_folder(folder: Path, architecture: str = "gpt_oss") -> Path:
    """A checkpoint as Hugging Face's libraries write it."""
    known = tokenizer()
    sizes = {"vocab_size": len(TOKENS), "intermediate_size": 64, "num_hidden_layers": 2, "rope_theta": THETA}
    own = {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2}
    make_checkpoint(folder, architecture, **sizes, **(own if architecture == "gpt_oss" else {}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    learn(model, known.encode(PROMPT), known.encode(REPLY))
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = known.convert_tokens_to_ids(list(ENDS))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def learn(model: Any, prompt: list[int], reply: list[int]) -> None:
    """Train until every token of the reply is by far the best one behind those before it."""
    ids = torch.tensor([prompt + reply])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(MOST_STEPS):
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        wanted = torch.tensor(reply)
        best = logits.gather(1, wanted[:, None])[:, 0]
        others = logits.scatter(1, wanted[:, None], -torch.inf).max(1).values
        if (best - others).min() > SURE:
            return
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted).backward()
        optimizer.step()
    raise AssertionError("the reply was not learned")


def make_file(folder: Path) -> Path:
    """A GGUF file with gpt-oss's special tokens, all control tokens, whose only named end is ``<|return|>``."""
    model = AutoModelForCausalLM.from_pretrained(make_folder(folder / "checkpoint", "llama"), dtype=torch.float32)
    path = folder / "harmony.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, model.config, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["q x"])
    writer.add_bos_token_id(TOKENS.index("<|startoftext|>"))
    writer.add_eos_token_id(TOKENS.index("<|return|>"))
    writer.add_chat_template(TEMPLATE)
    for name, data in tensors_of(model, "llama").items():
        writer.add_tensor(name, data)
    finish(writer)
    return path
