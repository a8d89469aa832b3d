"""`auto` against the better of always and never speculating where stages are shared or full, simulated.

    python -m benchmarks.strategies.never_slower [--only WORD ...] [--jobs N]

Each case runs plain decoding (never), `continuous` (always) and `auto` on the same script in virtual time. The ratio is
the speed of `auto` over that of the better of the two; the regret is the time that `auto` took longer than plain
decoding, in plain tokens of every request. ``--only`` selects cases whose names hold every word. All cases together are
written to benchmarks/measured/strategies/never_slower.json, and what that file had of each is printed beside it.

Stages share a host with a core each, with one core, with memory that feeds 1.3 of them, or with another process. Rows
cost nothing up to a hundred ("free rows"), or time from the third one on, as on processors ("dear rows"). Drafters are
a model on a device of its own, or cost nothing, as prompt lookup; they are right as often as a profile says, never, or
only in one half. Loads come and go. Serving keeps more requests running than there are stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from benchmarks.papers import pp_eagle_table, pp_many
from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.estimates.estimates import Estimates
from penstock.estimates.times import TAKEN
from penstock.lab.script import MISSED, Script, profile_script
from penstock.lab.simulator import ScriptedDrafter, SharedHost, Timed, make_loop, scripted
from penstock.speculation import SpeculativeConfig, make_strategy

NAME, HOW = "never_slower", "Simulated"
DEAR_TFLOPS: Final = 0.135
"""Compute rate at which a stage of ``demo`` takes as long to compute 2.5 rows as to read its weights."""
PROFILES: Final[Mapping[str, tuple[float, ...]]] = {
    "good": (0.9, 0.95),
    "fair": ACCURACY,
    "poor": (0.3, 0.4),
    "wrong": (0.0, 0.0),
}
HOSTS: Final[Mapping[str, SharedHost]] = {
    "cores": SharedHost(cores=4),
    "one core": SharedHost(cores=1),
    "memory": SharedHost(cores=2, streams=1.3),
    "busy": SharedHost(cores=2, busy=((0.0, 1),)),
}
TEXTS, TOKENS = 4, 128
SHORT: Final = (24, 12)
"""Texts and tokens of short answers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``together``: requests that run at a time. ``free``: the drafter takes no time."""

    name: str
    cluster: Callable[[], Cluster]
    script: Callable[[], Script]
    host: SharedHost | None = None
    together: int = 1
    free: bool = False


def shared(stages: int, dear: bool) -> Cluster:
    """Stages like those of ``demo``; where rows are dear the drafter stays as it is."""
    cluster = uniform_cluster(load_cluster("demo"), stages)
    rate = {"compute_tflops": DEAR_TFLOPS} if dear else {}
    devices = [one if one.name == cluster.drafter else replace(one, **rate) for one in cluster.devices]  # type: ignore[arg-type]
    return replace(cluster, devices=tuple(devices))


def missing(script: Script, when: Callable[[int, float], bool]) -> Script:
    """The script with drafts that are never right where ``when`` (text, share of the text) says so."""
    picks = [
        tuple(MISSED if when(text, i / len(of_text)) else pick for i, pick in enumerate(of_text))
        for text, of_text in enumerate(script.picks)
    ]
    return replace(script, picks=tuple(picks))


def half_wrong(way: str, texts: int = TEXTS, tokens: int = TOKENS) -> Script:
    script = profile_script(PROFILES["good"], texts, tokens, seed=1)
    rules: dict[str, Callable[[int, float], bool]] = {
        "turns bad": lambda text, share: text >= texts // 2,
        "turns good": lambda text, share: text < texts // 2,
        "half of a text": lambda text, share: share >= 1 / 2,
        "every other text": lambda text, share: text % 2 == 0,
    }
    return missing(script, rules[way])


def cases() -> Iterator[Case]:
    for stages, dear, host, profile in product((1, 2, 4), (False, True), HOSTS, PROFILES):
        if stages != 2 and host not in ("cores", "one core")[:stages]:
            continue  # one stage computes alone
        rows = "dear" if dear else "free"
        cluster = partial(shared, stages, dear)
        for free in (False, True) if stages == 2 else (False,):
            of = f"{stages} stages, {rows} rows, {host}, {profile}" + (", lookup" if free else "")
            script = partial(profile_script, PROFILES[profile], TEXTS, TOKENS, 0)
            yield Case(name=of, cluster=cluster, script=script, host=HOSTS[host], free=free)
            if stages == 2 and host == "cores":
                script = partial(profile_script, PROFILES[profile], *SHORT, 0)
                yield Case(name=f"{of}, short", cluster=cluster, script=script, host=HOSTS[host], free=free)
    ways = ("turns bad", "turns good", "half of a text", "every other text")
    for dear, way, host, free in product((False, True), ways, ("cores", "one core"), (False, True)):
        of = f"2 stages, {'dear' if dear else 'free'} rows, {host}, {way}" + (", lookup" if free else "")
        yield Case(
            name=of, cluster=partial(shared, 2, dear), script=partial(half_wrong, way), host=HOSTS[host], free=free
        )
    for first, profile in product((0, 1), PROFILES):
        visited = SharedHost(cores=2, busy=((0.0, first), (30.0, 1 - first)))
        of = f"2 stages, free rows, a process {'goes' if first else 'comes'}, {profile}"
        script = partial(profile_script, PROFILES[profile], TEXTS, TOKENS, 0)
        yield Case(name=of, cluster=partial(shared, 2, False), script=script, host=visited)
    for together, profile, dear in product((2, 4, 8), PROFILES, (False, True)):
        of = f"2 stages, {'dear' if dear else 'free'} rows, one core, {profile}, {together} together"
        script = partial(profile_script, PROFILES[profile], 3 * together, 64, 0)
        yield Case(name=of, cluster=partial(shared, 2, dear), script=script, host=HOSTS["one core"], together=together)
    for together, profile in product((8, 16, 32), PROFILES):
        script = partial(profile_script, PROFILES[profile], 3 * together, 64, 0)
        cluster = partial(load_cluster, "flowspec-7b")
        yield Case(name=f"serving, {profile}, {together} together", cluster=cluster, script=script, together=together)
    for together in (64, 1024):
        script = partial(profile_script, pp_many.ACCURACY, together, 32, 0)
        cluster = partial(pp_eagle_table.cluster, 4, drafter=-1)
        yield Case(name=f"serving, four GPUs, {together} together", cluster=cluster, script=script, together=together)


def seconds(case: Case, strategy: str | None) -> float:
    """Virtual seconds of the whole script; None decodes plainly. Alone, a text counts from its first token on."""
    cluster, script = case.cluster(), case.script()
    config = None if strategy is None else SpeculativeConfig(strategy=strategy)
    loop = make_loop(cluster, script, config, case.together, host=case.host)
    if case.host is not None:  # an engine on processors begins with the same assumption
        loop.use_estimates(Estimates(contended=True, stages=len(cluster.stages), slowed=TAKEN))
    if case.free and config is not None:
        loop.drafter = ScriptedDrafter(script)
    runs: list[Timed] = []
    while loop.busy or len(runs) < len(script.picks):
        while len(loop.requests) < case.together and len(runs) < len(script.picks):
            runs.append(Timed(queued=loop.clock.now()))
            loop.add(scripted(script, len(runs) - 1, make_strategy(config, len(cluster.stages)), runs[-1]))
        loop.step()
    if case.together > 1:
        return max(run.moments[-1] for run in runs)
    return sum(run.moments[-1] - run.moments[0] for run in runs)


def compared(case: Case) -> dict[str, float]:
    never, always, auto = (seconds(case, strategy) for strategy in (None, "continuous", "auto"))
    script = case.script()
    plain = never / sum(len(picks) - 1 for picks in script.picks) * case.together
    return {
        "ratio": min(never, always) / auto,
        "over_plain": never / auto,
        "always": never / always,
        "regret": (auto - min(never, always)) / plain,
        "lost": (auto - never) / plain,
        "tokens": never / plain,
    }


def named(words: Sequence[str]) -> list[Case]:
    return [case for case in cases() if all(word in case.name for word in words)]


def main(benchmark: Benchmark) -> None:
    parser = benchmark.parser(jobs=2)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    before = kept_figures(NAME)
    chosen, found = named(options.only), dict[str, dict[str, float]]()
    with ProcessPoolExecutor(options.jobs) as pool:
        for case, one in zip(chosen, pool.map(compared, chosen), strict=True):
            found[case.name] = {name: round(value, 4) for name, value in one.items()}
            beside = f" (before {before[case.name]['ratio']:.3f})" if case.name in before else ""
            print(
                f"{case.name:62} ratio {one['ratio']:.3f}{beside}  over plain {one['over_plain']:.3f} "
                f"(always {one['always']:.3f})  lost {one['lost']:6.1f} of {one['tokens']:.0f} plain tokens",
                flush=True,
            )
    if not options.only:
        benchmark.keep(found)


if __name__ == "__main__":
    main(Benchmark(__file__, HOW))
