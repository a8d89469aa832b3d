"""``speculative_config``: the drafter, the strategy that says which drafted nodes enter, and the options of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Final

from penstock.config import FieldError, Registry, known_name, nearest, parse
from penstock.drafters.base import DRAFTERS, DrafterOptions
from penstock.drafters.merged import NgramOptions
from penstock.strategies.base import STRATEGIES, Autoregressive, Strategy, StrategyOptions

TABLE: Final = "speculative_config"
"""The user's name of the table that is parsed here."""
LOOKUP: Final = "ngram"
"""The method that may draft beside another one."""
DEFAULT_METHOD: Final = LOOKUP
"""The method where neither ``method`` nor ``model`` is given."""
PAIR: Final = "demo"
"""The target that ships with a draft model of the same name, which is its drafter unless another one is named."""
PARALLEL: Final = ("dflash", "dspark", "headrace", "jetspec", "peagle")
"""Methods that draft several levels in one pass, which vLLM calls parallel drafting."""
DEFAULT_STRATEGY: Final = "auto"
"""The strategy where none is given."""


@dataclass(frozen=True, init=False)
class SpeculativeConfig:
    """The drafter and the strategy, by default prompt lookup and ``auto``.

    ``method`` is one name, or two of which one is "ngram": then prompt lookup drafts beside the other method.
    ``options`` are those of the methods and the strategy together. Raises FieldError, naming the field, for a name that
    is unknown, an option that none of them has, a value that cannot be used, and a strategy that drafts whole trees
    before it sends them, with a drafter that has to see each token pass a stage.
    """

    method: str
    """Name of the drafter, one of ``penstock.drafters.base.DRAFTERS``."""
    lookup: NgramOptions | None
    """Prompt lookup's options where it drafts beside ``method``; None where it does not."""
    strategy: str
    """Name of the strategy, which says which nodes are drafted from and which enter, one of
    ``penstock.strategies.base.STRATEGIES``."""
    drafter_options: DrafterOptions
    """The method's options: those given, defaults for the others."""
    strategy_options: StrategyOptions
    """The strategy's options: those given, defaults for the others."""

    def __init__(
        self, *, method: str | Sequence[str] = DEFAULT_METHOD, strategy: str = DEFAULT_STRATEGY, **options: Any
    ) -> None:
        name, beside = methods_of(method)
        drafter = DRAFTERS[name]
        chosen = STRATEGIES[known_name(strategy, STRATEGIES, "strategy")]
        refuse_ignored(options, [name, *beside], [strategy])
        lookup = parse(NgramOptions, only(options, NgramOptions)) if beside else None
        # The dataclass is frozen, and its constructor's arguments are not its fields.
        object.__setattr__(self, "method", name)
        object.__setattr__(self, "lookup", lookup)
        object.__setattr__(self, "strategy", strategy)
        object.__setattr__(self, "drafter_options", parse(drafter, only(options, drafter)))
        object.__setattr__(self, "strategy_options", parse(chosen, only(options, chosen)))
        self._check_order()

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all drafters: ``method``, and "ngram" where prompt lookup drafts beside it."""
        return (self.method,) if self.lookup is None else (self.method, LOOKUP)

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return self.strategy_options.drafts

    def with_options(self, options: Mapping[str, Any]) -> SpeculativeConfig:
        """A copy with these options replaced. Raises FieldError as the constructor does."""
        given = {**values_of(self.drafter_options), **values_of(self.strategy_options), **options}
        if self.lookup is not None:
            given = {**values_of(self.lookup), **given}
        return SpeculativeConfig(method=self.methods, strategy=self.strategy, **given)

    def _check_order(self) -> None:
        """Raise FieldError where drafter and strategy would wait for each other.

        The drafter needs nodes to have entered, and the strategy enters none before the whole tree is drafted.
        """
        reason = self.drafter_options.needs_entered
        if reason is not None and self.strategy_options.drafts_whole_trees:
            raise FieldError(
                "strategy",
                f"is {self.strategy!r}, which drafts a tree before any of it enters, but with {reason} a token has to "
                "have passed a stage before anything follows it; use auto, continuous or pipedec",
            )


def make_strategy(config: SpeculativeConfig | None, stages: int) -> Strategy:
    """A fresh strategy for one request over ``stages`` stages; plain decoding where ``config`` is None."""
    return config.strategy_options.make(stages) if config is not None else Autoregressive()


def parse_speculative(table: Mapping[str, Any], target: str = "") -> SpeculativeConfig:
    """Make the configuration of the user's ``speculative_config`` for the model ``target``.

    Raises FieldError as ``SpeculativeConfig`` does, and for a drafter's option where nothing drafts.
    """
    rest = dict(table)
    with of_table(*table):
        return parse_speculative_for(rest, [rest.pop("strategy", DEFAULT_STRATEGY)], target)[0]


@contextmanager
def of_table(*options: str) -> Iterator[None]:
    """Have errors that are raised in the block name the table with these options.

    A strategy that is not in the table keeps its bare name, since a flag or a list gave it.
    """
    try:
        yield
    except FieldError as error:
        name, bracket, within = error.field.partition("[")
        # vLLM's names were replaced before the error arose.
        given = {"tree_depth": "num_speculative_tokens", "method": "parallel_drafting"}.get(name, name)
        if name not in options and given in options:
            name = given
        if name.startswith(f"{TABLE}.") or (name == "strategy" and name not in options):
            raise
        raise FieldError(f"{TABLE}.{name}{bracket}{within}", error.problem) from None


def parse_speculative_for(
    table: Mapping[str, Any], strategies: Sequence[str], target: str = ""
) -> tuple[SpeculativeConfig, ...]:
    """One configuration per strategy, to compare them with the same drafter: ``table`` holds all their options.

    Raises FieldError as ``parse_speculative`` does; an option has to belong to at least one of the strategies.
    """
    with of_table(*table):
        return _parsed(table, strategies, target)


def _parsed(table: Mapping[str, Any], strategies: Sequence[str], target: str) -> tuple[SpeculativeConfig, ...]:
    """``parse_speculative_for``, whose errors name the options as the table has them."""
    if "strategy" in table:
        raise FieldError("strategy", f"is set beside a list of strategies ({', '.join(strategies)}); remove one")
    for strategy in strategies:
        known_name(strategy, STRATEGIES, "strategy")
    options = with_our_names(table, strategies)
    if not any(STRATEGIES[strategy].drafts for strategy in strategies):
        refuse_drafting(options, strategies)
    else:
        options = with_drafter(options, target)
    method, beside = methods_of(options.pop("method", DEFAULT_METHOD))
    methods = [method, *beside]
    refuse_ignored(options, methods, strategies)
    drafting = {name: value for one in methods for name, value in only(options, DRAFTERS[one]).items()}
    return tuple(
        SpeculativeConfig(method=methods, strategy=strategy, **drafting, **only(options, STRATEGIES[strategy]))
        for strategy in strategies
    )


def with_drafter(options: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The options with the drafter filled in: that of the named model, or the draft model shipped with the target."""
    named = dict(options)
    method = named.get("method", "draft_model")
    small_model = "draft_model" in (method if isinstance(method, list | tuple) else [method])
    if target == PAIR and "model" not in named and small_model:
        named["model"] = PAIR
    # A named model's files say which kind of drafter it is.
    if small_model and isinstance(named.get("model"), str):
        from penstock.checkpoint.look import method_of

        kind = method_of(named["model"])
        if "method" in named and kind != "draft_model" and kind in list(DRAFTERS):
            raise FieldError("method", f"is {method!r}, the checkpoint is of kind {kind!r}: name that")
        named.setdefault("method", kind)
    elif "model" in named:
        named.setdefault("method", "draft_model")  # a model that is no text is refused under its own name
    return named


def methods_of(method: object) -> tuple[str, list[str]]:
    """The method, and ["ngram"] where prompt lookup drafts beside it, else []. Raises FieldError for any other pair."""
    if not isinstance(method, list | tuple):
        return known_name(method, DRAFTERS, "method"), []
    names = [known_name(name, DRAFTERS, "method") for name in method]
    others = [name for name in names if name != LOOKUP]
    if not names or len(set(names)) < len(names) or len(others) > 1:
        raise FieldError("method", f"is {list(method)}; name one method, or one and {LOOKUP!r} beside it")
    return (others or names)[0], [LOOKUP] if len(names) > 1 else []


def with_our_names(table: Mapping[str, Any], strategies: Sequence[str]) -> dict[str, Any]:
    """Replace vLLM's ``num_speculative_tokens``, the depth of what is drafted at a time, by ``tree_depth``, and its
    ``parallel_drafting`` by the method that it stands for."""
    options = dict(table)
    parallel = options.pop("parallel_drafting", False)
    if not isinstance(parallel, bool):
        raise FieldError("parallel_drafting", f"is {parallel!r}; it has to be true or false")
    if parallel:
        options = in_parallel(options)
    if "num_speculative_tokens" in options:
        if not any("tree_depth" in names_of(STRATEGIES[strategy]) for strategy in strategies):
            raise FieldError("num_speculative_tokens", f"means nothing to {words(strategies)}; {remedy(strategies)}")
        if "tree_depth" in options:
            raise FieldError("num_speculative_tokens", "is another name of tree_depth, which is set too; remove one")
        options["tree_depth"] = options.pop("num_speculative_tokens")
    return options


def in_parallel(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the method that vLLM's ``parallel_drafting`` means: P-EAGLE, if it is eagle3 or not given.

    Raises FieldError if the method, or the kind of the model that is named, has no modules that draft so.
    """
    from penstock.checkpoint.look import DRAFT_MODEL, method_of

    method, model = options.get("method"), options.get("model")
    told = method_of(model) if isinstance(model, str) else DRAFT_MODEL
    # A hub id, and a model that says nothing of itself, may be one.
    if told not in (*PARALLEL, DRAFT_MODEL):
        raise FieldError("parallel_drafting", f"is true, but {model!r} is a checkpoint of kind {told!r}: remove it")
    if method is None:
        return {**options, "method": told if told in PARALLEL else "peagle"}
    named = method if isinstance(method, list | tuple) else [method]
    named = ["peagle" if one == "eagle3" else one for one in named]
    serial = [one for one in named if one in list(DRAFTERS) and one not in (*PARALLEL, LOOKUP)]
    if serial or named == [LOOKUP]:
        raise FieldError(
            "parallel_drafting",
            f"is true, as P-EAGLE's modules draft, but method is {(serial or named)[0]!r}: remove it",
        )
    return {**options, "method": named if isinstance(method, list | tuple) else named[0]}


def refuse_drafting(options: Iterable[str], strategies: Sequence[str]) -> None:
    """Raise FieldError for an option of a drafter: these strategies draft nothing."""
    for option in options:
        if option == "method" or owners(DRAFTERS, option):
            raise FieldError(option, f"means nothing to {words(strategies)}, which drafts nothing; remove it")


def refuse_ignored(options: Iterable[str], methods: Sequence[str], strategies: Sequence[str]) -> None:
    """Raise FieldError for an option that is unknown, another method's, or another strategy's."""
    for option in options:
        of_methods, of_strategies = owners(DRAFTERS, option), owners(STRATEGIES, option)
        if not of_methods and not of_strategies:
            known = (names_of(kind) for kind in [*DRAFTERS.values(), *STRATEGIES.values()])
            names = dict.fromkeys(chain(["method", "strategy"], *known))
            raise FieldError(str(option), f"is unknown; {nearest(str(option), names)}")
        if of_methods and not set(of_methods) & set(methods):
            given, own = " and ".join(map(repr, methods)), ", ".join(map(repr, of_methods))
            kinds = "methods" if len(of_methods) > 1 else "method"
            raise FieldError(option, f"belongs to {kinds} {own}, not {given}; remove it or set method")
        if of_strategies and not set(of_strategies) & set(strategies):
            raise FieldError(
                option, f"belongs to {words(of_strategies)}, not {words(strategies)}; {remedy(strategies)}"
            )


def owners(registry: Registry[Any], option: str) -> list[str]:
    """The names in a registry whose options include one of this name."""
    return [name for name, kind in registry.items() if option in names_of(kind)]


def names_of(kind: type[Any]) -> list[str]:
    """The options that a drafter's or strategy's file declares."""
    return [field.name for field in fields(kind)]


def values_of(options: Any) -> dict[str, Any]:
    """A drafter's or strategy's options by name."""
    return {name: getattr(options, name) for name in names_of(type(options))}


def only(options: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The options that belong to one drafter or strategy."""
    return {name: options[name] for name in names_of(kind) if name in options}


def words(strategies: Sequence[str]) -> str:
    """The strategies' names for an error, like "strategy 'auto' or 'pipedec'"."""
    return "strategy " + " or ".join(map(repr, strategies))


def remedy(strategies: Sequence[str]) -> str:
    """The end of an error: what to write instead, which is one of the strategies' own options."""
    own = dict.fromkeys(chain.from_iterable(names_of(STRATEGIES[strategy]) for strategy in strategies))
    return f"remove it or use {', '.join(own)}" if own else "remove it"
