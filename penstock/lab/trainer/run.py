"""``penstock train``: the registry of kinds, the inputs of a run, and the command itself."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.cluster import Cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.llm import LLM
from penstock.engine.options import model_folder
from penstock.lab.trainer.block import DFLASH, DSPARK, HEADRACE
from penstock.lab.trainer.corpus import Corpus, Document, make_corpus, read_documents
from penstock.lab.trainer.data import Vocabulary, Writing, answers_key, ask, choose, conversations, regenerate
from penstock.lab.trainer.data import key_of as questions_key
from penstock.lab.trainer.draft import DRAFT
from penstock.lab.trainer.eagle import EAGLE, EAGLE3, MTP
from penstock.lab.trainer.kinds import Drafter, Kind, Start, with_usual
from penstock.lab.trainer.loop import (
    Acceptance,
    Bar,
    Run,
    State,
    Step,
    draw,
    estimated_speedup,
    evaluate,
    load_state,
    progress,
    say,
    train,
)
from penstock.lab.trainer.medusa import MEDUSA
from penstock.lab.trainer.options import BELONGS, TrainOptions, check_target, drafting_cluster
from penstock.lab.trainer.peagle import PEAGLE
from penstock.lab.trainer.spd import EARLY_EXIT, SPD
from penstock.lab.trainer.states import Loader, StateCache, Wanted, epoch_steps, fill, identity, key_of, packed
from penstock.models.packing import check_device
from penstock.models.speculators.base import TargetHead
from penstock.text.tokenizer import load_tokenizer

# ------------------------------------------------------------------------------------------------------------- registry
# The kinds of drafters that can be trained, by name.

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind for kind in (EAGLE, EAGLE3, MEDUSA, MTP, SPD, EARLY_EXIT, DFLASH, DSPARK, HEADRACE, PEAGLE, DRAFT)
}


# ---------------------------------------------------------------------------------------------------------------- setup
# The objects that all steps of ``penstock train`` share; options are checked and settled before anything is read.

STATE: Final = "state.pt"
FRESH: Final = "fresh-"
"""Names in the folder ``training``: the run's state, and the beginning of folders with untrained drafters."""


@dataclass(frozen=True)
class Setup:
    """The objects that all steps of the command share, with settled options. ``work``: the output's folder
    ``training``."""

    options: TrainOptions
    kind: Kind
    target: Checkpoint
    cluster: Cluster | None
    work: Path
    accelerator: Any
    console: Console
    """The main process's console; those of other processes print nothing."""


def set_up(options: TrainOptions, console: Console) -> Setup:
    """Check and settle the options. Raises ConfigError for what is missing or cannot be used here."""
    from accelerate import Accelerator

    check_device(options.device)
    target = open_checkpoint(model_folder(options.model, "target"))
    check_target(options, target.vocab_size, target.num_layers)
    kind = KINDS[options.kind]
    options = with_usual(kind.settle(options, target), learning_rate=kind.learning_rate)
    cluster = None if options.cluster is None else drafting_cluster(options.cluster)
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


# -------------------------------------------------------------------------------------------------------------- prepare
# The inputs of a run: data, the target's hidden states, a vocabulary, and an untrained drafter.

SEQUENCES: Final = 64
"""Conversations that the target writes at the same time. There are slots for a quarter of them at full length."""


def read_corpus(setup: Setup) -> Corpus:
    """The sequences to learn from, from files or written by the target.

    Raises ConfigError for files that cannot be read or hold no text, and as ``self_asked`` and ``regenerate`` do.
    """
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
    """Conversations with the target's own answers; their questions are the data's, or the target's own, too."""
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
    """Options of the engine that writes: many sequences at once, which cost little more than one.

    It has KV slots for a quarter of the longest possible texts, since most are shorter.
    """
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
    """``count`` questions that the target asks, written to disk as they come.

    Raises ConfigError if it repeats itself, or has no chat template that keeps what users say.
    """
    options = setup.options
    key = questions_key(identity(setup.target), options.max_length, options.seed)
    task = bar.add_task("the target's own questions", total=count)
    questions: list[str] = []
    for questions in ask(count, llm, setup.work / f"questions-{key}.jsonl", options.max_length, options.seed):
        bar.update(task, completed=len(questions))
    return questions


def cached_states(setup: Setup, corpus: Corpus) -> StateCache:
    """The target's hidden states of all sequences, computed unless they are on disk.

    Raises ConfigError if the disk has no room for them.
    """
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
    """The tokens that can be drafted; how much of the data they are is printed, unless they are all."""
    size, known = setup.options.draft_vocab_size, setup.target.vocab_size
    if size is None:
        return Vocabulary(None, known)
    vocabulary = choose(corpus, size, known)
    if vocabulary.ids_v is not None:
        cover = f"{vocabulary.training_share:.2%} of those to learn, {vocabulary.held_out_share:.2%} of those held out"
        say(setup.console, f"draft vocabulary: the {vocabulary.size} most frequent tokens cover {cover}")
    return vocabulary


def fresh_drafter(setup: Setup, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Drafter:
    """The untrained drafter of a run, which is written once, so that a resumed run begins with the same one."""
    folder = setup.work / f"{FRESH}{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]}"
    # Made beside its place and renamed: a folder in place is whole.
    if not folder.is_dir():
        generator = torch.Generator().manual_seed(setup.options.seed)
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        setup.kind.files.begin(unfinished, Start(setup.target, setup.options, generator, vocabulary.ids_v))
        unfinished.replace(folder)
    return setup.kind.files.open(folder, setup.target)


def settings_of(setup: Setup, corpus: Corpus, vocabulary: Vocabulary) -> dict[str, Any]:
    """The settings that a run has to share with the state from which it is resumed."""
    options = setup.options
    names = ("kind", "epochs", "max_steps", "learning_rate", "batch_tokens", "accumulate", "max_length", "dtype")
    # A run can be resumed by a version that knows more kinds: options of these alone are not among its settings.
    belong = [name for name, kinds in BELONGS.items() if options.kind in kinds]
    own = {name: getattr(options, name) for name in (*names, "seed", *belong)}
    found = {"draft_vocab_size": vocabulary.size, "model": identity(setup.target), "data": corpus.digest()}
    return {**own, **found, "processes": setup.accelerator.num_processes}


# ----------------------------------------------------------------------------------------------------------------- runs
# Puts a run together for the loop: the module, the target's head, data and steps.

HELD_OUT_TOKENS: Final = 1 << 14
"""Most tokens at which each evaluation looks. A share of a half is then known to 0.4% (one standard error)."""


def make_run(
    setup: Setup,
    corpus: Corpus,
    cache: StateCache,
    fresh: Drafter,
    vocabulary: Vocabulary,
    steps: Sequence[Step],
) -> Run:
    """The run of the loop, with the module and the target's head loaded on the device."""
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
        """Evaluate the drafter, and estimate its speed-up on the cluster, if one is named."""
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
    """All optimiser steps. Raises ConfigError if there are too few data for one."""
    options = setup.options
    parts = options.accumulate * setup.accelerator.num_processes
    epochs = (epoch_steps(corpus, options.seed, epoch, options.batch_tokens, parts) for epoch in range(options.epochs))
    steps: list[Step] = list(islice(chain.from_iterable(epochs), options.max_steps))
    if not steps:
        raise ConfigError(f"data: {len(corpus.training)} sequences are fewer than the {parts} parts of one step")
    return steps


def held_out(options: TrainOptions, corpus: Corpus, loader: Loader, trainee: Any, head: nn.Module) -> Acceptance:
    """Figures on held-out samples: all of them, or evenly selected ones."""
    tokens = sum(len(corpus.samples[i]) for i in corpus.held_out)
    chosen = corpus.held_out[:: max(1, -(-tokens // HELD_OUT_TOKENS))]
    batches = packed(chosen, corpus.samples, options.batch_tokens // options.accumulate)
    found: Acceptance = evaluate(trainee, head, map(loader.batch, batches))
    return found


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock train``: data, hidden states, an untrained drafter, the loop with a progress bar, and the drafter's files.
#
# The output folder has the drafter, and in its subfolder ``training`` hidden states, the run's state and its curves.


def run_train(options: TrainOptions, console: Console | None = None) -> Drafter:
    """Train, and return the drafter that was written. Raises ConfigError for what cannot work before anything starts.

    An earlier run in the output folder is resumed if it has the same settings.
    """
    setup = set_up(options, console or Console(stderr=True))
    # The main process first: it writes the files that the others then find.
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


def finish(setup: Setup, run: Run, state: State, fresh: Drafter) -> Drafter:
    """Write drafter and curves in the main process; the other processes open what it has written."""
    output, files = setup.options.output, setup.kind.files
    if setup.accelerator.is_main_process:
        files.write(output, fresh, setup.accelerator.unwrap_model(run.trainee).module, setup.target)
        draw(state.history, setup.work, setup.kind.shown)
        size = (output / files.file).stat().st_size
        say(setup.console, f"written: {output / files.file}, {size / 1e6:.1f} MB; curves in {setup.work}")
    setup.accelerator.wait_for_everyone()
    setup.accelerator.end_training()  # ends its threads: torch aborts a process that leaves them running
    return files.open(output, setup.target)
