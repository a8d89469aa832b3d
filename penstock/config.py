"""Typed configuration: tables read from TOML or JSON become frozen dataclasses, or an error that names the field.

``parse`` is the one way in. A dataclass's own ``__post_init__`` checks values with ``check`` and knows nothing of where
it stands in the file; ``parse`` puts the path in front: ``stages[2].layers is 0; it has to be at least 1``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from penstock.core import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)

SCALARS: Final[dict[Any, str]] = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class FieldError(ConfigError):
    """A field that cannot be used. ``field`` is its full path, ``problem`` what is wrong and what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


def check(holds: bool, field: str, value: object, wanted: str) -> None:
    """Raise FieldError saying what ``field`` has to be, unless ``holds``."""
    if not holds:
        raise FieldError(field, f"is {value!r}; it has to be {wanted}")


def check_positive(config: DataclassInstance, *names: str, or_zero: bool = False) -> None:
    """Raise FieldError unless each named field is None, or finite and above 0 (``or_zero``: 0 or above)."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            holds = math.isfinite(value) and (value > 0 or (or_zero and value == 0))
            check(holds, name, value, "0 or above" if or_zero else "above 0")


def nearest(name: str, known: Iterable[str]) -> str:
    """Words for an error about an unknown name: the nearest known one, if any is near, then all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError naming the file, and line and column where it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def parse(kind: type[Config], table: object, where: str = "") -> Config:
    """Make the dataclass ``kind`` of a table; ``where`` is the table's own path, for errors.

    Fields may be str, int, float, bool, Literal, tuple[T, ...], dict[str, T], dataclasses and unions of these; an
    integer stands for a float, nothing else is converted. Raises FieldError for a key that is unknown (with the nearest
    known one), missing, of the wrong type, or refused by the dataclass itself.
    """
    if not isinstance(table, Mapping):
        raise FieldError(where or "configuration", wrong_type(kind, table))
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in table:
        if key not in fields:
            raise FieldError(join(where, str(key)), f"is unknown; {nearest(str(key), fields)}")
    for name, field in fields.items():
        if name not in table and field.default is field.default_factory is dataclasses.MISSING:
            raise FieldError(join(where, name), "is missing")
    values = {key: convert(hints[key], value, join(where, key)) for key, value in table.items()}
    try:
        return kind(**values)
    except FieldError as error:
        raise FieldError(join(where, error.field), error.problem) from None


def convert(hint: Any, value: Any, where: str) -> Any:
    """Turn one value into what ``hint`` asks for, or raise FieldError."""
    arm = next((arm for arm in arms(hint) if fits(arm, value)), None)
    if arm is None:
        raise FieldError(where, wrong_type(hint, value))
    origin, arguments = typing.get_origin(arm), typing.get_args(arm)
    if origin is tuple:
        return tuple(convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        return {str(key): convert(arguments[1], item, join(where, str(key))) for key, item in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise FieldError(where, f"is {value!r}; {nearest(value, arguments)}")
        return value
    if dataclasses.is_dataclass(arm) and isinstance(arm, type):
        return value if isinstance(value, arm) else parse(arm, value, where)
    return float(value) if arm is float else value


def arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other hint is its own only one."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def fits(arm: Any, value: object) -> bool:
    """Whether a value has the outer shape that one alternative of a hint asks for."""
    origin = typing.get_origin(arm)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is dict:
        return isinstance(value, Mapping)
    if origin is Literal:
        return isinstance(value, str)
    if dataclasses.is_dataclass(arm) and isinstance(arm, type):
        return isinstance(value, Mapping | arm)
    if arm is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is arm  # exact: true is no integer


def wrong_type(hint: Any, value: object) -> str:
    expected = " or ".join(describe(arm) for arm in arms(hint) if arm is not types.NoneType)
    return f"is {describe(type(value))} ({reprlib.repr(value)}); expected {expected}"


def describe(arm: Any) -> str:
    """What people call a type: found in a file, or asked for by a field."""
    origin = typing.get_origin(arm) or arm
    if origin in (tuple, list):
        return "a list"
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(arm)))
    if origin is dict or dataclasses.is_dataclass(origin):
        return "a table"
    return SCALARS.get(origin) or ("nothing" if origin is types.NoneType else origin.__name__)


def join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


# ------------------------------------------------------------------------------------------------------ speculation

Method = Literal["draft_model", "eagle", "eagle3", "early_exit", "medusa", "ngram", "spd", "synthetic"]
Strategy = Literal["auto", "continuous", "flowspec", "pipedec", "static_tree", "autoregressive"]

METHOD_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "draft_model": ("model",),
    "eagle": ("model",),
    "eagle3": ("model",),
    "early_exit": ("model",),
    "medusa": ("model",),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "spd": ("model", "feature_lag", "post_state"),
    "synthetic": ("accuracy", "seed"),
}
LEARNED: Final = ("eagle", "eagle3", "early_exit", "medusa", "spd")
"""Methods whose module reads the target's own hidden states."""
STRATEGY_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "auto": {"width": 128, "children": 16, "in_flight_correction": True},
    "continuous": {"width": 128, "children": 16, "in_flight_correction": True},
    "flowspec": {
        "tree_size": 80,
        "tree_depth": 6,
        "segment": 16,
        "children": 10,
        "expansion_depth": 6,
        "expand": True,
        "score_order": True,
    },
    "pipedec": {"width": 32, "children": 16},
    "static_tree": {"tree_size": 64, "tree_depth": 6, "children": 16},
    "autoregressive": {},
}
"""Each strategy's own options and their defaults: those of the papers where the strategy is a paper's."""
WHOLE_TREES: Final = ("flowspec", "static_tree")
"""Strategies that draft several layers of a tree before they send the first."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Who drafts (``method``) and which drafted nodes enter the pipeline (``strategy``). Raises FieldError."""

    method: Method = "ngram"
    """``draft_model``: a small model; ``eagle`` (1 and 2), ``eagle3``, ``medusa``, ``spd``, ``early_exit``: a module
    trained on the target's own states; ``ngram``: prompt lookup; ``synthetic``: knows the answer, measures engines."""
    model: str | None = None
    """Folder or hub name of the small model, whose tokenizer has to be the target's, or of the learned drafter; those
    that come with the package's own target need none."""
    strategy: Strategy = "auto"
    """``auto`` adapts to the pipeline, the drafter and the load; ``autoregressive`` drafts nothing."""
    width: int | None = None
    """pipedec: most nodes in one layer of the tree; auto and continuous: most rows that enter at a time."""
    children: int | None = None
    """Most children of one node: how many candidates the drafter gives."""
    in_flight_correction: bool | None = None
    """auto and continuous: whether a drafter that knows more of a node in flight than before corrects its children."""
    tree_size: int | None = None
    """static_tree, flowspec: nodes drafted before they are verified together (FlowSpec's L)."""
    tree_depth: int | None = None
    """static_tree, flowspec: layers of that tree (d0). vLLM's ``num_speculative_tokens`` is accepted for it."""
    segment: int | None = None
    """flowspec: most rows that enter at a time while a new tree is sent (L_max)."""
    expansion_depth: int | None = None
    """flowspec: layers of the tree that grows from a new root (d_exp)."""
    expand: bool | None = None
    """flowspec: whether the tree is expanded; without it the strategy is the paper's Pruned PP."""
    score_order: bool | None = None
    """flowspec: whether segments follow the score; without it they follow the layers."""
    prompt_lookup_max: int = 4
    """ngram: longest suffix of the text that is looked up in it (vLLM's name)."""
    prompt_lookup_min: int = 1
    """ngram: shortest such suffix (vLLM's name)."""
    feature_lag: int = 0
    """spd: batches by which every token counts as less far than it is, so that drafting waits for no feature."""
    post_state: bool = False
    """spd: whether a token has to have passed the first stage before the module looks at it (SPD, section 4.4)."""
    accuracy: tuple[float, ...] | None = None
    """synthetic: chance that the target's token is among the first 1, 2, ... candidates."""
    seed: int = 0
    """synthetic: decides which drafts are right."""

    def __post_init__(self) -> None:
        for option, default in STRATEGY_OPTIONS[self.strategy].items():
            if getattr(self, option) is None:
                object.__setattr__(self, option, default)
        positive = ("width", "children", "tree_size", "tree_depth", "segment", "expansion_depth")
        check_positive(self, *positive, "prompt_lookup_max", "prompt_lookup_min")
        check(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            self.prompt_lookup_min,
            f"at most prompt_lookup_max, {self.prompt_lookup_max}",
        )
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        check_positive(self, "feature_lag", or_zero=True)
        if self.method == "draft_model" and not self.model:
            raise FieldError("model", "is missing: method 'draft_model' needs the small model's folder or name")
        check_timing(self)
        if self.method == "synthetic" and self.accuracy is None:
            raise FieldError("accuracy", "is missing: method 'synthetic' needs it, for example [0.7, 0.8, 0.85]")
        if self.accuracy is not None:
            check_accuracy(self.accuracy)

    @property
    def most_rows(self) -> int:
        """Most nodes that the strategy would have enter together, or as one tree; 0 where nothing is drafted."""
        return self.width or self.tree_size or 0


def check_timing(config: SpeculativeConfig) -> None:
    """Raise FieldError where the drafter waits for nodes to enter and the strategy for the drafter."""
    timing = "method 'early_exit'" if config.method == "early_exit" else "post_state" if config.post_state else None
    if timing is not None and config.strategy in WHOLE_TREES:
        raise FieldError(
            "strategy",
            f"is {config.strategy!r}, which drafts a tree before any of it enters, but with {timing} a token has to "
            "have passed a stage before anything follows it; use auto, continuous or pipedec",
        )


def check_accuracy(accuracy: tuple[float, ...]) -> None:
    """Raise FieldError unless the profile is one: cumulative chances for 1, 2, ... candidates."""
    holds = bool(accuracy) and all(0.0 <= chance <= 1.0 for chance in accuracy) and list(accuracy) == sorted(accuracy)
    check(holds, "accuracy", list(accuracy), "a list of chances between 0 and 1, none below the one before it")


def parse_speculative(table: Mapping[str, Any]) -> SpeculativeConfig:
    """Make the configuration of the user's ``speculative_config``.

    Raises FieldError for what ``parse`` refuses, and for an option that the chosen method or strategy would ignore.
    """
    strategy = convert(Strategy, table.get("strategy", SpeculativeConfig.strategy), "strategy")
    rest = {key: value for key, value in table.items() if key != "strategy"}
    return parse_speculative_for(rest, [strategy])[0]


def parse_speculative_for(table: Mapping[str, Any], strategies: Sequence[str]) -> tuple[SpeculativeConfig, ...]:
    """One configuration per strategy, to compare them with the same drafter: ``table`` holds all their options.

    Raises FieldError as ``parse_speculative`` does; an option has to belong to at least one of the strategies.
    """
    if "strategy" in table:
        raise FieldError("strategy", f"is set beside a list of strategies ({', '.join(strategies)}); remove one")
    for strategy in strategies:
        convert(Strategy, strategy, "strategy")
    options = with_our_names(table, strategies)
    refuse_ignored(options, strategies)
    return tuple(parse(SpeculativeConfig, {**options, "strategy": strategy}) for strategy in strategies)


def with_our_names(table: Mapping[str, Any], strategies: Sequence[str]) -> dict[str, Any]:
    """Replace vLLM's ``num_speculative_tokens``, the depth of what is drafted at a time, by ``tree_depth``."""
    options = dict(table)
    if "num_speculative_tokens" in options:
        if not any("tree_depth" in STRATEGY_OPTIONS[strategy] for strategy in strategies):
            raise FieldError("num_speculative_tokens", f"means nothing to {words(strategies)}; {remedy(strategies)}")
        if "tree_depth" in options:
            raise FieldError("num_speculative_tokens", "is another name of tree_depth, which is set too; remove one")
        options["tree_depth"] = options.pop("num_speculative_tokens")
    return options


def refuse_ignored(options: Mapping[str, Any], strategies: Sequence[str]) -> None:
    """Raise FieldError for an option that is another method's, another strategy's, or a drafter's where none drafts."""
    method = convert(Method, options.get("method", SpeculativeConfig.method), "method")
    drafting = any(STRATEGY_OPTIONS[strategy] for strategy in strategies)
    for option in options:
        of_methods = [name for name, names in METHOD_OPTIONS.items() if option in names]
        of_strategies = [name for name, names in STRATEGY_OPTIONS.items() if option in names]
        if (of_methods or option == "method") and not drafting:
            raise FieldError(option, "means nothing to strategy 'autoregressive', which drafts nothing; remove it")
        if of_methods and method not in of_methods:
            raise FieldError(option, f"belongs to method {of_methods[0]!r}, not {method!r}; remove it or set method")
        if of_strategies and not set(of_strategies) & set(strategies):
            raise FieldError(
                option, f"belongs to {words(of_strategies)}, not {words(strategies)}; {remedy(strategies)}"
            )


def words(strategies: Sequence[str]) -> str:
    return "strategy " + " or ".join(map(repr, strategies))


def remedy(strategies: Sequence[str]) -> str:
    """What to write instead: the options that the strategies do have."""
    own = dict.fromkeys(option for strategy in strategies for option in STRATEGY_OPTIONS[strategy])
    return f"remove it or use {', '.join(own)}" if own else "remove it"
