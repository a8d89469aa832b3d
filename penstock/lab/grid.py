"""The settings that a bench compares, and its prompts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from penstock.config import (
    MODEL,
    OUTPUT,
    PIPELINE,
    SAMPLING,
    SPECULATION,
    FieldError,
    Option,
    check,
    check_writable,
    nearest,
)
from penstock.core import HALF, ConfigError, SamplingParams, from_json, lone_surrogate
from penstock.engine.options import (
    CLUSTER,
    DEMO,
    Dtype,
    EngineOptions,
    Hosts,
    Insecure,
    KeysFolder,
    ModelName,
    Quantization,
    ReplicaCount,
    SpeculativeSlots,
    Stages,
    Threads,
)
from penstock.speculation import SpeculativeConfig, names_of, parse_speculative_for
from penstock.strategies.base import STRATEGIES

if TYPE_CHECKING:
    from penstock.engine.completion import Prompt
    from penstock.engine.llm import LLM

# -------------------------------------------------------------------------------------------------------------- entries
# The strategies that a bench compares, as a user writes them: ``pipedec[width=16,children=8],pipedec[width=64]``.

Named = tuple[str, SpeculativeConfig | None]
"""An entry as written, with its configuration; None decodes plainly."""

PLAIN = "autoregressive"
"""The strategy that decodes plainly."""
PLACED = " @ "
"""The separator between an entry and the place where its drafter ran."""


def with_plain(strategies: Sequence[Named]) -> list[Named]:
    """``strategies`` with plain decoding first: its output is the reference of the others and of the synthetic drafter.

    Plain decoding is added if it is not among them.
    """
    plain = [one for one in strategies if is_plain(one[1])] or [(PLAIN, None)]
    return [*plain, *(one for one in strategies if not is_plain(one[1]))]


def is_plain(config: SpeculativeConfig | None) -> bool:
    """Whether the configuration decodes plainly."""
    return config is None or config.strategy == PLAIN


def split_entries(text: str) -> tuple[str, ...]:
    """The parts of ``text`` between commas that are outside brackets, without blanks around them and empty ones."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts if part.strip())


def strategy_of(label: str) -> str:
    """The name of an entry's strategy, without options and place."""
    return re.split(rf"[][]|{PLACED}", label, maxsplit=1)[0].strip()


def parse_entries(entries: Sequence[str], common: Mapping[str, Any], target: str = "") -> list[Named]:
    """Each entry with the drafter and options in ``common``, for the model ``target``; its own options replace those.

    Raises FieldError naming the entry and its option, or the error in ``common``, whose options each have to belong to
    at least one of the strategies.
    """
    own = {entry: own_options(entry) for entry in entries}
    speculating = list(dict.fromkeys(name for name in map(strategy_of, entries) if name != PLAIN))
    if common and not speculating:
        raise FieldError("speculative_config", f"means nothing to strategy {PLAIN!r}; remove it")
    configs = parse_speculative_for(common, speculating, target) if speculating else ()
    shared = dict(zip(speculating, configs, strict=True))
    return [(entry, with_own(entry, shared.get(strategy_of(entry)), own[entry])) for entry in entries]


def with_own(entry: str, shared: SpeculativeConfig | None, own: Mapping[str, Any]) -> SpeculativeConfig | None:
    """The shared configuration with an entry's own options. Raises FieldError naming the entry."""
    if shared is None or not own:
        return shared
    try:
        return shared.with_options(own)
    except FieldError as error:
        raise FieldError("strategies", f"entry {entry!r}: {error}") from None


def own_options(entry: str) -> dict[str, Any]:
    """The options in an entry's brackets, by name. Raises FieldError for an unknown or repeated name."""
    strategy = strategy_of(entry)
    if PLACED in entry:
        raise FieldError("strategies", f"entry {entry!r}: say with drafter_on where the drafter runs, for all entries")
    if strategy not in STRATEGIES:
        raise FieldError("strategies", f"entry {entry!r}: strategy is {strategy!r}; {nearest(strategy, STRATEGIES)}")
    options: dict[str, Any] = {}
    for pair in split_entries(inside(entry)):
        name, equals, value = (part.strip() for part in pair.partition("="))
        known = names_of(STRATEGIES[strategy])
        if name not in known:
            raise FieldError(
                "strategies", f"entry {entry!r}: option {name!r} is unknown to {strategy!r}; {nearest(name, known)}"
            )
        if not equals or not value:
            raise FieldError("strategies", f"entry {entry!r}: option {name!r} has no value; write {name}=...")
        if name in options:
            raise FieldError("strategies", f"entry {entry!r}: option {name!r} is set twice; remove one")
        options[name] = value_of(value)
    return options


def inside(entry: str) -> str:
    """The text between an entry's brackets; "" without brackets. Raises FieldError for brackets that do not match."""
    _, bracket, rest = entry.partition("[")
    if not bracket and "]" not in entry:
        return ""
    if not rest.endswith("]") or rest.count("[") != rest.count("]") - 1 or not rest[:-1].strip():
        raise FieldError("strategies", f"entry {entry!r}: write the options as {strategy_of(entry)}[option=value,...]")
    return rest[:-1]


def value_of(text: str) -> Any:
    """The value of a JSON literal (numbers, true, lists), or the text itself where it is none."""
    try:
        return from_json(text)
    except ValueError:
        return text


# -------------------------------------------------------------------------------------------------------------- options
# Options that several commands share.


def parse_accuracy(text: str) -> tuple[float, ...]:
    """The numbers in ``0.7,0.8``. Raises FieldError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FieldError("accuracy", f"is {text!r}; it has to be numbers with commas, for example 0.7,0.8") from None


Accuracy = Annotated[
    tuple[float, ...] | None,
    Option(
        "Chances, 0 to 1 and never falling, that the target's token is among the drafter's first 1, 2, ... candidates.",
        SPECULATION,
        metavar="P,P,...",
        default="the demo pair's at T = 1",
        parse=parse_accuracy,
    ),
]
Bandwidth = Annotated[
    float | None,
    Option(
        "Rate of every link between the emulated cluster's hosts, in 1e9 bits/s of payload.",
        PIPELINE,
        default="the cluster's",
    ),
]
DrafterOn = Annotated[
    tuple[str, ...],
    Option(
        "Where the drafter runs: engine, first-stage, last-stage, a host, or a cluster's device; several are compared.",
        PIPELINE,
        metavar="PLACE,...",
        default="the cluster's",
        parse=split_entries,
    ),
]
FiguresFile = Annotated[
    Path | None, Option("Write settings and figures as JSON.", OUTPUT, names=("--json",), metavar="FILE", default="")
]
ReportFolder = Annotated[
    Path | None,
    Option("Write report.md with tables and plots, and all figures as JSON.", OUTPUT, metavar="DIR", default=""),
]
RecordedModel = Annotated[
    str | None,
    Option("Refuse recordings of another target model or tokenizer than this checkpoint's.", MODEL, default="any"),
]
RecordedDraft = Annotated[
    str | None,
    Option("Refuse recordings of another draft model or tokenizer than this checkpoint's.", MODEL, default="any"),
]


def check_written(options: object, *names: str) -> None:
    """Raise FieldError for a file to write, one of the options ``names``, that cannot be written."""
    for name in names:
        file: Path | None = getattr(options, name)
        if file is not None:
            check_writable(name, file)


# -------------------------------------------------------------------------------------------------------------- prompts
# Prompt files: a JSON object in each line, with ``prompt``, or with ``turns`` as in MT-Bench's question.jsonl.

DEFAULT_PROMPTS = DEMO / "prompts.jsonl"
"""The prompts of a bench that names no file."""

Turns = tuple[str, ...]
"""The user's messages in order; an entry with ``prompt`` has one."""


def read_prompt_sets(paths: Sequence[Path], count: int) -> dict[str, list[Turns]]:
    """The first ``count`` entries of each file, by its name without suffix. Raises as ``read_turns`` does."""
    files: dict[str, Path] = {}
    for path in paths:
        if path.stem in files:
            raise ConfigError(f"prompts: {files[path.stem]} and {path} would both be called {path.stem!r}; rename one")
        files[path.stem] = path
    return {name: read_turns(path, count) for name, path in files.items()}


def read_prompts(path: Path, count: int) -> list[str]:
    """The first turn of each of the first ``count`` entries. Raises ConfigError as ``read_turns`` does."""
    return [turns[0] for turns in read_turns(path, count)]


def read_turns(path: Path, count: int) -> list[Turns]:
    """The first ``count`` entries. Raises ConfigError naming file, line and field."""
    return [turns_of(line, where) for where, line in prompt_lines(path)[:count]]


def prompt_lines(path: Path) -> list[tuple[str, str]]:
    """Each entry as (its place in words, its line). Raises ConfigError for a file that has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts: {path} is no UTF-8 text: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts: {path} holds no prompt")
    return [(f"{path}, line {number}", line) for number, line in numbered]


def turns_of(line: str, where: str) -> Turns:
    """The turns of a line; ``where`` is its place in words. Raises ConfigError for another form."""
    try:
        entry: Any = from_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: is not an object with a field 'prompt' or 'turns'")
    turns = [entry["prompt"]] if isinstance(entry.get("prompt"), str) else entry.get("turns")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ConfigError(f"{where}: needs a field 'prompt' (text) or 'turns' (a list of texts)")
    if any(map(lone_surrogate, turns)):
        raise ConfigError(f"{where}: {HALF}")
    return tuple(turns)


# ----------------------------------------------------------------------------------------------------------------- grid
# All questions of a bench: prompt sets x temperatures x seeds, in an order that spreads disturbances over all of them.

MOST_SEEDS: Final = 10_000
"""Most runs of each prompt, which are all listed before the first."""
WARM_UP: Final = 4
"""Tokens of the request with which each strategy begins, and which does not count. The first batches of an engine are
slower than later ones."""


@dataclass(frozen=True)
class Setting:
    """A setting for which results are reported: one prompt set at one temperature."""

    prompt_set: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.prompt_set}, T = {self.temperature:g}"


@dataclass(frozen=True)
class Question:
    """One request of a bench, for every strategy. ``number``: the prompt's index; ``turn``: its turn's, from 0."""

    setting: Setting
    number: int
    prompt: Prompt
    params: SamplingParams
    turn: int = 0

    @property
    def prompt_sha256(self) -> str:
        """The key by which two bench files find the same prompt: the first 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Conversation:
    """An entry of a prompt set: the user's messages, turn by turn, and how the answers are sampled."""

    setting: Setting
    number: int
    turns: Turns
    params: SamplingParams

    def question(self, turn: int, prompt: Prompt) -> Question:
        """The request of a turn, whose ``prompt`` holds the turns and answers before it as well."""
        return Question(self.setting, self.number, prompt, self.params, turn)

    @property
    def opening(self) -> Question:
        """The first turn as a text to be continued."""
        return self.question(0, self.turns[0])


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The numbers in ``0,0.6,1``. Raises FieldError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FieldError("temperature", f"is {text!r}; it has to be a number, or several with commas") from None


def conversations_of(
    sets: Mapping[str, Sequence[Turns]],
    temperatures: Sequence[float],
    seeds: int,
    params: SamplingParams,
    seeds_at_zero: int,
) -> list[Conversation]:
    """One conversation per prompt, temperature and seed; at temperature 0 with ``seeds_at_zero`` seeds.

    The prompt ``number`` of a set begins with seed ``params.seed + number`` and goes on with seeds that no other prompt
    of the set has had. The outermost loop is over seeds and the innermost over temperatures, so that every setting is
    measured throughout the bench.
    """
    assert params.seed is not None
    longest = max(map(len, sets.values()))
    found = []
    for repetition, number, (name, prompts), temperature in product(
        range(seeds), range(longest), sets.items(), temperatures
    ):
        if number < len(prompts) and (temperature > 0 or repetition < seeds_at_zero):
            seed = params.seed + repetition * len(prompts) + number
            one = replace(params, temperature=temperature, seed=seed)
            found.append(Conversation(Setting(name, temperature), number, prompts[number], one))
    return found


def short(params: SamplingParams) -> SamplingParams:
    """The same request with ``WARM_UP`` tokens only."""
    return SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=WARM_UP, ignore_eos=True)


def settings_of(questions: Sequence[Question]) -> list[Setting]:
    """The settings of the questions, in order, each once."""
    return list(dict.fromkeys(question.setting for question in questions))


def check_lengths(llm: LLM, questions: Sequence[Question]) -> None:
    """Raise FieldError, naming set and prompt, for a question that does not fit, before anything is decoded."""
    for question in questions:
        if not fits(llm, question):
            raise FieldError(
                "prompts",
                f"{place_of(question)} and max_tokens "
                f"{question.params.max_tokens} exceed max_model_len {llm.setup.max_model_len}; shorten one",
            )


def fits(llm: LLM, question: Question) -> bool:
    """Whether prompt and output fit into the model's context."""
    return len(token_ids_of(llm, question)) + question.params.max_tokens <= llm.setup.max_model_len


def token_ids_of(llm: LLM, question: Question) -> list[int]:
    """The prompt's token ids."""
    if isinstance(question.prompt, str):
        return llm.get_tokenizer().encode(question.prompt)
    return list(question.prompt["prompt_token_ids"])


def place_of(question: Question) -> str:
    """The question in words, for errors and remarks: ``prompt 3 of mt_bench, turn 2``."""
    later = f", turn {question.turn + 1}" if question.turn else ""
    return f"prompt {question.number + 1} of {question.setting.prompt_set}{later}"


# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock bench``, checked before anything starts.

OF_ONE_ENGINE: Final = ("cluster", "drafter_on", "peer", "report", "record")
"""Fields that cannot be set with several engines: their measurements follow one engine, request by request."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The strategies to compare, the engine, and the prompts.

    Raises FieldError for a value out of range, and options that exclude each other.
    """

    strategies: Annotated[
        tuple[str, ...],
        Option(
            f"{', '.join(STRATEGIES)}; each with options of its own in brackets, for example "
            "pipedec[width=16],pipedec[width=64].",
            SPECULATION,
            metavar="A,B[option=value,...],...",
            parse=split_entries,
            values=tuple(STRATEGIES),
        ),
    ] = (PLAIN, "auto")
    speculative_config: Mapping[str, Any] | None = None
    """The drafter, and options of all strategies that have them."""
    speculative_slots: SpeculativeSlots = EngineOptions.speculative_slots
    model: ModelName = EngineOptions.model
    dtype: Dtype = EngineOptions.dtype
    quantization: Quantization = EngineOptions.quantization
    peer: Annotated[
        tuple[str, ...],
        Option(
            "hf (transformers' generate), llama.cpp, or llama.cpp-native (built for this processor: make peers): the "
            "same model, prompts, tokens and threads, in the same run.",
            MODEL,
            metavar="NAME,...",
            default="none",
            parse=split_entries,
        ),
    ] = ()
    cluster: Annotated[str | None, CLUSTER] = None
    hosts: Hosts = None
    keys: KeysFolder = None
    insecure: Insecure = False
    threads: Threads = None
    pipeline_parallel_size: Stages = None
    data_parallel_size: ReplicaCount = 1
    time_scale: Annotated[
        float | None,
        Option(
            "Factor on all modelled times, for a host that is too slow for them.", PIPELINE, default="the cluster's"
        ),
    ] = None
    bandwidth_gbit_s: Bandwidth = None
    drafter_on: DrafterOn = ()
    prompts: Annotated[
        tuple[Path, ...],
        Option(
            "One JSON object a line, with 'prompt' or, to follow as a conversation, 'turns'. May be repeated: a prompt "
            "set each.",
            SAMPLING,
            metavar="FILE.jsonl",
            default="the package's own",
        ),
    ] = (DEFAULT_PROMPTS,)
    raw: Annotated[
        bool, Option("Continue prompts as they stand, with chat models too; of turns the first.", SAMPLING)
    ] = False
    num_prompts: Annotated[int, Option("Number of prompts that are used of each file.", SAMPLING)] = 4
    max_tokens: Annotated[int, Option("Most tokens per prompt.", SAMPLING)] = 64
    temperature: Annotated[
        tuple[float, ...],
        Option(
            "Temperatures, each of which is measured; 0 is greedy.",
            SAMPLING,
            metavar="T,T,...",
            parse=parse_temperatures,
        ),
    ] = (0.0,)
    top_p: Annotated[
        float, Option("Keep the most probable tokens that together have this probability; 1 is off.", SAMPLING)
    ] = 1.0
    top_k: Annotated[int, Option("Keep this many of the most probable tokens; 0 is off.", SAMPLING)] = 0
    seed: Annotated[int, Option("Seed of the first prompt; each further prompt has the next one.", SAMPLING)] = 0
    seeds: Annotated[int, Option("Number of times that each prompt is run, each with another seed.", SAMPLING)] = 1
    json: FiguresFile = None
    report: ReportFolder = None
    record: Annotated[
        Path | None,
        Option(
            "Record target's and draft model's distributions on the texts; see penstock acceptance.",
            OUTPUT,
            metavar="FILE.safetensors",
            default="",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(bool(self.strategies), "strategies", self.strategies, "at least one name")
        check(bool(self.prompts), "prompts", self.prompts, "at least one file")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.max_tokens >= 2, "max_tokens", self.max_tokens, "at least 2: the first token is the prompt's")
        check(1 <= self.seeds <= MOST_SEEDS, "seeds", self.seeds, f"1 to {MOST_SEEDS:,}")
        for name in ("strategies", "temperature", "drafter_on", "peer"):
            values = getattr(self, name)
            check(len(set(values)) == len(values), name, ",".join(map(str, values)), "different ones")
        check(self.data_parallel_size >= 1, "data_parallel_size", self.data_parallel_size, "at least 1")
        wanted = "left out with data_parallel_size: its figures are one engine's"
        for name in OF_ONE_ENGINE if self.data_parallel_size > 1 else ():
            check(not getattr(self, name), name, getattr(self, name), wanted)
        check_written(self, "json")
