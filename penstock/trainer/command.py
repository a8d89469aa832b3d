"""``penstock train``: data, hidden states, a fresh drafter, the loop under a bar, and what comes out of it.

In the output folder lie the drafter, and in ``training`` what its making needs: hidden states, state, curves.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import nn

from penstock.bench.options import require_matplotlib
from penstock.cluster import Cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.options import model_folder
from penstock.models.checkpoint import Checkpoint, open_checkpoint
from penstock.models.devices import check_device
from penstock.models.speculators.loader import TargetHead
from penstock.simulator.clusters import check_drafter, modelled_cluster
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.trainer.curves import draw
from penstock.trainer.data.batches import Loader, epoch_steps, packed
from penstock.trainer.data.cache import StateCache, Wanted, fill, identity, key_of
from penstock.trainer.data.corpus import Corpus, Document, make_corpus, read_documents
from penstock.trainer.data.vocabulary import Vocabulary, choose
from penstock.trainer.evaluate import Acceptance, estimated_speedup, evaluate
from penstock.trainer.kinds.base import Drafter, Kind, Start, with_usual
from penstock.trainer.kinds.registry import KINDS
from penstock.trainer.loop import Run, Step, train
from penstock.trainer.options import BELONGS, TrainOptions
from penstock.trainer.progress import Bar, progress, say
from penstock.trainer.state import State, load_state

HELD_OUT_TOKENS: Final = 1 << 14
"""Most tokens that each evaluation looks at."""
STATE: Final = "state.pt"
FRESH: Final = "fresh-"


@dataclass(frozen=True)
class Setup:
    """What all steps of the command need; the options are settled. ``work`` is the output's folder ``training``."""

    options: TrainOptions
    kind: Kind
    target: Checkpoint
    cluster: Cluster | None
    work: Path
    accelerator: Any
    console: Console
    """Of the main process; the others' is silent."""


def run_train(options: TrainOptions, console: Console | None = None) -> Drafter:
    """Train, and return what was written. Raises ConfigError before anything starts for what cannot work.

    Goes on with what the output folder holds of the same run.
    """
    setup = set_up(options, console or Console(stderr=True))
    with setup.accelerator.main_process_first():
        corpus = read_corpus(setup)
        steps = planned(setup, corpus)
        vocabulary = choose_vocabulary(setup, corpus)
        settings = settings_of(setup, corpus, vocabulary)
        state = load_state(setup.work / STATE, settings)
        cache = cached_states(setup, corpus)
        fresh = fresh_drafter(setup, vocabulary, settings)
    run = make_run(setup, corpus, cache, fresh, vocabulary, steps)
    if state.step:
        say(setup.console, f"going on after step {state.step} of {len(run.steps)}")
    with Bar(setup.console, state.step, len(run.steps), setup.kind.shown) as bar:
        state = train(run, state, bar)
    return finish(setup, run, state, fresh)


def set_up(options: TrainOptions, console: Console) -> Setup:
    """Raises ConfigError for what is not installed, not there, or not usable here."""
    require_matplotlib()
    if find_spec("accelerate") is None:
        raise ConfigError("training needs accelerate: pip install 'penstock[train]'")
    from accelerate import Accelerator

    check_device(options.device)
    target = open_checkpoint(model_folder(options.model, "target"))
    size, known = options.draft_vocab_size, target.vocab_size
    if size is not None and size > known:
        raise FieldError("draft_vocab_size", f"is {size}; the target knows {known} tokens")
    kind = KINDS[options.kind]
    options = with_usual(kind.settle(options, target), learning_rate=kind.learning_rate)
    cluster = None if options.cluster is None else emulated(options.cluster)
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="no")
    least = options.max_length * options.accumulate * accelerator.num_processes
    if options.batch_tokens < least:
        raise FieldError(
            "batch_tokens", f"is {options.batch_tokens}; for {accelerator.num_processes} processes at least {least}"
        )
    work = options.output / "training"
    if accelerator.is_main_process:
        work.mkdir(parents=True, exist_ok=True)
        if options.restart:
            (work / STATE).unlink(missing_ok=True)
            for fresh in work.glob(f"{FRESH}*"):
                shutil.rmtree(fresh)
    accelerator.wait_for_everyone()
    shown = console if accelerator.is_main_process else Console(quiet=True)
    return Setup(options, kind, target, cluster, work, accelerator, shown)


def emulated(name: str) -> Cluster:
    cluster = modelled_cluster(name)
    check_drafter(cluster)
    return cluster


# ------------------------------------------------------------------------------------------------------ before the run


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
        with LLM(str(setup.target.path), **engine) as llm:
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


def make_run(
    setup: Setup,
    corpus: Corpus,
    cache: StateCache,
    fresh: Drafter,
    vocabulary: Vocabulary,
    steps: Sequence[Step],
) -> Run:
    """Module, target's head and data, put together."""
    options, kind, target, device = setup.options, setup.kind, setup.target, setup.accelerator.device
    rate = options.learning_rate
    assert rate is not None
    module, parameters = kind.files.load(fresh, target, str(device))
    head = TargetHead(target, options.dtype, str(device))
    trainee = kind.trainee(module, head, options, target, vocabulary.ids_v).to(device)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    loader = Loader(corpus, cache, kind.reads(options, target), target.num_layers, device)

    def judge() -> tuple[Acceptance, float | None]:
        found = held_out(options, corpus, loader, trainee, head)
        profile = found.profile if kind.shown.alike else found.by_step[0]
        return found, None if setup.cluster is None else estimated_speedup(profile, setup.cluster)

    return Run(
        setup.accelerator,
        kind,
        trainee,
        parameters,
        loader,
        steps,
        rate,
        options.dtype == "bfloat16",
        options.seed,
        options.save_every,
        setup.work / STATE,
        judge,
    )


def planned(setup: Setup, corpus: Corpus) -> list[Step]:
    """All optimiser steps. Raises ConfigError if the data do not suffice for one."""
    options = setup.options
    parts = options.accumulate * setup.accelerator.num_processes
    steps: list[Step] = []
    for epoch in range(options.epochs):
        steps += epoch_steps(corpus, options.seed, epoch, options.batch_tokens, parts)
    if not steps:
        raise ConfigError(f"data: {len(corpus.training)} sequences are fewer than the {parts} parts of one step")
    return steps[: options.max_steps]


def held_out(options: TrainOptions, corpus: Corpus, loader: Loader, trainee: Any, head: nn.Module) -> Acceptance:
    """Figures on held-out samples, evenly taken where there are too many."""
    tokens = sum(len(corpus.samples[i]) for i in corpus.held_out)
    chosen = corpus.held_out[:: max(1, -(-tokens // HELD_OUT_TOKENS))]
    batches = packed(chosen, corpus.samples, options.batch_tokens // options.accumulate)
    found: Acceptance = evaluate(trainee, head, map(loader.batch, batches))
    return found


# ------------------------------------------------------------------------------------------------------- after the run


def finish(setup: Setup, run: Run, state: State, fresh: Drafter) -> Drafter:
    """Write drafter and curves. Only the main process does; the others open what it has written."""
    output, files = setup.options.output, setup.kind.files
    if setup.accelerator.is_main_process:
        files.write(output, fresh, setup.accelerator.unwrap_model(run.trainee).module, setup.target)
        draw(state.history, setup.work, setup.kind.shown)
        size = (output / files.file).stat().st_size
        say(setup.console, f"written: {output / files.file}, {size / 1e6:.1f} MB; curves in {setup.work}")
    setup.accelerator.wait_for_everyone()
    return files.open(output, setup.target)
