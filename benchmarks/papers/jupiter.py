"""Jupiter's tables: its baselines as cost models, its own plans, and ours, on its boards as modelled.

    python -m benchmarks.results --measure jupiter

260 prompt tokens and 64 new ones, as in its section VI. Prompts and tokens after them are reckoned (``Flow``,
``lab/plan.py``); speculation is simulated, with a drafter whose first candidate is right as often as stated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any, Final

from rich.console import Console

from benchmarks.drafters import in_flight
from benchmarks.shared.measured import Taken, stored
from benchmarks.shared.points import Answer, Decoded, answered
from penstock.cluster import Cluster, link_timings, load_devices, stage_timings
from penstock.cluster.timing import NOTHING, chunk
from penstock.lab.grid import parse_entries
from penstock.lab.plan import METHODS, Group, planned, sequence_s
from penstock.lab.plan_choices import Planning, PlanOptions, staged
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import simulate
from penstock.planner.costs import BLOCK, Batch, Flow, PieceTable, candidates, problem_of
from penstock.planner.partition import Part, layer_split, least_piece, sequence_split
from penstock.speculation import SpeculativeConfig

NAME: Final = "jupiter"
HOW: Final = "Simulated, baselines computed, five Medusa heads of which the first is right in 60% of the steps"
COMMAND: Final = "python -m benchmarks.results --measure jupiter"
PROMPT, TOKENS, REQUESTS, SEED = 260, 64, 3, 1
FIRST_RIGHT: Final = 0.6
"""Chance that Medusa's first head is right with its best candidate (Cai et al., figure 2)."""
ACCURACY: Final = (FIRST_RIGHT, 0.72, 0.78, 0.82, 0.85, 0.87, 0.88, 0.89)
CHAIN: Final = "static_tree[tree_size=5,tree_depth=5,children=1]"
ENVIRONMENTS: Final = {"A": "jupiter-homogeneous", "B": "jupiter-heterogeneous"}
RATES: Final = {"100 Mbps": 0.094, "500 Mbps": 0.47, "1 Gbps": 0.94}
MODELS: Final = {"7B": "llama-2-7b-4bit", "13B": "llama-2-13b-4bit"}
HEADS: Final = 5
"""Draft heads of the paper's Medusa (section VI-E), which one pass of the target's last stage asks all together."""
KV_SLOTS: Final = 512
IN_TABLE_4: Final = Answer(prompt=PROMPT, points=4, tokens=TOKENS // 4)
IN_TABLE_5: Final = Answer(prompt=PROMPT, points=4, tokens=64)
SHAPES: Final = (
    *(Answer(prompt=PROMPT, points=points, tokens=tokens) for points, tokens in ((2, 32), (4, 16), (4, 32))),
    IN_TABLE_5,
    *(Answer(prompt=PROMPT, points=points, tokens=tokens) for points, tokens in ((4, 128), (8, 32), (8, 64))),
)
"""Shapes of answers in points."""
NAMES: Final = {"": ("naive", "outlines"), "chain": ("chain", "both"), "auto": ("auto", "both, auto")}
"""Names of each way of decoding, without an outline and with one."""


def take() -> Taken:
    """Every setting of Table IV, the boards of figure 12, and prompts of many lengths."""
    settings = [
        {"environment": place, "rate": rate, "model": model, **setting(cluster_of(place, rate, model))}
        for place in ENVIRONMENTS
        for rate in RATES
        for model in MODELS
    ]
    boards = [
        {"rate": rate, "boards": count, **setting(first_boards(cluster_of("A", rate, "7B"), count))}
        for rate in ("100 Mbps", "1 Gbps")
        for count in (1, 2, 3, 4)
    ]
    figures = {"settings": settings, "boards": boards, "answers": list(answers())}
    return [COMMAND], {**figures, "prompts": list(prompts()), "stages": list(scaling())}


def cluster_of(place: str, rate: str, model: str) -> Cluster:
    cluster = load_devices(ENVIRONMENTS[place], as_model=MODELS[model], bandwidth_gbit_s=RATES[rate])
    return replace(cluster, kv_slots=KV_SLOTS)


def first_boards(cluster: Cluster, count: int) -> Cluster:
    """The cluster with its first ``count`` boards that may hold layers, and the drafter's."""
    kept = {device.name for device in candidates(cluster)[:count]} | {cluster.drafter}
    devices = tuple(device for device in cluster.devices if device.name in kept)
    return replace(cluster, devices=devices, stages=cluster.stages[:count])


def setting(cluster: Cluster) -> dict[str, Any]:
    """Seconds of the prompt and of the tokens by method; where a model does not fit, the devices are named."""
    found: dict[str, Any] = {"baselines": baselines(cluster)}
    paper = papers_cluster(cluster)
    if paper is None:
        return {**found, "pipelines": {}}
    plain = Flow(stage_timings(paper), link_timings(paper))
    ((_, chain),) = parse_entries([CHAIN], {})
    ours = our_cluster(cluster)
    heads, pieces_s = all_heads_at_once(paper), plain.first_token_s(0, papers_pieces(paper))
    outlined = points_mean(heads, IN_TABLE_4, chain)
    pipelines = {
        "EdgeShard": {"prompt_s": plain.first_token_s(0, [PROMPT]), "tokens_s": decoding_s(paper, None)},
        "Jupiter": {"prompt_s": pieces_s, "tokens_s": decoding_s(heads, chain)},
        "Jupiter, outlines": {"prompt_s": pieces_s, "tokens_s": outlined.seconds, "outline_s": outlined.outline_s},
        "Penstock": {
            "prompt_s": Flow(*timings(ours)).first_token_s(0, PieceTable(*timings(ours)).ends(PROMPT)),
            "tokens_s": decoding_s(ours, SpeculativeConfig(strategy="auto")),
            "layers": [[stage.devices[0], sum(stage.layers)] for stage in ours.stages],
        },
    }
    return {**found, "pipelines": pipelines}


def timings(cluster: Cluster) -> tuple[Any, Any]:
    return stage_timings(cluster), link_timings(cluster)


def baselines(cluster: Cluster) -> dict[str, Any]:
    """Figures of SP and of TP's kin, by the paper's bytes and by those that cross a link."""
    model, network = cluster.as_model, cluster.links.network
    assert model is not None
    assert network is not None
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        found[name] = {}
        for counted in ("formula", "rings"):
            group = Group(
                devices=candidates(cluster), model=model, link=network, rings=counted == "rings", kv_slots=KV_SLOTS
            )
            prompt_s, tokens_s = sequence_s(group, method, PROMPT, TOKENS)
            first = group.pass_times(method, PROMPT, 0)
            found[name][counted] = {
                "prompt_s": prompt_s,
                "tokens_s": tokens_s,
                "ratio": first.exchanging / first.computing,
            }
            found[name]["lacking"] = group.lacking(method)
    return found


def papers_cluster(cluster: Cluster) -> Cluster | None:
    """The paper's layer split, for one row, over all boards in the file's order."""
    devices = candidates(cluster)
    found = layer_split(list(problem_of(cluster, devices, Batch(1, 0)).stage_s))
    if found is None:
        return None
    parts = tuple(Part(*one) for one in enumerate(found.counts))
    return staged(cluster, [(device,) for device in devices], parts)


def all_heads_at_once(cluster: Cluster) -> Cluster:
    """The cluster with a drafter whose heads are asked in one pass, as the paper has it.

    The engine asks a depth at a time; each then takes the time to read one head, and a share of the pass's overhead.
    """
    assert cluster.drafter is not None
    drafter = cluster.device(cluster.drafter)
    assert drafter.overhead_ms is not None
    at_once = replace(drafter, overhead_ms=drafter.overhead_ms / HEADS)
    return replace(cluster, devices=tuple(at_once if device is drafter else device for device in cluster.devices))


def papers_pieces(cluster: Cluster, tokens: int = PROMPT) -> tuple[int, ...]:
    """The paper's sequence split for the slowest stage, with b at 90% of the best rows per second."""
    flow = Flow(*timings(cluster))
    stages = stage_timings(cluster)
    least = least_piece(lambda rows: rows / max(stage.seconds(rows, NOTHING) for stage in stages), 64)
    lengths = sequence_split(tokens, least, len(stages), flow.slowest_s).lengths
    return tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))


def our_cluster(cluster: Cluster) -> Cluster:
    """The cluster as planned by ``penstock plan`` for a drafter that is right as often as this one."""
    options = PlanOptions(cluster=cluster.name, tokens=TOKENS, prompt_tokens=PROMPT, accuracy=ACCURACY)
    planning = Planning(cluster, options)
    return planned(planning, Console(quiet=True)).chosen.cluster


@cache
def shares_right() -> tuple[float, ...]:
    """How often each of Medusa's heads is right with its best candidate: the first as often as ``FIRST_RIGHT``, and the
    others relative to it as those of the demo target's Medusa are, greedily (``like_for_like``, mean of the seeds).
    Jupiter states no such shares."""
    stored_cases = stored("like_for_like").figures.items()
    runs = [one["in_flight"] for case, one in stored_cases if case.startswith("medusa,")]
    means = [fmean(best for best, *_ in head) for head in zip(*runs, strict=True)]
    return tuple(FIRST_RIGHT * mean / means[0] for mean in means)


def heads_script(requests: int, tokens: int, seed: int, prompt: int) -> Script:
    """A script whose drafts are those of Medusa's heads: each for one distance from the last token that is known.

    Misses of all candidates grow with those of the first one. As in texts, easy tokens come in stretches.
    """
    further = []
    for share in shares_right()[1:]:
        growth = (1 - share) / (1 - FIRST_RIGHT)
        further.append([1 - min(1.0, (1 - right) * growth) for right in ACCURACY])
    further.append([0.0] * len(ACCURACY))  # there is no sixth head
    script = profile_script(
        ACCURACY, requests, tokens, seed, prompt=prompt, further=further, persistence=in_flight.PERSISTENCE
    )
    return replace(script, shows_in_flight=False)


def decoding_s(cluster: Cluster, config: SpeculativeConfig | None, tokens: int = TOKENS) -> float:
    """Seconds of ``tokens`` tokens after the first, following the prompt."""
    script = heads_script(REQUESTS, tokens + 1, SEED, PROMPT)
    runs = simulate(cluster, script, config, 0)
    return sum(run.seconds for run in runs) / REQUESTS


def answers() -> Iterator[dict[str, Any]]:
    """Seconds of answers with several points on A, and of their outlines, by way of decoding."""
    ((_, chain),) = parse_entries([CHAIN], {})
    auto = SpeculativeConfig(strategy="auto")
    for model in MODELS:
        cluster = cluster_of("A", "1 Gbps", model)
        paper, ours = papers_cluster(cluster), our_cluster(cluster)
        assert paper is not None
        ways = {"": (paper, None), "chain": (all_heads_at_once(paper), chain), "auto": (ours, auto)}
        for answer in SHAPES:
            length = answer.points * answer.tokens
            found: dict[str, Any] = {"model": model, "points": answer.points, "tokens": answer.tokens}
            outlined = {way: points_mean(place, answer, config) for way, (place, config) in ways.items()}
            seconds = {way: decoding_s(place, config, length) for way, (place, config) in ways.items()}
            found["seconds"] = {NAMES[way][0]: one for way, one in seconds.items()}
            found["seconds"] |= {NAMES[way][1]: one.seconds for way, one in outlined.items()}
            found["outline_s"] = {NAMES[way][1]: one.outline_s for way, one in outlined.items()}
            yield found


def points_mean(cluster: Cluster, answer: Answer, config: SpeculativeConfig | None) -> Decoded:
    """Means over several seeds."""
    found = [answered(cluster, answer, heads_script, config, SEED + i) for i in range(REQUESTS)]
    return Decoded(fmean(one.outline_s for one in found), fmean(one.seconds for one in found))


def prompts() -> Iterator[dict[str, Any]]:
    """Seconds until the first token with planned pieces and with fixed ones, on both environments."""
    for place in ENVIRONMENTS:
        for rate in RATES:
            cluster = papers_cluster(cluster_of(place, rate, "7B"))
            assert cluster is not None
            flow, table = Flow(*timings(cluster)), PieceTable(*timings(cluster))
            for tokens in (64, 260, 1024, 4096, 8192):
                fixed = {n: flow.first_token_s(0, (*range(n, tokens, n), tokens)) for n in (16, 32, 64, 128, 256, 512)}
                planned_s = flow.first_token_s(0, table.ends(tokens))
                yield {"environment": place, "rate": rate, "tokens": tokens, "planned_s": planned_s, "fixed_s": fixed}


def scaling() -> Iterator[dict[str, Any]]:
    """Speed-up of prompts over N equal stages, relative to one stage that holds the whole model.

    ``bound``: limited by filling and draining alone, with the most pieces possible. ``of_8``: in equal pieces of half a
    block.
    """
    cluster = papers_cluster(cluster_of("A", "1 Gbps", "7B"))
    assert cluster is not None
    (stage, *_), links = stage_timings(cluster), link_timings(cluster)
    for tokens in (PROMPT * 4, 2048, 4096, 8192):
        for count in (1, 2, 4, 8, 16):
            between = [links[0], *[links[1]] * (count - 1), links[-1]]
            flow, most = Flow([stage] * count, between), -(-tokens // BLOCK)
            whole = count * stage.seconds(tokens, chunk(tokens))
            planned_s = flow.first_token_s(0, PieceTable([stage] * count, between).ends(tokens))
            half_blocks_s = flow.first_token_s(0, (*range(BLOCK // 2, tokens, BLOCK // 2), tokens))
            yield {
                "stages": count,
                "tokens": tokens,
                "speedup": whole / planned_s,
                "bound": count * most / (most + count - 1),
                "of_8": whole / half_blocks_s,
            }
