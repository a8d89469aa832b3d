"""Small tokenizers of the kinds that checkpoints have, built here so that no test needs a download."""

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from penstock.text.tokenizer import Tokenizer

CORPUS = [
    "The water falls through the penstock and turns the wheel.",
    "def flow(rows):\n    return [row for row in rows if row]\n",
    "Größe, façade, naïve: 水車が回る。 Ω ≈ 3 €, 🙂👩‍🔧!",
] * 3


def wrapped(backend: Backend, *special: str) -> Tokenizer:
    backend.add_special_tokens([AddedToken(one, special=True) for one in ("<s>", "</s>", *special)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def byte_level(*special: str) -> Tokenizer:
    """GPT-2's kind (Llama 3, Qwen, DeepSeek): tokens are byte strings, which may cut characters anywhere."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return wrapped(backend, *special)


def byte_fallback() -> Tokenizer:
    """Sentencepiece's kind (Llama 2, Mistral, Gemma): ▁ for spaces, characters out of vocabulary as <0xHH> runs."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        *"abcdefghijklmnopqrstuvwxyzT.,:()[]\n",
        "é",
        "\ufffd",
        "▁▁",
        "th",
        "the",
        "▁t",
        "▁the",
        "ing",
        "水車",
    ]
    merges = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "t"), ("▁", "the")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend)


def metaspace() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )
    return wrapped(backend)


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "the", "water", "do", "n't", ".", "##s", "##ing", "'", "##m", "a", "##水"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece()
    return wrapped(backend)


BUILDERS = [byte_level, byte_fallback, metaspace, word_piece]


@pytest.fixture(scope="session", params=BUILDERS, ids=lambda build: build.__name__)
def tokenizer(request) -> Tokenizer:
    return request.param()


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    return byte_fallback()
