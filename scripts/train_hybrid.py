"""Train a small model with gated delta nets, as Qwen3.5 has them, and SPD's module for it: SPD on a target of its kind.

    python scripts/train_hybrid.py --work build/hybrid [--threads N]       # resumes where it stopped

The model is distilled from the demo target over the files that this was trained on, with its embedding and tokenizer.
Three of four layers are linear attention. The module is what ``penstock train spd`` makes of a fortieth of the files.
Nothing of it is shipped: ``benchmarks.papers.spd_hybrid`` takes the folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from train_demo import (
    BOS,
    EOS,
    PACKAGE_DEMO,
    PAD,
    VOCABULARY,
    Recipe,
    encode_split,
    export,
    held_out_loss,
    split_texts,
    train,
)
from train_demo_drafters import COMMON, check_corpus, write_data
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.run import run_train

HYBRID: Final = Recipe(192, 512, 8, 6, 2, tokens=600_000, batch_sequences=4, matrix_lr=0.02, embedding_lr=2e-3)
EVERY: Final = 40
"""The module is trained on one in so many of the training files, in the order of their names."""
KINDS: Final = [*["linear_attention"] * 3, "full_attention"]
SPD: Final[dict[str, Any]] = {
    "batch_tokens": 1024,
    "learning_rate": 1.5e-3,
    "draft_vocab_size": 3072,
    "spec_layers": 1,
    "stages": (4, 8),
}


def build_hybrid(recipe: Recipe) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    width = recipe.hidden_size // recipe.heads
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        layer_types=KINDS * (recipe.layers // len(KINDS)),
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=width,
        linear_num_key_heads=recipe.heads,
        linear_num_value_heads=recipe.heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_conv_kernel_dim=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/hybrid"), help="data, states, target and drafter")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    check_corpus(args.work)
    if not (args.work / "target").is_dir():
        tokenizer_file = PACKAGE_DEMO / "target" / "tokenizer.json"
        data, held = (encode_split(Tokenizer.from_file(str(tokenizer_file)), texts) for texts in split_texts())
        teacher = LlamaForCausalLM.from_pretrained(PACKAGE_DEMO / "target", dtype=torch.float32).eval()
        hybrid = train(HYBRID, build_hybrid(HYBRID), data, held, args.work, "hybrid", teacher)
        print(f"held-out loss {held_out_loss(hybrid, held):.2f}, the demo target's {held_out_loss(teacher, held):.2f}")
        export(hybrid, tokenizer_file, args.work / "target")
    files = write_data(args.work / "data", EVERY)
    run_train(
        TrainOptions(
            kind="spd",
            model=str(args.work / "target"),
            data=(files,),
            output=args.work / "spd",
            **COMMON,
            **SPD,
        )
    )


if __name__ == "__main__":
    main()
