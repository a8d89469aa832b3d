"""Recordings of distributions: written by an engine, loaded, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.checkpoint.look import glance
from penstock.config import FieldError, check
from penstock.core import RequestOutput, SamplingParams
from penstock.engine.options import model_folder
from penstock.lab.recording import FORMAT, NO_TOKEN, SHAPES, Fingerprint, Header, Recording, fingerprint
from penstock.messages import Sampling
from penstock.speculation import SpeculativeConfig
from penstock.stage.visibility import view_of

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import Checkpoint
    from penstock.engine.resolve import Resolved
    from penstock.models.stage_model import StageModel


# ----------------------------------------------------------------------------------------------------------------- load
# Loads recordings that a command line names, and checks the models that they were made with.


def load_recordings(files: Sequence[Path], model: str | None, draft_model: str | None) -> list[Recording]:
    """All recordings, or none: raises ConfigError naming a file that is no recording or one of other models.

    ``model`` and ``draft_model`` are named as in docs/reference/models.md; None accepts files made with any model.
    """
    for name, part in ((model, "target"), (draft_model, "draft")):
        if name is not None:
            glance(model_folder(name, part))
    recordings = [Recording.load(file) for file in files]
    target, draft = fingerprint_of(model, "target"), fingerprint_of(draft_model, "draft")
    for file, recording in zip(files, recordings, strict=True):
        recording.check_made_with(file, target, draft)
    return recordings


def fingerprint_of(model: str | None, part: str) -> Fingerprint | None:
    """The model's fingerprint, None for None. Raises ConfigError for a model that is missing or not supported."""
    if model is None:
        return None
    from penstock.checkpoint.checkpoint import open_checkpoint

    return fingerprint(model, open_checkpoint(model_folder(model, part)).path)


# -------------------------------------------------------------------------------------------------------------- reading
# Runs texts through a model in this process, stage by stage: at most one stage's layers are in memory.

CHUNK: Final = 128
"""Rows that go through a stage together."""


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens after it."""

    prompt: Sequence[int]
    picked: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """The tokens that the models read; nothing follows the last one."""
        return [*self.prompt, *self.picked][:-1]


def last_states(
    setup: Resolved, checkpoint: Checkpoint, layers: Sequence[tuple[int, int]], texts: Sequence[Text]
) -> list[list[Any]]:
    """Hidden states after the last layer: per text, chunks of at most CHUNK rows, [n, D] each."""
    capacity = max(len(text.rows) for text in texts)
    states: list[list[Any]] = [[None] * len(chunks(text.rows)) for text in texts]
    for first, last in layers:
        stage = load(setup, checkpoint, first, last, capacity)
        states = [through(stage, text.rows, before) for text, before in zip(texts, states, strict=True)]
        del stage  # before the next one is loaded, so that only one is in memory
    return states


def through(stage: StageModel, tokens: Sequence[int], states: Sequence[Any]) -> list[Any]:
    """Run one text through one stage. Slots still hold another text, but are overwritten before they are read."""
    return [stage.forward(view_of(tokens, rows), hidden) for rows, hidden in zip(chunks(tokens), states, strict=True)]


def chunks(tokens: Sequence[int]) -> list[range]:
    return [range(start, min(start + CHUNK, len(tokens))) for start in range(0, len(tokens), CHUNK)]


def head_of(setup: Resolved, checkpoint: Checkpoint) -> StageModel:
    """The last stage without layers: only the norm and the head."""
    return load(setup, checkpoint, checkpoint.num_layers, checkpoint.num_layers, capacity=1)


def load(setup: Resolved, checkpoint: Checkpoint, first: int, last: int, capacity: int) -> StageModel:
    from penstock.models.stage_model import load_stage

    return load_stage(
        str(checkpoint.source),
        first,
        last,
        capacity=capacity,
        dtype=setup.options.dtype,
        device=setup.options.device,
        quantization=setup.quantization if checkpoint is setup.checkpoint else setup.draft_quantization,
        max_model_len=setup.max_model_len,
    )


def logits_after(head: StageModel, states: Sequence[Any], text: Text) -> Iterator[np.ndarray]:
    """Logits, float64 [V], before each token after the prompt, in order."""
    from penstock.stage.sampler import to_float64

    for rows, hidden in zip(chunks(text.rows), states, strict=True):
        wanted = range(max(len(text.prompt) - 1, rows.start) - rows.start, len(rows))
        if wanted:
            yield from to_float64(head.logits(hidden, wanted))


# --------------------------------------------------------------------------------------------------------------- record
# ``penstock bench --record``: target and draft model read the texts of plain decoding again, for a recording.

CANDIDATES: Final = 64
"""Number of the drafter's candidates that are kept."""
WIDTH: Final = 256
"""Number of tokens of each distribution that are kept."""
ALIKE: Final = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that all requests of one recording share."""
UNCHANGED: Final = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
)
"""Sampling parameters that a recording cannot have, since its distributions are the models' own."""


@dataclass(frozen=True)
class Picked(Text):
    """One request: its prompt, the tokens that the target picked, and how it was sampled."""

    sampling: Sampling


def check_record(path: Path, speculation: SpeculativeConfig | None) -> None:
    """Raise FieldError, before anything starts, where no recording can be made or written."""
    if speculation is None or speculation.methods != ("draft_model",):
        methods = " and ".join(map(repr, speculation.methods)) if speculation is not None else ""
        found = f"the method is {methods}" if methods else "no strategy drafts"
        raise FieldError("record", f"needs a draft model's distributions, but {found}: use method 'draft_model'")
    check(path.parent.is_dir() and not path.is_dir(), "record", str(path), "a file in a folder that exists")


def record(
    path: Path, setup: Resolved, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> Recording:
    """Write a recording of plain decoding: one completion per output, sampled by ``params``.

    Target and draft model read the outputs in this process, stage by stage, so that at most one stage's layers are in
    memory. Raises FieldError where ``params`` differ in more than their seeds, and ConfigError where the file cannot be
    written.
    """
    check_alike(params)
    texts = [text_of(setup, output, one) for output, one in zip(outputs, params, strict=True)]
    columns, undecided = read_texts(setup, texts)
    ends = np.cumsum([0, *(len(text.picked) for text in texts)])
    columns |= {"offsets": ends, "prompt_lengths": [len(text.prompt) for text in texts]}
    recording = Recording(
        header=header_of(setup, texts, undecided),
        **{name: np.asarray(columns[name], dtype=dtype) for name, (dtype, _) in SHAPES.items()},
    )
    recording.save(path)
    return recording


def check_alike(params: Sequence[SamplingParams]) -> None:
    for name in ALIKE:
        values = sorted({getattr(one, name) for one in params})
        check(len(values) == 1, name, values, "the same for all requests of one recording")
    for name in UNCHANGED:
        for one in params:
            usual = SamplingParams.__dataclass_fields__[name].default
            check(getattr(one, name) == usual, name, getattr(one, name), f"{usual} in a recording")


def text_of(setup: Resolved, output: RequestOutput, params: SamplingParams) -> Picked:
    from penstock.engine.completion import ends_of, sampling_of

    check(params.seed is not None, "seed", params.seed, "fixed, so that the noise is known")
    prompt = output.prompt_token_ids
    ends = ends_of(params, setup.checkpoint)
    return Picked(prompt, output.outputs[0].token_ids, sampling_of(params, params.seed or 0, 0, ends, len(prompt)))


def header_of(setup: Resolved, texts: Sequence[Picked], undecided: int) -> Header:
    assert setup.draft is not None
    assert setup.speculation is not None
    sampling = texts[0].sampling
    return Header(
        format=FORMAT,
        target=fingerprint(name_of(setup.options.model), setup.checkpoint.path),
        draft=fingerprint(name_of(str(setup.speculation.drafter_options.model)), setup.draft.path),
        vocabulary=setup.checkpoint.vocab_size,
        **{name: getattr(sampling, name) for name in ALIKE},
        seeds=tuple(text.sampling.seed for text in texts),
        undecided=undecided,
        versions={name: version(name) for name in ("penstock", "torch", "transformers")},
    )


def name_of(model: str) -> str:
    """The last part of a folder's or file's path; a hub id as it is."""
    return Path(model).resolve().name if Path(model).exists() else model


# --------------------------------------------------------------------------------------------------- reading the texts


def read_texts(setup: Resolved, texts: Sequence[Picked]) -> tuple[dict[str, Any], int]:
    """Columns with one entry per picked token, and the number of tokens that are picked differently here.

    There are two passes: first through the layers of either model, then from the resulting states through both heads
    side by side, because a token's two distributions are cut together.
    """
    from penstock.stage.sampler import pick_one

    assert setup.draft is not None
    drafted = last_states(setup, setup.draft, [(0, setup.draft.num_layers)], texts)
    aimed = last_states(setup, setup.checkpoint, setup.layers, texts)
    head, draft_head = (head_of(setup, checkpoint) for checkpoint in (setup.checkpoint, setup.draft))
    columns: dict[str, Any] = {}
    undecided = 0
    for text, states, draft_states in zip(texts, aimed, drafted, strict=True):
        both = zip(logits_after(head, states, text), logits_after(draft_head, draft_states, text), strict=True)
        for i, (target_V, draft_V) in enumerate(both):
            position = len(text.prompt) + i
            undecided += pick_one(target_V, text.sampling, position, 0).token != text.picked[i]
            for name, value in row_of(target_V, draft_V, text.picked[i], text.sampling, position).items():
                columns.setdefault(name, []).append(value)
    return columns, undecided


# ---------------------------------------------------------------------------------------------------- one token's row


def row_of(
    target_V: np.ndarray, draft_V: np.ndarray, token: int, sampling: Sampling, position: int
) -> dict[str, np.ndarray]:
    """The recorded values for the token at ``position`` from both models' logits before it, named as in
    ``Recording``."""
    from penstock.stage.sampler import best_tokens, distribution, rank_one

    p_V, q_V = (distribution(logits_V, sampling, position) for logits_V in (target_V, draft_V))
    guesses = rank_one(draft_V, sampling, position, 0, CANDIDATES)
    p_ids, q_ids = (best_tokens(share_V, WIDTH) for share_V in (p_V, q_V))
    p_ids, q_ids = p_ids[p_V[p_ids] > 0], q_ids[q_V[q_ids] > 0]
    width, count = min(WIDTH, len(p_V)), min(CANDIDATES, len(p_V))
    return {
        "tokens": np.asarray(token),
        "token_probs": np.asarray([p_V[token], q_V[token]]),
        "candidates": filled(guesses.tokens, count, NO_TOKEN),
        "chances": filled(guesses.scores, count, -np.inf),
        "target_ids": filled(p_ids, width, NO_TOKEN),
        "target_probs": filled(p_V[p_ids], width, 0.0),
        "draft_of_target": filled(q_V[p_ids], width, 0.0),
        "draft_ids": filled(q_ids, width, NO_TOKEN),
        "draft_probs": filled(q_V[q_ids], width, 0.0),
        "target_of_draft": filled(p_V[q_ids], width, 0.0),
        "rest": rest_of(p_V, q_V, [p_ids, q_ids]),
    }


def filled(values: Sequence[float] | np.ndarray, width: int, empty: float) -> np.ndarray:
    """A row of ``width`` with the values at its front."""
    row = np.full(width, empty)
    row[: len(values)] = values
    return row


def rest_of(p_V: np.ndarray, q_V: np.ndarray, listed: Sequence[np.ndarray]) -> np.ndarray:
    """[2, 2]: the mass of p and of q on tokens in no list, first where p is above q and then elsewhere."""
    outside = np.ones(len(p_V), dtype=bool)
    outside[np.concatenate(listed)] = False
    above = p_V > q_V
    return np.asarray([[share_V[outside & part].sum() for share_V in (p_V, q_V)] for part in (above, ~above)])
