"""PipeDec on its own cluster with the synthetic drafter, over enough tokens that the draw of misses evens out.

    python -m benchmarks.papers.pipedec_setting [PROMPTS] [TIME_SCALE]

`penstock bench` decodes every prompt plainly too, at 0.4 s a token here. This script learns the plain answers on
stages without emulation, times plain decoding on one prompt only (its time per token hardly varies) and PipeDec on all.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from benchmarks.shared.profile import ACCURACY
from penstock import LLM, SamplingParams
from penstock.cluster import Cluster, load_cluster
from penstock.core import ConfigError, RequestOutput
from penstock.engine.build import answers_of
from penstock.lab.bench.comparison import decode
from penstock.lab.bench.summary import same_tokens
from penstock.lab.grid import DEFAULT_PROMPTS, read_prompts
from penstock.speculation import SpeculativeConfig

PIPEDEC = SpeculativeConfig(method="synthetic", accuracy=ACCURACY, strategy="pipedec")
TOKENS = 100


def seconds_per_token(output: RequestOutput) -> float:
    completion = output.outputs[0]
    assert completion.seconds is not None
    assert completion.first_token_seconds is not None
    return (completion.seconds - completion.first_token_seconds) / (len(completion.token_ids) - 1)


def measured(count: int, time_scale: float, cluster: Cluster | None = None) -> dict[str, Any]:
    """Unscaled seconds per token, and the speed-up with its 95% bounds. ``cluster``: the paper's unless given.

    Raises ConfigError for fewer than two prompts, which have no spread.
    """
    if count < 2:
        raise ConfigError(f"prompts is {count}; use at least 2, of which the bounds are made")
    prompts = read_prompts(DEFAULT_PROMPTS, count)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(count)]
    with LLM("demo", pipeline_parallel_size=2, speculative_config=PIPEDEC) as llm:
        answers = decode(llm, prompts, params, None)
        known = answers_of(llm)
        assert known is not None
    cluster = load_cluster("pipedec-14x3090") if cluster is None else cluster
    scaled = replace(cluster, time_scale=time_scale)
    with LLM("demo", cluster=scaled, speculative_config=PIPEDEC, enable_prefix_caching=False) as llm:
        here = answers_of(llm)
        assert here is not None
        here.known.update(known.known)
        (plain,) = decode(llm, prompts[:1], params[:1], None)
        llm.loop.drain()
        runs = []
        for prompt, one in zip(prompts, params, strict=True):
            runs += decode(llm, [prompt], [one], PIPEDEC)
            llm.loop.drain()
    times = [seconds_per_token(run) for run in runs]
    spread = stdev(times) / len(times) ** 0.5
    base = seconds_per_token(plain)
    return {
        "prompts": count,
        "tokens": count * (TOKENS - 1),
        "time_scale": time_scale,
        "plain_seconds": base / time_scale,
        "seconds": mean(times) / time_scale,
        "standard_error": spread / time_scale,
        "speedup": base / mean(times),
        "low": base / (mean(times) + 2 * spread),
        "high": base / (mean(times) - 2 * spread),
        "identical": all(same_tokens(one, other) for one, other in zip(runs, answers, strict=True)),
    }


def main(count: int, time_scale: float) -> None:
    found = measured(count, time_scale)
    print(f"emulated, synthetic drafter; time scale {time_scale:g}; {count} prompts x {TOKENS} tokens")
    print(f"plain   {1e3 * found['plain_seconds']:6.1f} ms per token")
    error = 1e3 * found["standard_error"]
    print(f"pipedec {1e3 * found['seconds']:6.1f} ms per token, standard error {error:.1f}")
    bounds = f"{found['low']:.2f} to {found['high']:.2f}"
    print(f"speed-up {found['speedup']:.2f}x (95%: {bounds}), identical: {found['identical']}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12, float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)
