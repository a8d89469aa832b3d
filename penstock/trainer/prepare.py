"""What a run begins with: its data, the target's hidden states, a vocabulary, a fresh drafter."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.trainer.data.cache import StateCache, Wanted, fill, identity, key_of
from penstock.trainer.data.corpus import Corpus, Document, make_corpus, read_documents
from penstock.trainer.data.vocabulary import Vocabulary, choose
from penstock.trainer.kinds.base import Drafter, Start
from penstock.trainer.options import BELONGS
from penstock.trainer.progress import progress, say
from penstock.trainer.setup import FRESH, Setup


def read_corpus(setup: Setup) -> Corpus:
    options = setup.options
    tokenizer = load_tokenizer(setup.target.path)
    documents: Sequence[Document] = read_documents(options.data)
    if options.regenerate:
        documents = regenerated(setup, documents, tokenizer)
    corpus = make_corpus(documents, tokenizer, options.max_length)
    sides = [sum(corpus.samples[i].lessons for i in side) for side in (corpus.training, corpus.held_out)]
    say(
        setup.console,
        f"data: {len(documents)} documents, {len(corpus.samples)} sequences; tokens to learn {sides[0]:,}, "
        f"held out {sides[1]:,}",
    )
    return corpus


def regenerated(setup: Setup, documents: Sequence[Document], tokenizer: Tokenizer) -> list[Document]:
    from penstock.engine.llm import LLM
    from penstock.trainer.data.regenerate import key_of as answers_key
    from penstock.trainer.data.regenerate import regenerate

    options = setup.options
    key = answers_key(documents, identity(setup.target), options.max_length, options.seed)
    file = setup.work / f"answers-{key}.jsonl"
    written: list[Document] = []
    with progress(setup.console) as bar:
        task = bar.add_task("the target's own answers", total=len(documents))
        engine: dict[str, Any] = {"dtype": options.dtype, "device": options.device, "max_model_len": options.max_length}
        with LLM(str(setup.target.source), **engine) as llm:
            for written in regenerate(documents, llm, file, options.max_length, options.seed):
                bar.update(task, completed=len(written))
    return written


def cached_states(setup: Setup, corpus: Corpus) -> StateCache:
    options, target = setup.options, setup.target
    layers = tuple(sorted({*setup.kind.reads(options, target), target.num_layers}))
    wanted = Wanted(target, layers, options.max_length, options.dtype)
    folder = setup.work / "states" / key_of(wanted, corpus)
    with progress(setup.console) as bar:
        task = bar.add_task("the target's hidden states", total=sum(map(len, corpus.samples)))
        for done in fill(folder, corpus, wanted, options.device):
            bar.update(task, completed=done)
    return StateCache(folder, corpus.samples, layers)


def choose_vocabulary(setup: Setup, corpus: Corpus) -> Vocabulary:
    """Says how much of the data it covers where it is not the whole of the target's."""
    size, known = setup.options.draft_vocab_size, setup.target.vocab_size
    if size is None:
        return Vocabulary(None, known)
    vocabulary = choose(corpus, size, known)
    if vocabulary.ids_v is not None:
        cover = f"{vocabulary.training_share:.2%} of those to learn, {vocabulary.held_out_share:.2%} of those held out"
        say(setup.console, f"draft vocabulary: the {vocabulary.size} most frequent tokens cover {cover}")
    return vocabulary


def fresh_drafter(setup: Setup, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Drafter:
    """The untrained drafter of a run, written once: when it is resumed it begins with the same."""
    folder = setup.work / f"{FRESH}{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]}"
    if not folder.is_dir():
        generator = torch.Generator().manual_seed(setup.options.seed)
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        setup.kind.files.begin(unfinished, Start(setup.target, setup.options, generator, vocabulary.ids_v))
        unfinished.replace(folder)
    return setup.kind.files.open(folder, setup.target)


def settings_of(setup: Setup, corpus: Corpus, vocabulary: Vocabulary) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    options = setup.options
    names = ("kind", "epochs", "max_steps", "learning_rate", "batch_tokens", "accumulate", "max_length", "dtype")
    own = {name: getattr(options, name) for name in (*names, "seed", *BELONGS)}
    found = {"draft_vocab_size": vocabulary.size, "model": identity(setup.target), "data": corpus.digest()}
    return {**own, **found, "processes": setup.accelerator.num_processes}
