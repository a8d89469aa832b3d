"""Recordings of distributions: what they hold, how they are loaded and checked, and how an engine makes one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.checkpoint.look import glance
from penstock.config import FieldError, check, check_writable, parse
from penstock.core import ConfigError, RequestOutput, SamplingParams, from_json
from penstock.engine.options import model_folder
from penstock.messages import Sampling
from penstock.speculation import SpeculativeConfig
from penstock.stage.visibility import view_of

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import Checkpoint
    from penstock.engine.resolve import Resolved
    from penstock.models.stage_model import StageModel


# ------------------------------------------------------------------------------------------------------------ recording
# Recordings: the target's picks, the drafter's candidates and the probabilities of both, token by token.
#
# A recording is one safetensors file: the arrays below, and a JSON header in the file's metadata.
# ``penstock bench --record`` writes it; acceptance rules and simulations read it, without any model.

FORMAT: Final = 1
"""Version of the format, the only one that is read."""
METADATA: Final = "penstock_recording"
"""The key of the header in the safetensors file's metadata."""

CONFIG_FILES: Final = ("config.json",)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files of a checkpoint whose contents make its fingerprint."""

SHAPES: Final[Mapping[str, tuple[str, tuple[str | int, ...]]]] = {
    "offsets": ("int64", ("P + 1",)),
    "prompt_lengths": ("int64", ("P",)),
    "tokens": ("int32", ("T",)),
    "token_probs": ("float32", ("T", 2)),
    "candidates": ("int32", ("T", "K")),
    "chances": ("float32", ("T", "K")),
    "target_ids": ("int32", ("T", "M")),
    "target_probs": ("float32", ("T", "M")),
    "draft_of_target": ("float32", ("T", "M")),
    "draft_ids": ("int32", ("T", "M")),
    "draft_probs": ("float32", ("T", "M")),
    "target_of_draft": ("float32", ("T", "M")),
    "rest": ("float32", ("T", 2, 2)),
}
"""dtype and shape of every array, in the order in which shapes are checked; ``Recording`` explains the arrays."""

NO_TOKEN: Final = -1
"""Padding at the end of a row that has fewer tokens than columns."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A checkpoint's identity: its name, and digests (SHA-256, hexadecimal) of its configuration and tokenizer."""

    name: str
    config: str
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class Header:
    """The recorded models and settings. ``seeds``: one for each request; ``versions``: one for each package.

    ``undecided``: tokens that plain decoding and the recorder, which computes many rows together, picked differently,
    because the two best scores differed by less than rounding. The recording has the tokens of plain decoding.
    """

    format: int
    target: Fingerprint
    draft: Fingerprint
    vocabulary: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seeds: tuple[int, ...]
    undecided: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """P requests with T generated tokens in all; for every token K candidates, and M tokens of each distribution.

    ``offsets``         [P + 1]   request i's tokens are those from offsets[i] up to, not including, offsets[i + 1]
    ``prompt_lengths``  [P]       the position of request i's first token: with its seed the key to its noise
    ``tokens``          [T]       what the target picked
    ``token_probs``     [T, 2]    the target's and the draft's probability of that token
    ``candidates``      [T, K]    the drafter's guesses of the token, best first, as the engine's drafter gives them
    ``chances``         [T, K]    log of the chance that the target picks them, as the drafter sees it
    ``target_ids``      [T, M]    the target's most probable tokens, the most probable first
    ``target_probs``    [T, M]    their probabilities,
    ``draft_of_target`` [T, M]    and those that the draft gives them
    ``draft_ids``       [T, M]    the draft's most probable tokens
    ``draft_probs``     [T, M]    their probabilities,
    ``target_of_draft`` [T, M]    and those that the target gives them
    ``rest``            [T, 2, 2] the mass of tokens in neither list: [:, 0] of those to which the target gives more
                                  than the draft, [:, 1] of the others; last axis: the target's mass, the draft's

    Probabilities are those after the request's temperature and filters, from which the token was sampled. At
    temperature 0, where nothing is sampled, they are the models' own. A row with fewer tokens than columns ends in
    NO_TOKEN with probability 0 (log: -inf). Raises FieldError if the arrays contradict each other.
    """

    header: Header
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    tokens: np.ndarray
    token_probs: np.ndarray
    candidates: np.ndarray
    chances: np.ndarray
    target_ids: np.ndarray
    target_probs: np.ndarray
    draft_of_target: np.ndarray
    draft_ids: np.ndarray
    draft_probs: np.ndarray
    target_of_draft: np.ndarray
    rest: np.ndarray

    def __post_init__(self) -> None:
        self._check_shapes()
        ends, requests = self.offsets, self.requests
        rising = ends[0] == 0 and ends[-1] == len(self.tokens) and bool((np.diff(ends) >= 0).all())
        check(rising, "offsets", ends.tolist(), f"rising from 0 to the number of tokens, {len(self.tokens)}")
        check(len(self.header.seeds) == requests, "seeds", len(self.header.seeds), f"one per request, of {requests}")
        for name, values in self.arrays().items():
            self._check_values(name, values)

    @property
    def requests(self) -> int:
        """The number of requests, P."""
        return len(self.offsets) - 1

    def rows(self, request: int) -> slice:
        """The slice of the T rows that holds the request's tokens."""
        return slice(int(self.offsets[request]), int(self.offsets[request + 1]))

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in SHAPES}

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        arrays = {name: np.ascontiguousarray(values) for name, values in self.arrays().items()}
        try:
            save_file(arrays, path, metadata={METADATA: json.dumps(asdict(self.header))})
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file. Raises ConfigError naming the file and, if one is at fault, the field."""
        header, arrays = read_file(path)
        try:
            return cls(header=parse_header(header), **arrays)
        except FieldError as error:
            raise ConfigError(f"{path}: {error}; {REMEDY}") from error

    def check_made_with(self, path: Path, target: Fingerprint | None, draft: Fingerprint | None) -> None:
        """Raise ConfigError, naming the field and both values, if ``path`` was recorded with other models than these.

        None accepts any model.
        """
        for part, recorded, named in (("target", self.header.target, target), ("draft", self.header.draft, draft)):
            given = named or recorded
            for field in ("config", "tokenizer"):
                one, other = getattr(recorded, field), getattr(given, field)
                if one != other:
                    raise ConfigError(
                        f"{path}: {part}.{field} is {one[:12]} (model {recorded.name!r}), that of the {part} model "
                        f"{given.name!r} here is {other[:12]}: use the models it was recorded with, or record it again"
                    )

    def _check_shapes(self) -> None:
        """Raise FieldError unless every array has its dtype and shape.

        P, T, K and M are not known beforehand: the first array that has one sets it for the later ones.
        """
        sizes: dict[str | int, int] = {2: 2}
        for name, values in self.arrays().items():
            dtype, shape = SHAPES[name]
            check(values.dtype == dtype, name, str(values.dtype), f"of type {dtype}")
            known = [sizes.get(size, found) for size, found in zip(shape, values.shape, strict=False)]
            wanted = f"[{', '.join(map(str, shape))}]{sizes_known(sizes)}"
            check(list(values.shape) == known and values.ndim == len(shape), name, list(values.shape), wanted)
            sizes.update(zip(shape, values.shape, strict=True))
            if name == "offsets":
                check(len(values) > 0, name, [], "at least one entry")
                # ``offsets`` has P + 1 entries, and gives P to the arrays after it.
                sizes["P"] = len(values) - 1

    def _check_values(self, name: str, values: np.ndarray) -> None:
        """Raise FieldError if an array holds a value that it cannot have."""
        if name in ("tokens", "candidates", "target_ids", "draft_ids"):
            least = 0 if name == "tokens" else NO_TOKEN
            holds = ((values >= least) & (values < self.header.vocabulary)).all()
            check(bool(holds), name, "out of range", f"token ids below {self.header.vocabulary}")
        elif name == "chances":
            check(bool((values <= 0).all()), name, "out of range", "logs of chances, none above 0")
        elif values.dtype == np.float32:
            holds = ((values >= 0) & (values <= 1 + 1e-4)).all()  # a sum of many rounded numbers may exceed 1
            check(bool(holds), name, "out of range", "probabilities between 0 and 1")


REMEDY: Final = "record it again with penstock bench --record"
"""The end of errors about files that cannot be used."""


def read_file(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The header, as JSON text, and the arrays. Raises ConfigError unless the file is a complete recording."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            header = (file.metadata() or {}).get(METADATA)
            if header is None:
                raise ConfigError(f"{path}: metadata has no {METADATA!r}, so this is no recording; {REMEDY}")
            names = set(file.keys())
            for name in SHAPES:
                if name not in names:
                    raise ConfigError(f"{path}: {name} is missing; {REMEDY}")
            return header, {name: file.get_tensor(name) for name in SHAPES}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file; penstock bench --record writes one") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path}: is no whole safetensors file ({error}); {REMEDY}") from error


def parse_header(text: str) -> Header:
    """The header from its JSON text. Raises FieldError; the format first, since the other fields depend on it."""
    try:
        table: Any = from_json(text)
    except ValueError as error:
        raise FieldError(METADATA, f"is not JSON: {error}") from error
    found = table.get("format") if isinstance(table, dict) else None
    check(found == FORMAT, "format", found, f"{FORMAT}, which this version of Penstock reads")
    return parse(Header, table)


def sizes_known(sizes: Mapping[str | int, int]) -> str:
    """The sizes known so far, as the end of an error: `` with P = 3``."""
    named = ", ".join(f"{name} = {sizes[name]}" for name in "PTKM" if name in sizes)
    return f" with {named}" if named else ""


def fingerprint(name: str, folder: Path) -> Fingerprint:
    """The identity of the checkpoint in ``folder``. Weights are not read: they may have many gigabytes."""
    return Fingerprint(name=name, config=digest(folder, CONFIG_FILES), tokenizer=digest(folder, TOKENIZER_FILES))


def digest(folder: Path, names: tuple[str, ...]) -> str:
    """SHA-256 (hexadecimal) over names and contents of the named files, as far as they exist; "none" if none does."""
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        return "none"
    total = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        # With its length in front no file's end can pass for the next file's beginning under the same digest.
        total.update(f"{file.name} {len(content)}\n".encode() + content)
    return total.hexdigest()


# ----------------------------------------------------------------------------------------------------------------- load
# Loads recordings that a command line names, and checks the models that they were made with.


def load_recordings(files: Sequence[Path], model: str | None, draft_model: str | None) -> list[Recording]:
    """All recordings. Raises ConfigError naming a file that is no recording, or one of other models.

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
    """The model's fingerprint; None for None. Raises ConfigError for a model that is missing or not supported."""
    if model is None:
        return None
    from penstock.checkpoint.checkpoint import open_checkpoint

    return fingerprint(model, open_checkpoint(model_folder(model, part)).path)


# -------------------------------------------------------------------------------------------------------------- reading
# Runs texts through a model in this process, stage by stage: at most one stage's layers are in memory at a time.

CHUNK: Final = 128
"""Rows that go through a stage together. It is ``engine.build.CHUNK``, so that a recording is computed as an engine
computes."""


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens after it."""

    prompt: Sequence[int]
    picked: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """The tokens that models read: all but the last, after which nothing is asked."""
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
        del stage  # before the next one is loaded, since there may be memory for one only
    return states


def through(stage: StageModel, tokens: Sequence[int], states: Sequence[Any]) -> list[Any]:
    """Run one text through one stage; the chunks' hidden states are returned.

    The stage's slots hold another text's keys and values, which are overwritten before they are read.
    """
    return [stage.forward(view_of(tokens, rows), hidden) for rows, hidden in zip(chunks(tokens), states, strict=True)]


def chunks(tokens: Sequence[int]) -> list[range]:
    """The rows of a text in ranges of at most CHUNK."""
    return [range(start, min(start + CHUNK, len(tokens))) for start in range(0, len(tokens), CHUNK)]


def head_of(setup: Resolved, checkpoint: Checkpoint) -> StageModel:
    """The last stage without layers: only the norm and the head."""
    return load(setup, checkpoint, checkpoint.num_layers, checkpoint.num_layers, capacity=1)


def load(setup: Resolved, checkpoint: Checkpoint, first: int, last: int, capacity: int) -> StageModel:
    """The layers [first, last) of a checkpoint, with room for ``capacity`` tokens, in this process."""
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
"""Number of the drafter's candidates that a recording has of each token. Wide trees take more children of a node than
tables show (``acceptance.MOST``, 16)."""
WIDTH: Final = 256
"""Number of tokens that a recording has of each distribution. Each takes eight bytes a position: an id and its
probability."""
ALIKE: Final = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that have to be the same for all requests of one recording."""
UNCHANGED: Final = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
)
"""Sampling parameters that must have their defaults, since the recorded distributions are the models' own."""


@dataclass(frozen=True)
class Picked(Text):
    """One request: its prompt, the tokens that the target picked, and how they were sampled."""

    sampling: Sampling


def check_record(path: Path, speculation: SpeculativeConfig | None) -> None:
    """Raise FieldError, before anything starts, if no recording can be made, or its file not be written."""
    if speculation is None or speculation.methods != ("draft_model",):
        methods = " and ".join(map(repr, speculation.methods)) if speculation is not None else ""
        found = f"the method is {methods}" if methods else "no strategy drafts"
        raise FieldError("record", f"needs a draft model's distributions, but {found}: use method 'draft_model'")
    check_writable("record", path)


def record(
    path: Path, setup: Resolved, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> Recording:
    """Write a recording of plain decoding: one completion per output, sampled by ``params``.

    Target and draft model read the outputs in this process, stage by stage, so that at most one stage's layers are in
    memory. Raises FieldError if ``params`` differ in more than their seeds, and ConfigError if the file cannot be
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
    """Raise FieldError if requests differ in more than their seeds, or have parameters that no recording can have."""
    for name in ALIKE:
        values = sorted({getattr(one, name) for one in params})
        check(len(values) == 1, name, values, "the same for all requests of one recording")
    for name in UNCHANGED:
        for one in params:
            usual = SamplingParams.__dataclass_fields__[name].default
            check(getattr(one, name) == usual, name, getattr(one, name), f"{usual} in a recording")


def text_of(setup: Resolved, output: RequestOutput, params: SamplingParams) -> Picked:
    """An output of plain decoding as a text to read. Raises FieldError if it has no seed."""
    from penstock.engine.completion import ends_of, sampling_of

    check(params.seed is not None, "seed", params.seed, "fixed, so that the noise is known")
    prompt = output.prompt_token_ids
    ends = ends_of(params, setup.checkpoint)
    return Picked(prompt, output.outputs[0].token_ids, sampling_of(params, params.seed or 0, 0, ends, len(prompt)))


def header_of(setup: Resolved, texts: Sequence[Picked], undecided: int) -> Header:
    """The header: models, settings and versions."""
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
    """The last part of a folder's or a file's path; a hub id unchanged."""
    return Path(model).resolve().name if Path(model).exists() else model


# --------------------------------------------------------------------------------------------------- reading the texts
# Reads the texts through both models.


def read_texts(setup: Resolved, texts: Sequence[Picked]) -> tuple[dict[str, Any], int]:
    """Columns with an entry for each picked token, and the number of tokens that are picked differently here.

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
# The values of a token from both models' logits.


def row_of(
    target_V: np.ndarray, draft_V: np.ndarray, token: int, sampling: Sampling, position: int
) -> dict[str, np.ndarray]:
    """The recorded values of the token at ``position``, from both models' logits before it, by name."""
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
    """A row of ``width`` with the values at its front, and ``empty`` behind them."""
    row = np.full(width, empty)
    row[: len(values)] = values
    return row


def rest_of(p_V: np.ndarray, q_V: np.ndarray, listed: Sequence[np.ndarray]) -> np.ndarray:
    """[2, 2]: the mass of p and of q on tokens in no list, first where p is above q, then elsewhere."""
    outside = np.ones(len(p_V), dtype=bool)
    outside[np.concatenate(listed)] = False
    above = p_V > q_V
    return np.asarray([[share_V[outside & part].sum() for share_V in (p_V, q_V)] for part in (above, ~above)])
