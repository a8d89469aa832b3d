"""PipeDec on its own cluster with the synthetic drafter, over enough tokens that the draw of misses evens out.

    python benchmarks/pipedec_setting.py [PROMPTS] [TIME_SCALE]

`penstock bench` decodes every prompt plainly too, at 0.4 s a token here. This script learns the plain answers on
stages without emulation, times plain decoding on one prompt only (its time per token hardly varies) and PipeDec on all.
"""

from __future__ import annotations

import sys
from statistics import mean, stdev

from penstock import LLM, SamplingParams
from penstock.bench.command import DEFAULT_PROMPTS
from penstock.bench.measure import same_tokens
from penstock.bench.prompts import read_prompts
from penstock.cluster import load_cluster
from penstock.config import SpeculativeConfig
from penstock.core import RequestOutput

ACCURACY = (0.70, 0.80, 0.85, 0.88, *(round(0.88 + 0.07 * k / 12, 4) for k in range(1, 13)))
PIPEDEC = SpeculativeConfig(method="synthetic", accuracy=ACCURACY)
TOKENS = 100


def seconds_per_token(output: RequestOutput) -> float:
    completion = output.outputs[0]
    assert completion.seconds is not None
    assert completion.first_token_seconds is not None
    return (completion.seconds - completion.first_token_seconds) / (len(completion.token_ids) - 1)


def main(count: int, time_scale: float) -> None:
    prompts = read_prompts(DEFAULT_PROMPTS, count)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(count)]
    with LLM("demo", pipeline_parallel_size=2, speculative_config=PIPEDEC) as llm:
        answers = llm.run(prompts, params, None)
        known = llm.plain_answers
    cluster = load_cluster("pipedec-14x3090", time_scale=time_scale)
    with LLM("demo", cluster=cluster, speculative_config=PIPEDEC) as llm:
        llm.plain_answers.update(known)
        (plain,) = llm.run(prompts[:1], params[:1], None)
        llm.loop.drain()
        runs = []
        for prompt, one in zip(prompts, params, strict=True):
            runs += llm.run([prompt], [one], PIPEDEC)
            llm.loop.drain()
    times = [seconds_per_token(run) for run in runs]
    spread = stdev(times) / len(times) ** 0.5
    base = seconds_per_token(plain)
    identical = all(same_tokens(one, other) for one, other in zip(runs, answers, strict=True))
    print(f"emulated, synthetic drafter; time scale {time_scale:g}; {count} prompts x {TOKENS} tokens")
    print(f"plain   {1e3 * base / time_scale:6.1f} ms per token")
    print(f"pipedec {1e3 * mean(times) / time_scale:6.1f} ms per token, standard error {1e3 * spread / time_scale:.1f}")
    low, high = base / (mean(times) + 2 * spread), base / (mean(times) - 2 * spread)
    print(f"speed-up {base / mean(times):.2f}x (95%: {low:.2f} to {high:.2f}), identical: {identical}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12, float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)
