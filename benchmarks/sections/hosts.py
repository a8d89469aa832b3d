"""Several hosts: detection of losses, bytes sent to each host, and an emulated cluster over them."""

from __future__ import annotations

import statistics
from typing import Any, Final

from benchmarks.load import emulated_hosts, members, networks, returns, sent_weights
from benchmarks.sections.base import Section, paragraphs
from penstock.lab.common import markdown

SAID: Final = {
    "link-down": "a host's link goes down",
    "one-way": "what the first stage's host sends to the second's does not arrive",
    "other-way": "what the second stage's host sends to the first's does not arrive",
    "stopped-host": f"all processes of a host stop for {networks.STOPPED_S:.0f} s",
    "stopped-stage": f"a stage's process stops for {networks.STOPPED_S:.0f} s",
}
HEADS: Final = {"head": "killed", "head-cut": "killed with its link down"}


def render_networks(figures: Any) -> str:
    rows = [
        [SAID[name], seconds_of(found["noticed_s"]), seconds_of(found["recovery_s"]), str(found["recoveries"])]
        for name, found in figures.items()
        if name in SAID
    ]
    heads = " and ".join(f"{figures[name]['gone_s']:.1f} s after it was {said}" for name, said in HEADS.items())
    problems = [problem for found in figures.values() for problem in found["problems"]]
    return paragraphs(
        f"Three hosts, each a network namespace with a clock ten days from the next one's, two stages and a spare, "
        f"{len(networks.PROMPTS)} requests of {networks.TOKENS} tokens at once at T = 0.8. It happens amid answers; "
        "the same requests follow once it has ended. Every token is compared with those of one host, and slots are "
        f"audited. What was wrong: {'; '.join(problems) or 'nothing'}. Measured on two cores beside other programs.",
        markdown(["what happens", "noticed after, s", "requests waited, s", "recoveries"], rows),
        f"Of an engine on a host of its own no stage was left {heads}.",
        *cycles_of(figures.get("cycles"), "came back"),
        *cycles_of(figures.get("emptied"), "came back without any weights"),
        *fuzz_of(figures.get("fuzz")),
        *slow_of(figures.get("slow")),
    )


def seconds_of(found: float | None) -> str:
    return "not" if found is None else f"{found:.1f}"


def cycles_of(found: Any, returned: str) -> list[str]:
    if found is None:
        return []
    held = found["mib_and_descriptors"]
    (_, few), (most_mib, most), (some_mib, _) = held[1], held[-1], held[1]
    return [
        f"{found['cycles']} times a worker's agent was killed amid answers and {returned}: {found['recoveries']} "
        f"recoveries, the engine's process at {some_mib} MiB after two and {most_mib} MiB after all of them, with "
        f"{few} and {most} descriptors."
    ]


def fuzz_of(found: Any) -> list[str]:
    if found is None:
        return []
    agent, stage = found["grown_mib"][:2]
    return [
        f"{found['frames']:,} messages that nobody would send came to an agent from one with keys, and "
        f"{found['strangers']:,} connections that know no session to a stage, the engine and its door. "
        f"{found['refused']:,} messages were refused, the agent grew by {agent:.0f} MiB and the stage, which decoded "
        f"meanwhile, by {stage:.0f}."
    ]


def slow_of(found: Any) -> list[str]:
    if found is None:
        return []
    return [
        f"Over a link of 20 Mbit/s {found['answers']} answers in {networks.SLOW_S / 60:.0f} minutes: "
        f"{found['recoveries']} losses."
    ]


PROCESSES: Final = {
    "agent": ("a worker's agent", "leases ended with a reason", "ended with a reason"),
    "head": ("the head", "hosts lost with a reason", "lost with a reason"),
    "stage": ("stages, and the engine", "recoveries", "recoveries"),
    "drafter": ("drafter, and the engine", "drafters lost", "drafter_losses"),
}


def render_members(figures: Any) -> str:
    rows = [
        [
            said,
            f"{found['messages']:,} of {found['different']:,} kinds in {found['bursts']} bursts",
            f"{found[key]} {counted}",
            ", ".join(f"{mib:+}" for mib in found["grown_mib"]) if "grown_mib" in found else "",
        ]
        for name, (said, counted, key) in PROCESSES.items()
        if (found := figures.get(name))
    ]
    problems = [problem for found in figures.values() for problem in found["problems"]]
    return paragraphs(
        "A member of the cluster, with a key that the others trust, sends each message of the protocol with a field at "
        "the edge of its bounds or beyond it, of another type, out of order, cut short, or once more. An engine on "
        "two of three workers, with a draft model, answers between bursts, greedily and at T = 0.8, and its tokens are "
        f"compared. What was wrong: {'; '.join(problems) or 'nothing'}.",
        markdown(["sent to", "messages", "what became of it", "three workers and the engine grew by, MiB"], rows),
    )


def render_returns(seeds: Any) -> str:
    def total(key: str) -> int:
        return sum(found[key] for found in seeds.values())

    back_s = sorted(seconds for found in seeds.values() for seconds in found["back_s"])
    mbit = [rate for found in seeds.values() for rate in found["mbit"]]
    faults = {kind: sum(found["faults"][kind] for found in seeds.values()) for kind in returns.FAULTS}
    problems = [problem for found in seeds.values() for problem in found["problems"]]
    median_s = back_s[len(back_s) // 2]
    return paragraphs(
        f"{total('returns')} times a worker that holds a stage was killed amid answers, lost its cache, and came back "
        f"over a link of {min(mbit):.0f} to {max(mbit):.0f} Mbit/s; {total('kills') - total('returns')} times it was "
        "killed once more at a random moment of its transfer. In every other return pieces were tampered with on "
        f"their way: {', '.join(f'{count} {kind}' for kind, count in faults.items())}. The {total('answers'):,} "
        "answers before, meanwhile and afterwards, greedy and at T = 0.8, are compared with those of one host, and "
        "every piece that the worker holds is compared with the head's digests once it holds its layers.",
        f"What was wrong: {'; '.join(problems) or 'nothing'}. {total('refused')} pieces were refused for their digest, "
        f"and there were {total('recoveries')} recoveries. Stages were back on the worker {median_s:.0f} s after "
        f"its death in the median, {back_s[0]:.0f} to {back_s[-1]:.0f} s in all.",
    )


def render_sent(models: Any) -> str:
    rows = [
        [model, f"{held / 1e6:.1f}", *(f"{factors[i]:.4f}" for factors in found["received_by_held"].values())]
        for model, found in models.items()
        for i, held in enumerate(found["held_bytes"])
    ]
    problems = [problem for found in models.values() for problem in found["problems"]]
    return paragraphs(
        "Two hosts lack the checkpoint. Everything that their cables bring them until an answer is complete, divided "
        "by what their stage holds: at first, after a restart of the worker, and after a byte in the second host's "
        f"cache was changed. What was wrong: {'; '.join(problems) or 'nothing'}.",
        markdown(["model", "a stage holds, MB", "at first", "after a restart", "a byte changed"], rows),
    )


def render_emulated(strategies: Any) -> str:
    rows = [
        [
            name,
            f"{found['one_host_tokens_s']:.2f}",
            f"{found['hosts_tokens_s']:.2f}",
            f"{statistics.median(found['ratios']):.3f} ({found['ratios'][0]:.3f} to {found['ratios'][-1]:.3f})",
        ]
        for name, found in strategies.items()
    ]
    same = all(found["same_tokens"] for found in strategies.values())
    return paragraphs(
        f"{emulated_hosts.CLUSTER}, its five boards played by processes of one host and by five network namespaces, in "
        f"turn, {emulated_hosts.REPEATS} times: tokens per second of {len(emulated_hosts.PROMPTS)} answers of "
        f"{emulated_hosts.TOKENS} tokens, prompts included. Tokens {'are the same' if same else 'DIFFER'}.",
        markdown(["strategy", "one host", "five hosts", "five to one, paired"], rows),
    )


SECTIONS = (
    Section(name=networks.NAME, title="Hosts lost in every way", how=networks.HOW, take=None, render=render_networks),
    Section(name=returns.NAME, title="Hosts back without weights", how=returns.HOW, take=None, render=render_returns),
    Section(
        name=members.NAME,
        title="Members that send nonsense",
        how=members.HOW,
        take=None,
        render=render_members,
    ),
    Section(name=sent_weights.NAME, title="Hosts without weights", how=sent_weights.HOW, take=None, render=render_sent),
    Section(
        name=emulated_hosts.NAME,
        title="An emulated cluster on several hosts",
        how=emulated_hosts.HOW,
        take=None,
        render=render_emulated,
    ),
)
