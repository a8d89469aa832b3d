"""Train the embedded demo pair: a 16-layer Llama target and a small draft model distilled from it.

    python scripts/train_demo.py --work build/demo    # corpus, tokenizer, target, draft, checkpoints, prompts, card

The two training runs resume from their last checkpoint. The corpus is the source of the running interpreter's
standard library: the file names and hashes that the shipped pair was trained on stand in
``penstock/demo/corpus.sha256``, and ``--check-corpus`` refuses any other. ``--install`` puts the result into the
package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from penstock.noise import gumbel

PACKAGE_DEMO = Path(__file__).resolve().parent.parent / "penstock" / "demo"
VOCABULARY = 4096
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>"]
SEQUENCE = 512  # tokens per training sequence
HELD_OUT_PERCENT = 4


@dataclass(frozen=True)
class Recipe:
    """One training run. Learning rates: Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    tokens: int  # seen in training, in all
    batch_sequences: int
    matrix_lr: float
    embedding_lr: float
    decay_share: float = 0.45  # the last part of the run, over which both rates fall linearly to zero
    seed: int = 0


TARGET = Recipe(192, 512, 16, 6, 2, tokens=10_000_000, batch_sequences=8, matrix_lr=0.02, embedding_lr=4e-3)
DRAFT = Recipe(192, 512, 2, 6, 2, tokens=5_000_000, batch_sequences=8, matrix_lr=0.02, embedding_lr=2e-3, seed=1)


# ---------------------------------------------------------------------------------------------------------- corpus


def corpus_files() -> list[Path]:
    """Source files of the running interpreter's standard library, sorted; site-packages are not part of it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (p for p in root.rglob("*.py") if "site-packages" not in p.parts and "__pycache__" not in p.parts)
    return sorted(p for p in found if 200 < p.stat().st_size < 600_000 and is_utf8(p))


def is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def is_held_out(name: str) -> bool:
    """A file's split depends on its name alone, so it is the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def write_corpus_manifest(work: Path) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    lines = [f"# Python {platform.python_version()} standard library; '*' marks the held-out files"]
    for path in corpus_files():
        name = path.relative_to(root).as_posix()
        mark = "*" if is_held_out(name) else " "
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()} {mark}{name}")
    (work / "corpus.sha256").write_text("\n".join(lines) + "\n")


def split_texts() -> tuple[list[str], list[str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: tuple[list[str], list[str]] = ([], [])
    for path in corpus_files():
        splits[is_held_out(path.relative_to(root).as_posix())].append(path.read_text(encoding="utf-8"))
    return splits


def check_corpus(work: Path) -> None:
    """Raise if the running interpreter's library is not the one that the shipped pair was trained on."""
    shipped = (PACKAGE_DEMO / "corpus.sha256").read_text().splitlines()
    here = (work / "corpus.sha256").read_text().splitlines()
    different = sorted(set(shipped[1:]) ^ set(here[1:]))
    if different:
        raise SystemExit(f"corpus differs from {shipped[0]!r} in {len(different)} lines, first: {different[0]!r}")


# ------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str], path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tokenizer.save(str(path))


def encode_split(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All files one after the other, each as <|bos|> text <|eos|>."""
    parts = [[*encoding.ids, EOS] for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate([np.asarray(part, dtype=np.uint16) for part in parts])


# -------------------------------------------------------------------------------------------------------- training


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers." in n)]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=recipe.embedding_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batch_at(step: int, data: np.ndarray, recipe: Recipe) -> torch.Tensor:
    """[B, SEQUENCE + 1] token ids. Sequences are shuffled anew each epoch, with a random offset; a function of step."""
    per_epoch = len(data) // SEQUENCE - 1
    ids = []
    for i in range(step * recipe.batch_sequences, (step + 1) * recipe.batch_sequences):
        epoch, position = divmod(i, per_epoch)
        generator = np.random.default_rng([recipe.seed, epoch])
        offset = int(generator.integers(SEQUENCE))
        start = int(generator.permutation(per_epoch)[position]) * SEQUENCE + offset
        ids.append(data[start : start + SEQUENCE + 1].astype(np.int64))
    return torch.from_numpy(np.stack(ids))


def rate_at(step: int, steps: int, recipe: Recipe) -> float:
    warm = min(1.0, (step + 1) / 60)
    left = (steps - step) / (steps * recipe.decay_share)
    return warm * min(1.0, left)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def train(
    recipe: Recipe,
    model: PreTrainedModel,
    data: np.ndarray,
    held: np.ndarray,
    work: Path,
    name: str,
    teacher: LlamaForCausalLM | None,
):
    """Cross-entropy on the corpus, or, with a teacher, the KL divergence from the teacher's distributions to ours."""
    if teacher is not None:
        model.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    optimizers = build_optimizers(model, recipe)
    base_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    steps = recipe.tokens // (recipe.batch_sequences * SEQUENCE)
    checkpoint = work / f"{name}.checkpoint.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = saved["step"]
        print(f"{name}: resuming at step {first} of {steps}", flush=True)
    started, mean = time.monotonic(), 0.0
    for step in range(first, steps):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, base_rates, strict=True):
            group["lr"] = base * rate_at(step, steps, recipe)
        ids = batch_at(step, data, recipe)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        logits = logits_of(model, inputs)
        if teacher is None:
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
        else:
            with torch.no_grad():
                wanted = logits_of(teacher, inputs).log_softmax(-1).reshape(-1, VOCABULARY)
            mine = logits.log_softmax(-1).reshape(-1, VOCABULARY)
            loss = F.kl_div(mine, wanted, log_target=True, reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if mean == 0.0 else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 20 == 0:
            speed = (step + 1 - first) * recipe.batch_sequences * SEQUENCE / (time.monotonic() - started)
            print(f"{name}: step {step + 1}/{steps} loss {mean:.3f} {speed:.0f} tokens/s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1}
            temporary = checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.replace(checkpoint)
        if (step + 1) % 400 == 0:
            print(f"{name}: held-out loss {held_out_loss(model, held[: 40 * SEQUENCE]):.3f}", flush=True)
    return model


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held: np.ndarray) -> float:
    total, count = 0.0, 0
    for start in range(0, len(held) - SEQUENCE - 1, SEQUENCE):
        ids = torch.from_numpy(held[start : start + SEQUENCE + 1].astype(np.int64))[None]
        logits = logits_of(model, ids[:, :-1])
        total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        count += SEQUENCE
    return total / count


# ---------------------------------------------------------------------------------------------------------- export


def export(model: PreTrainedModel, tokenizer_file: Path, folder: Path) -> None:
    """A Hugging Face checkpoint in bf16 with its tokenizer and generation config (T = 1: see the model card)."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=1.0
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        model_max_length=2048,
    ).save_pretrained(folder)


def write_prompts(tokenizer: Tokenizer, file: Path) -> None:
    """A few prompts of our own, then one from each held-out file, cut after the head of a function; shuffled by name.

    The files in encodings/ are left out: they are nearly copies of one another, so holding some out means little.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    entries = [{"prompt": text, "source": "penstock"} for text in OWN_PROMPTS]
    names = [path.relative_to(root).as_posix() for path in corpus_files()]
    held_out = [name for name in names if is_held_out(name) and not name.startswith("encodings/")]
    for name in sorted(held_out, key=lambda name: hashlib.sha256(f"prompt {name}".encode()).digest()):
        text = prompt_from((root / name).read_text(encoding="utf-8"))
        if text is not None and 48 <= len(tokenizer.encode(text).ids) <= 256:
            entries.append({"prompt": text, "source": f"Python {platform.python_version()}, {name} (held out)"})
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def prompt_from(source: str, lines_before: int = 16) -> str | None:
    """Some lines up to and including the head of the function nearest to the middle of the file."""
    lines = source.splitlines()
    heads = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and line.rstrip().endswith(":")]
    heads = [i for i in heads if i >= lines_before]
    if not heads:
        return None
    head = min(heads, key=lambda i: abs(i - len(lines) // 2))
    return "\n".join(lines[head - lines_before : head + 1]) + "\n"


OWN_PROMPTS = (
    "import json\nimport os\n\n\ndef read_config(path):\n",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "class TestPath(unittest.TestCase):\n    def setUp(self):\n",
)


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held: np.ndarray, temperature: float
) -> dict[int, float]:
    """How often the target's token is among the draft's best 1, 4 and 16 candidates, ranked with the same noise."""
    hits, count = dict.fromkeys((1, 4, 16), 0), 0
    for start in range(0, len(held) - SEQUENCE, 4 * SEQUENCE):
        ids = torch.from_numpy(held[start : start + SEQUENCE].astype(np.int64))[None]
        wanted, mine = (model(ids).logits[0].double() for model in (target, draft))
        if temperature > 0:
            noise = torch.stack([torch.from_numpy(gumbel(0, start, p, VOCABULARY).copy()) for p in range(SEQUENCE)])
            wanted, mine = (logits.log_softmax(-1) / temperature + noise for logits in (wanted, mine))
        picked = wanted.argmax(-1, keepdim=True)
        ranked = mine.topk(16, dim=-1).indices
        for k in hits:
            hits[k] += int((ranked[:, :k] == picked).any(-1).sum())
        count += SEQUENCE
    return {k: hit / count for k, hit in hits.items()}


@torch.no_grad()
def concentration(draft: LlamaForCausalLM, held: np.ndarray) -> float:
    """How much the draft's confidence varies: alpha + beta of the Beta distribution with its mean and variance."""
    starts = range(0, len(held) - SEQUENCE, 4 * SEQUENCE)
    ids = (torch.from_numpy(held[start : start + SEQUENCE].astype(np.int64))[None] for start in starts)
    chance = torch.cat([draft(one).logits[0].double().softmax(-1).amax(-1) for one in ids])
    mean, variance = chance.mean().item(), chance.var().item()
    return mean * (1 - mean) / variance - 1


def write_card(work: Path, held: np.ndarray, training_tokens: int) -> None:
    """The model card, every figure in it measured now."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(work / name, dtype=torch.float32).eval() for name in ("target", "draft")
    )
    rows = []
    for temperature in (0.0, 1.0):
        shares = agreement(target, draft, held, temperature)
        rows.append(f"| {temperature:g} | " + " | ".join(f"{shares[k]:.1%}" for k in (1, 4, 16)) + " |")
    (work / "README.md").write_text(
        CARD.format(
            python=platform.python_version(),
            training_tokens=training_tokens,
            held_tokens=len(held),
            target_parameters=target.num_parameters() / 1e6,
            draft_parameters=draft.num_parameters() / 1e6,
            target_seen=TARGET.tokens / 1e6,
            draft_seen=DRAFT.tokens / 1e6,
            target_loss=held_out_loss(target, held),
            draft_loss=held_out_loss(draft, held),
            agreement="\n".join(rows),
            concentration=concentration(draft, held),
        )
    )


CARD = """---
license: other
license_name: psf-2.0
language: [code]
library_name: transformers
---

# The Penstock demo pair

Two Llama-architecture models that write something like Python. They exist so that Penstock can be tried without a
download, and for tests: a target of 16 layers to cut into stages, and a draft model with the same tokenizer. They are
far too small to be useful for anything else.

| | target | draft |
| --- | --- | --- |
| layers x width | 16 x 192 | 2 x 192 |
| parameters | {target_parameters:.1f}M | {draft_parameters:.1f}M |
| tokens seen in training | {target_seen:.0f}M | {draft_seen:.0f}M |
| held-out loss (nats per token) | {target_loss:.2f} | {draft_loss:.2f} |

**Data.** Source files of the Python {python} standard library, {training_tokens:,} tokens; 4% of the files
({held_tokens:,} tokens) are held out. `corpus.sha256` names every file with its hash and marks the held-out ones.
Some of these, in encodings/ above all, are near copies of files in the training part, which flatters the figures below.
Byte-level BPE of 4,096 tokens trained on the same files. Trained on sequences of 512 tokens: beyond that the text
gets worse, though 2,048 positions are accepted.

**Training.** `python scripts/train_demo.py` in the project's repository, on two CPU cores, in bfloat16 autocast. The
target is trained on the files, the draft distilled from it (KL divergence of the next-token distributions).

**Agreement.** How often the target's token is among the draft's best k candidates on held-out text; at T = 1 both rank
with the same Gumbel noise, as Penstock does.

| T | top 1 | top 4 | top 16 |
| --- | --- | --- | --- |
{agreement}

**Confidence.** The draft's greedy top-1 chance varies from token to token like a Beta distribution with
alpha + beta = {concentration:.2f}. The synthetic drafter varies its confidence by a like amount.

**Learned drafters** that read the target's own states lie in `drafters`, with a card of their own.

Greedy decoding of a model this small often falls into a loop; `generation_config.json` therefore samples at T = 1.

**Licence.** The Python standard library is under the PSF licence (`LICENSE.PSF`); prompts.jsonl quotes held-out files
from it. The weights are offered under the same terms.
"""


def install(work: Path) -> None:
    """Copy what the package ships."""
    for name in ("target", "draft"):
        shutil.copytree(work / name, PACKAGE_DEMO / name, dirs_exist_ok=True)
    for name in ("README.md", "corpus.sha256", "prompts.jsonl"):
        shutil.copy(work / name, PACKAGE_DEMO / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints and intermediate files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-corpus", action="store_true", help="refuse a corpus other than the shipped pair's")
    parser.add_argument("--install", action="store_true", help="put the result into penstock/demo")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)

    write_corpus_manifest(work)
    if args.check_corpus:
        check_corpus(work)
    training_texts, held_texts = split_texts()
    tokenizer_file = work / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(training_texts, tokenizer_file)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    data, held = encode_split(tokenizer, training_texts), encode_split(tokenizer, held_texts)
    counts = f"{len(training_texts)} files, {len(data):,} tokens; held out {len(held_texts)}, {len(held):,}"
    print(f"corpus: {counts}", flush=True)

    export(train(TARGET, build_model(TARGET), data, held, work, "target", None), tokenizer_file, work / "target")
    teacher = LlamaForCausalLM.from_pretrained(work / "target", dtype=torch.float32).eval()
    export(train(DRAFT, build_model(DRAFT), data, held, work, "draft", teacher), tokenizer_file, work / "draft")
    write_prompts(tokenizer, work / "prompts.jsonl")
    write_card(work, held, len(data))
    if args.install:
        install(work)


if __name__ == "__main__":
    main()
