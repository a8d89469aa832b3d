"""An emulated cluster with its boards on hosts of their own, beside the same one on a single host.

    python -m benchmarks.load.emulated_hosts

FlowSpec's five boards are network namespaces: four have a `penstock worker` with a stage, and the fifth has the engine
and the drafter. The same cluster with every process on the fifth is measured in turn with it, so that tokens per second
can be compared. The real links between the boards come on top of the emulated ones. It needs root.

The results are stored in benchmarks/measured/load/emulated_hosts.json. The exit code is 1 where tokens differ.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.measured import store
from penstock import LLM, SamplingParams
from penstock.hosts.keys import make_cluster
from tests.namespaces import network
from tests.workers import Worker

NAME, HOW = "emulated_hosts", "Emulated, with the demo pair, on one host and on hosts that are network namespaces"
CLUSTER: Final = "flowspec-7b"
STRATEGIES: Final = ("autoregressive", "flowspec", "continuous")
PROMPTS: Final = ("def fibonacci(n):", "class Stack:\n")
TOKENS: Final = 16
REPEATS: Final = 5


def engine(strategy: str, places: dict[str, Any]) -> LLM:
    drafts = {"method": "draft_model", "strategy": strategy} if strategy != "autoregressive" else None
    return LLM("demo", cluster=CLUSTER, speculative_config=drafts, **places)


def answered(llm: LLM) -> tuple[list[list[int]], float]:
    """The tokens of every prompt, one after the other, and tokens per second."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=TOKENS, ignore_eos=True)
    begun = time.perf_counter()
    outputs = [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
    seconds = time.perf_counter() - begun
    return [one.token_ids for one in outputs], len(PROMPTS) * TOKENS / seconds


def compare(strategy: str, hosts: str, keys: str) -> dict[str, Any]:
    with ExitStack() as stack:
        one = stack.enter_context(closing(engine(strategy, {})))
        several = stack.enter_context(closing(engine(strategy, {"hosts": hosts, "keys": keys})))
        pairs = [(answered(one), answered(several)) for _ in range(REPEATS)]
    same = all(here[0] == there[0] for here, there in pairs)
    return {
        "one_host_tokens_s": round(statistics.median(here[1] for here, _ in pairs), 3),
        "hosts_tokens_s": round(statistics.median(there[1] for _, there in pairs), 3),
        "ratios": sorted(round(there[1] / here[1], 4) for here, there in pairs),
        "same_tokens": same,
    }


def on_the_fifth(hosts: str, keys: str) -> None:
    print(json.dumps({strategy: compare(strategy, hosts, keys) for strategy in STRATEGIES}))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, network(0, 0, 0, 0, 0) as boards, ExitStack() as stack:
        keys = Path(folder) / "keys"
        make_cluster(keys, "head")
        workers = [
            stack.enter_context(closing(Worker(f"{one.address}:7700", "--keys", str(keys), before=one.before)))
            for one in boards[:4]
        ]
        names = ",".join(worker.host for worker in workers)
        command = [*boards[4].enter, sys.executable, "-m", "benchmarks.load.emulated_hosts", names, str(keys)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures = json.loads(said.splitlines()[-1])
    print(json.dumps(figures, indent=1))
    store(NAME, HOW, (["python -m benchmarks.load.emulated_hosts"], figures))
    return 0 if all(one["same_tokens"] for one in figures.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:]:
        on_the_fifth(*sys.argv[1:])
    else:
        sys.exit(main())
