"""The inputs of a run: its data, the target's hidden states, a vocabulary, and a fresh drafter."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from typing import Any, Final

import torch
from rich.progress import Progress

from penstock.engine.llm import LLM
from penstock.text.tokenizer import load_tokenizer
from penstock.trainer.data.cache import StateCache, Wanted, fill, identity, key_of
from penstock.trainer.data.corpus import Corpus, Document, make_corpus, read_documents
from penstock.trainer.data.questions import ask, conversations
from penstock.trainer.data.questions import key_of as questions_key
from penstock.trainer.data.regenerate import Writing, regenerate
from penstock.trainer.data.regenerate import key_of as answers_key
from penstock.trainer.data.vocabulary import Vocabulary, choose
from penstock.trainer.kinds.base import Drafter, Start
from penstock.trainer.options import BELONGS
from penstock.trainer.progress import progress, say
from penstock.trainer.setup import FRESH, Setup

SEQUENCES: Final = 64
"""Conversations that the target writes at a time."""


def read_corpus(setup: Setup) -> Corpus:
    options = setup.options
    tokenizer = load_tokenizer(setup.target.path)
    if options.self_generate is not None or options.regenerate:
        documents = written_by_target(setup)
    else:
        documents = read_documents(options.data)
    corpus = make_corpus(documents, tokenizer, options.max_length)
    sides = [sum(corpus.samples[i].lessons for i in side) for side in (corpus.training, corpus.held_out)]
    say(
        setup.console,
        f"data: {len(documents)} documents, {len(corpus.samples)} sequences; tokens to learn {sides[0]:,}, "
        f"held out {sides[1]:,}",
    )
    return corpus


def written_by_target(setup: Setup) -> list[Document]:
    """Conversations of the data, or of the target's own questions, with the target's own answers."""
    options = setup.options
    found = [] if options.self_generate is not None else read_documents(options.data)
    with LLM(str(setup.target.source), **writing_engine(setup)) as llm, progress(setup.console) as bar:
        if options.self_generate is not None:
            found = conversations(self_asked(setup, options.self_generate, llm, bar))
        writing = Writing(options.max_length, options.seed, options.temperatures)
        file = setup.work / f"answers-{answers_key(found, identity(setup.target), writing)}.jsonl"
        task = bar.add_task("the target's own answers", total=len(found))
        written: list[Document] = []
        for written in regenerate(found, llm, file, writing):
            bar.update(task, completed=len(written))
    return written


def writing_engine(setup: Setup) -> dict[str, Any]:
    """Options of the engine that writes: many sequences, which cost little more than one, and room for
    typical lengths."""
    options, quantized = setup.options, setup.target.weights.bits is not None
    return {
        "dtype": "auto" if quantized else options.dtype,  # the fastest beside quantised weights
        "device": options.device,
        "max_model_len": options.max_length,
        "max_num_seqs": SEQUENCES,
        "kv_slots": SEQUENCES // 4 * options.max_length,
        "speculative_config": None,
    }


def self_asked(setup: Setup, count: int, llm: LLM, bar: Progress) -> list[str]:
    options = setup.options
    key = questions_key(identity(setup.target), options.max_length, options.seed)
    task = bar.add_task("the target's own questions", total=count)
    questions: list[str] = []
    for questions in ask(count, llm, setup.work / f"questions-{key}.jsonl", options.max_length, options.seed):
        bar.update(task, completed=len(questions))
    return questions


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
    """Choose the vocabulary, and print how much of the data it covers where it is not the target's whole one."""
    size, known = setup.options.draft_vocab_size, setup.target.vocab_size
    if size is None:
        return Vocabulary(None, known)
    vocabulary = choose(corpus, size, known)
    if vocabulary.ids_v is not None:
        cover = f"{vocabulary.training_share:.2%} of those to learn, {vocabulary.held_out_share:.2%} of those held out"
        say(setup.console, f"draft vocabulary: the {vocabulary.size} most frequent tokens cover {cover}")
    return vocabulary


def fresh_drafter(setup: Setup, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Drafter:
    """The untrained drafter of a run, written once, so that a resumed run begins with the same."""
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
    """The settings that have to be equal for a run to be resumed."""
    options = setup.options
    names = ("kind", "epochs", "max_steps", "learning_rate", "batch_tokens", "accumulate", "max_length", "dtype")
    own = {name: getattr(options, name) for name in (*names, "seed", *BELONGS)}
    found = {"draft_vocab_size": vocabulary.size, "model": identity(setup.target), "data": corpus.digest()}
    return {**own, **found, "processes": setup.accelerator.num_processes}
