"""Simulations whose outcome can be said beforehand, and the same one beside the engine over a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from penstock.cluster import Cluster, draft_timing, load_cluster, plain_step_seconds, random_cluster, stage_timings
from penstock.core import FinishReason
from penstock.drafters.base import Draft, DraftRequest
from penstock.emulation.cluster import EmulatedDrafter
from penstock.engine.loop import Observer
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import ScriptedDrafter, Timed, busy_share, make_loop, scripted, simulate
from penstock.messages import Result, Sampling
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig, make_strategy
from penstock.strategies.base import STRATEGIES
from penstock.tree import Node

ALWAYS = (1.0,)


def chain(**options: int) -> SpeculativeConfig:
    return SpeculativeConfig(strategy="pipedec", width=1, children=1, **options)


def with_swift_drafter(cluster: Cluster) -> Cluster:
    """The same cluster with a drafter whose answers take next to no time."""
    devices = tuple(
        replace(device, weight_bandwidth_gb_s=1e9, compute_tflops=1e9, overhead_ms=0.0, pass_ms=None)
        if device.name == cluster.drafter
        else device
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def test_exclusive_links_cost_what_they_hold_up() -> None:
    """They cost nothing with one batch in flight, and with many batches the more, the longer transfers take."""
    longer = []
    for gbit_s in (100.0, 0.05):
        seconds = {}
        for exclusive in (False, True):
            links = {"exclusive": exclusive, "network": {"bandwidth_gbit_s": gbit_s}, "between": []}
            cluster = load_cluster("flowspec-7b", links=links)
            for speculation in (None, SpeculativeConfig(strategy="pipedec", width=16)):
                script = profile_script((0.7, 0.9), 1, 20, seed=0)
                (seconds[exclusive, speculation is None],) = simulate(cluster, script, speculation)
        assert seconds[True, True].seconds == pytest.approx(seconds[False, True].seconds)
        longer.append(seconds[True, False].seconds / seconds[False, False].seconds)
    assert 1 - 1e-9 <= longer[0] < 1.02 < longer[1]


@pytest.mark.parametrize("name", ["demo", "pipedec-14x3090", "spd-8"])
def test_plain_decoding_takes_a_trip_per_token(name: str) -> None:
    cluster = load_cluster(name)
    (found,) = simulate(cluster, profile_script(ALWAYS, 1, 6, seed=0), None)
    # Headers grow by the bytes of their numbers, which the price of a row rounds up.
    assert found.seconds / 5 == pytest.approx(plain_step_seconds(cluster), rel=0.01)
    assert found.stages_busy == pytest.approx(1 / len(cluster.stages), rel=0.05)
    assert (found.rows, found.drafter_busy) == (5, 0.0)


def test_results_of_a_tree_in_segments_count_when_all_are_back() -> None:
    """FlowSpec's naive PP with a drafter that is always right: tokens come by the round."""
    cluster, script = load_cluster("spd-4"), profile_script(ALWAYS, 1, 19, seed=0)
    tree = {"tree_size": 5, "tree_depth": 5, "children": 1}
    naive = SpeculativeConfig(strategy="static_tree", segments=3, **tree)
    at_once = SpeculativeConfig(strategy="static_tree", **tree)
    loop, timed = make_loop(cluster, script, naive), Timed()
    loop.add(scripted(script, 0, make_strategy(naive, 4), timed))
    while loop.busy:
        loop.step()
    rounds = timed.moments[1:]  # the first token is the prompt's
    assert [len(list(group)) for _, group in groupby(rounds)] == [6, 6, 6]
    (one,), (other,) = (simulate(cluster, script, config) for config in (naive, at_once))
    slowest = max(timing.seconds(2) for timing in stage_timings(cluster))
    assert one.seconds - other.seconds > 3 * slowest, "a batch or more behind the first, in each of three rounds"


@pytest.mark.parametrize("name", ["demo", "pipedec-7"])
def test_overhead_per_hop_is_added_to_every_message_between_stages_and_engine(name: str) -> None:
    cluster, script, hop = load_cluster(name), profile_script(ALWAYS, 1, 6, seed=0), 0.002
    (without,), (added,) = (simulate(cluster, script, None, overhead_per_hop=extra) for extra in (0.0, hop))
    hops = 5 * (len(cluster.stages) + 1)  # of every token after the first; devices of one stage are no hop
    assert added.seconds - without.seconds == pytest.approx(hops * hop)


def test_a_drafter_that_is_always_right_brings_a_token_in_every_step() -> None:
    cluster = with_swift_drafter(load_cluster("spd-8"))
    tokens = 200
    (found,) = simulate(cluster, profile_script(ALWAYS, 1, tokens, seed=0), chain())
    step = max(timing.seconds(1) for timing in stage_timings(cluster))
    assert found.metrics.misses == 0
    assert found.seconds >= (tokens - 1 - len(cluster.stages)) * step
    assert found.seconds == pytest.approx(tokens * step, rel=0.1)


def test_a_drafter_that_is_always_wrong_leaves_a_trip_per_token() -> None:
    cluster = load_cluster("spd-4")
    script = profile_script((0.0, 0.0), 1, 20, seed=0)
    (found,) = simulate(cluster, script, SpeculativeConfig(strategy="pipedec"))
    assert found.metrics.accepted == 0
    assert found.seconds >= 19 * plain_step_seconds(cluster) * 0.99


@pytest.mark.parametrize(
    ("block", "shown", "further", "accepted"),
    [
        (1, True, ((0.0,),), 5),  # a pass for every level, each shown all tokens down to it
        (1, False, ((0.0,),), 1),
        (1, False, (ALWAYS, ALWAYS, (0.0,)), 3),
        (5, True, ((0.0,),), 1),  # one pass for all levels, which is shown the root alone
        (5, True, (ALWAYS, (0.0,)), 2),
        (5, False, (ALWAYS, (0.0,)), 2),
        (3, True, (ALWAYS, ALWAYS), 5),
    ],
)
def test_a_draft_is_as_good_as_its_distance_from_what_was_shown(
    block: int, shown: bool, further: tuple[tuple[float, ...], ...], accepted: int
) -> None:
    script = profile_script(ALWAYS, 1, 61, seed=0, further=further)
    script = replace(script, block=block, shows_in_flight=shown)
    tree = SpeculativeConfig(strategy="static_tree", tree_size=5, tree_depth=5, children=1)
    (found,) = simulate(load_cluster("spd-4"), script, tree)
    assert (found.tokens, found.metrics.accepted) == (61, 60 - 60 // (accepted + 1))


@pytest.mark.parametrize(
    ("strategy", "further"),
    [
        ("continuous", ()),
        ("auto", ((0.0,),)),
        ("pipedec", ()),
        *(
            pytest.param(*one, marks=pytest.mark.whole)
            for one in (("continuous", ((0.0,),)), ("auto", ()), ("pipedec", ((0.0,),)))
        ),
    ],
)
def test_a_swift_drafter_shows_each_node_to_a_block_of_its_own(
    strategy: str, further: tuple[tuple[float, ...], ...]
) -> None:
    """Levels that a block drafts further below help a pipeline only while the next pass is not there yet, and a round
    is about as many nodes as one whose nodes take a row each."""
    script = profile_script((0.6, 0.8, 0.9), 2, 35, seed=1, further=further)
    cluster, config = with_swift_drafter(load_cluster("spd-8")), SpeculativeConfig(strategy=strategy)
    rows, blocks = (simulate(cluster, replace(script, block=block), config) for block in (1, 7))
    for one, other in zip(blocks, rows, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=0.05)
        assert one.rows > 0.9 * other.rows


@pytest.mark.parametrize("strategy", [name for name, kind in STRATEGIES.items() if kind.drafts])
def test_the_same_seed_gives_the_same_simulation(strategy: str) -> None:
    cluster, config = random_cluster(5, 6), SpeculativeConfig(strategy=strategy)
    one, other = (simulate(cluster, profile_script((0.6, 0.8), 2, 15, seed=3), config) for _ in range(2))
    assert one == other
    assert [found.tokens for found in one] == [15, 15]
    assert all(0 < found.stages_busy < 1 and 0 < found.drafter_busy <= 1 for found in one)


def test_a_warm_up_does_not_count_but_teaches() -> None:
    cluster, script = load_cluster("spd-4"), profile_script((0.6, 0.8), 3, 20, seed=0)
    for strategy, learns in (("pipedec", False), ("auto", True)):
        config = SpeculativeConfig(strategy=strategy)
        cold, warm = (simulate(cluster, script, config, warm_up) for warm_up in (0, 4))
        assert [found.tokens for found in warm] == [20, 20, 20]
        assert ([found.metrics for found in warm] == [found.metrics for found in cold]) is not learns


def test_prompts_may_differ() -> None:
    script = profile_script((0.6, 0.8), 2, 20, seed=0)
    unlike = replace(script, prompts=(3, 300))
    one, other = simulate(load_cluster("spd-4"), unlike, SpeculativeConfig(strategy="pipedec"))
    assert other.first_token_seconds > one.first_token_seconds
    assert [found.tokens for found in (one, other)] == [20, 20]


def test_a_wide_tree_over_many_stages_has_a_slot_for_every_node() -> None:
    script = profile_script(ALWAYS, 1, 2, seed=0)
    loop = make_loop(random_cluster(0, 64), script, SpeculativeConfig(strategy="pipedec", width=128))
    assert loop.pool.speculative_quota >= 64 * 128


@pytest.mark.parametrize("name", ["demo", "pipedec-14x3090", "pipedec-21"])
def test_there_are_as_many_slots_as_in_an_engine_of_real_stages(name: str) -> None:
    config = SpeculativeConfig(method="ngram")
    setup = resolve_options(EngineOptions(cluster=name, speculative_config=config))
    simulated = make_loop(load_cluster(name), profile_script(ALWAYS, 1, 2, seed=0), config).pool
    assert setup.speculative_slots == simulated.speculative_quota
    assert setup.capacity == setup.kv_slots + simulated.speculative_quota


def test_off_the_path_a_draft_is_the_same_whoever_asks_and_when() -> None:
    """Two strategies that come to the same wrong node are told the same of it."""
    script = profile_script((0.5, 0.7, 0.8), 1, 40, seed=0, prompt=1)
    seen: list[dict[tuple[int, ...], object]] = []
    for config in (chain(), SpeculativeConfig(strategy="static_tree"), SpeculativeConfig(strategy="continuous")):
        seen.append(drafts_by_path(script, config))
    shared = seen[0].keys() & seen[1].keys() & seen[2].keys()
    assert len(shared) > 20
    assert all(seen[0][path] == seen[1][path] == seen[2][path] for path in shared)


def drafts_by_path(script: Script, config: SpeculativeConfig) -> dict[tuple[int, ...], object]:
    """Return the drafter's first answer about every node, by the node's tokens from the prompt on."""
    loop = make_loop(load_cluster("spd-4"), script, config)
    assert isinstance(loop.drafter, EmulatedDrafter)
    assert isinstance(loop.drafter.inner, ScriptedDrafter)
    inner = loop.drafter.inner
    said: dict[tuple[int, ...], object] = {}
    draft = inner._draft

    def remember(request: Request, node: Node, count: int, beyond: int) -> Draft:
        answer = draft(request, node, count, beyond)
        said[tuple(request.path(node))] = answer.candidates[0]
        return answer

    inner._draft = remember  # type: ignore[method-assign]
    strategy = make_strategy(config, 4)
    request = Request(0, [0], Sampling(), len(script.picks[0]), frozenset(), strategy, Timed())
    loop.add(request)
    while loop.busy:
        loop.step()
    assert request.finished is FinishReason.LENGTH
    return said


def test_a_block_of_rows_drafts_as_many_levels_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the drafter is always right, a chain of four takes one pass of five rows in place of four of one."""
    script = profile_script(ALWAYS, 1, 40, seed=0, prompt=1)
    config = SpeculativeConfig(strategy="static_tree", tree_size=4, tree_depth=4, children=1)
    cluster, rows, seconds, accepted = load_cluster("spd-4"), [], [], []
    ask = ScriptedDrafter.ask

    def counted(drafter: ScriptedDrafter, asks: Sequence[DraftRequest]) -> int:
        rows.append(ask(drafter, asks))
        return rows[-1]

    monkeypatch.setattr(ScriptedDrafter, "ask", counted)
    for block in (1, 5):
        rows.clear()
        (found,) = simulate(cluster, replace(script, block=block), config)
        of_a_tree = [1] * 4 if block == 1 else [5, 0, 0, 0]
        assert rows[4:24] == of_a_tree * 5  # the prompt comes with the first
        seconds.append(found.seconds)
        accepted.append(found.metrics.accepted)
    draft = draft_timing(cluster)
    assert draft is not None
    assert accepted[0] == accepted[1]
    assert seconds[0] - seconds[1] > 40 / 5 * 2 * draft.seconds(1)  # three passes of four, if for more rows


def test_shares_are_of_the_time_that_counts() -> None:
    assert busy_share([(0.0, 2.0), (3.0, 4.0), (9.0, 12.0)], 1.0, 11.0) == pytest.approx(0.4)
    assert busy_share([(0.0, 2.0)], 1.0, 1.0) == 0.0


def test_a_stage_and_a_drafter_on_one_device_add_up() -> None:
    """A chain advances a token in the time of the stage and of the pass, however short the others are."""
    shared = load_cluster("spd-8", drafter_on="last-stage")
    tokens = 200
    (found,) = simulate(shared, profile_script(ALWAYS, 1, tokens, seed=0), chain())
    draft = draft_timing(shared)
    assert draft is not None
    step = stage_timings(shared)[-1].seconds(1) + draft.seconds(1)
    assert found.metrics.misses == 0
    assert found.seconds == pytest.approx(tokens * step, rel=0.1)
    (apart,) = simulate(load_cluster("spd-8"), profile_script(ALWAYS, 1, tokens, seed=0), chain())
    assert apart.seconds < 0.7 * found.seconds


@pytest.mark.parametrize("strategy", ["continuous", "pipedec"])
@pytest.mark.parametrize("place", ["last-stage", "gpu-2"])
def test_batches_and_passes_never_have_a_device_at_once(strategy: str, place: str) -> None:
    cluster = load_cluster("spd-4", drafter_on=place)
    script = profile_script((0.6, 0.8), 1, 40, seed=3)
    config = SpeculativeConfig(strategy=strategy)
    loop = make_loop(cluster, script, config)
    assert loop.drafter is not None
    used: list[tuple[float, float]] = []

    class Used(Observer):
        def arrived(self, result: Result, at: float) -> None:
            used.extend((s.start, s.end) for s in result.spans if s.stage == cluster.drafting_stage and s.rows)

        def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
            assert loop.drafter is not None
            turn = loop.drafter.timing.turn
            assert turn is not None
            assert asked_at <= turn.start
            assert turn.end <= at
            used.append((turn.start, turn.end))

    loop.observers = [Used()]
    strategy_of_request = make_strategy(config, len(cluster.stages))
    request = Request(0, [0] * script.prompts[0], Sampling(), 40, frozenset(), strategy_of_request, Timed())
    loop.add(request)
    while loop.busy:
        loop.step()
    loop.drain()
    used.sort()
    assert len(used) > 40
    assert all(one[1] <= other[0] + 1e-12 for one, other in pairwise(used))


def pairs_of_cards(link: dict[str, float]) -> Cluster:
    """PipeDec's seven groups of two cards as tensor parallel ones, with this link within each of them."""
    groups = [
        {"devices": list(one.devices), "split": "tensors", "layers": sum(one.layers)}
        for one in load_cluster("pipedec-7").stages
    ]
    between = [{"ends": group["devices"], **link} for group in groups]
    return load_cluster("pipedec-7", stages=groups, links={"between": between})


def test_tensor_parallel_groups_are_faster_on_fast_links_and_slower_on_slow_ones() -> None:
    """Two cards in sequence read 41 GB in 55 ms, together in 27; 48 gathers take 1 ms of latency, or 240."""
    script = profile_script(ALWAYS, 1, 6, seed=0)
    fast, slow = (
        pairs_of_cards({"bandwidth_gbit_s": gbit_s, "latency_ms": latency_ms})
        for gbit_s, latency_ms in ((96, 0.02), (0.94, 5))
    )
    (sequence,), (quick,), (late,) = (simulate(one, script, None) for one in (load_cluster("pipedec-7"), fast, slow))
    assert quick.seconds < 0.55 * sequence.seconds
    assert late.seconds > 4 * sequence.seconds
    for cluster, found in ((fast, quick), (slow, late)):
        assert found.seconds / 5 == pytest.approx(plain_step_seconds(cluster), rel=0.01)
