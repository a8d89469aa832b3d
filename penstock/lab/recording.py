"""Recordings: the target's picks, the drafter's candidates and the probabilities of both, token by token.

A recording is one safetensors file: the arrays below, and a JSON header in its metadata. ``penstock bench --record``
writes it; acceptance rules and simulations read it, without any model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config import FieldError, check, parse
from penstock.core import ConfigError

FORMAT: Final = 1
"""Version of the format."""
METADATA: Final = "penstock_recording"
"""The key of the header in the file's metadata."""

CONFIG_FILES: Final = ("config.json",)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")

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
"""dtype and shape of every array; ``Recording`` explains them."""

NO_TOKEN: Final = -1
"""Padding of a row that has fewer tokens than columns."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A checkpoint's identity: its name, and digests (SHA-256, hexadecimal) of its configuration and tokenizer."""

    name: str
    config: str
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class Header:
    """The recorded models and settings. ``seeds`` has one entry per request, ``versions`` one per package.

    ``undecided`` counts tokens that plain decoding and the recorder, which computes many rows together, picked
    differently: the two best scores differed by less than rounding. The recording follows plain decoding.
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
    """P requests with T generated tokens in all, K candidates and M tokens of each distribution for every one.

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
    temperature 0 nothing is sampled, and they are the models' own. A row with fewer tokens than columns ends in
    NO_TOKEN with probability 0 (log: -inf). Raises FieldError where the arrays contradict each other.
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
        return len(self.offsets) - 1

    def rows(self, request: int) -> slice:
        """The slice of the T rows that holds the request's tokens."""
        return slice(int(self.offsets[request]), int(self.offsets[request + 1]))

    def arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in SHAPES}

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError where that is not possible."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        arrays = {name: np.ascontiguousarray(values) for name, values in self.arrays().items()}
        try:
            save_file(arrays, path, metadata={METADATA: json.dumps(asdict(self.header))})
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file. Raises ConfigError naming the file, and the field where one is to blame."""
        header, arrays = read_file(path)
        try:
            return cls(header=parse_header(header), **arrays)
        except FieldError as error:
            raise ConfigError(f"{path}: {error}; {REMEDY}") from error

    def check_made_with(self, path: Path, target: Fingerprint | None, draft: Fingerprint | None) -> None:
        """Raise ConfigError naming the field and both values unless ``path`` was recorded with these two models.

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


def read_file(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The header, still as JSON text, and the arrays. Raises ConfigError unless the file is a complete recording."""
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
    """The header from its JSON text. Raises FieldError; the format is checked first, as other fields depend on it."""
    try:
        table: Any = json.loads(text)
    except ValueError as error:
        raise FieldError(METADATA, f"is not JSON: {error}") from error
    found = table.get("format") if isinstance(table, dict) else None
    check(found == FORMAT, "format", found, f"{FORMAT}, which this version of Penstock reads")
    return parse(Header, table)


def sizes_known(sizes: Mapping[str | int, int]) -> str:
    named = ", ".join(f"{name} = {sizes[name]}" for name in "PTKM" if name in sizes)
    return f" with {named}" if named else ""


def fingerprint(name: str, folder: Path) -> Fingerprint:
    """The identity of the checkpoint in ``folder``. Weights are not read: they may be many gigabytes."""
    return Fingerprint(name=name, config=digest(folder, CONFIG_FILES), tokenizer=digest(folder, TOKENIZER_FILES))


def digest(folder: Path, names: tuple[str, ...]) -> str:
    """SHA-256 (hexadecimal) over the names and contents of the named files that exist; "none" where none does."""
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        return "none"
    total = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        # The length goes in front, so that bytes cannot move from one file to the next and leave the digest the same.
        total.update(f"{file.name} {len(content)}\n".encode() + content)
    return total.hexdigest()
