"""Sums up each part of ``benchmarks.gpu`` in lines for the terminal; the part's file has all figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Figures = Mapping[str, Any]


def facts(found: Figures) -> Iterator[str]:
    if "device" in found:
        device = found["device"]
        yield f"{device['name']}, {device['memory'] / 1e9:.1f} GB, compute capability {device['capability']}"
    elif "host" in found:
        host = found["host"]
        yield f"{host['processor']}, {host['cores']} cores, {host['devices'][0]['memory'] / 1e9:.1f} GB"
    rates = [f"{name.removesuffix('_gb_s')} {found[name]:.1f} GB/s" for name in found if name.endswith("_gb_s")]
    rates += [f"{name.removesuffix('_tflop_s')} {found[name]:.3g} TFLOP/s" for name in found if name.endswith("flop_s")]
    if rates:
        yield ", ".join(rates)


def start(found: Figures) -> Iterator[str]:
    if imports := found.get("imports"):
        forked = imports.get("forked_child_can_use_it")
        after = "" if forked is None else f"; a forked child can{'' if forked else ' NOT'} use the device"
        touching = ", ".join(imports["touching"]) or "none"
        yield f"imports of {imports['architectures']} architectures that start the driver: {touching}{after}"
    for name, one in found.items():
        if name != "imports":
            line = f"{one.get('name', name)}: {one['start_s']:.1f} s to start, {one['first_token_s']:.3f} s to a token"
            yield line + memory(one)


def memory(one: Figures) -> str:
    if "loaded_bytes" not in one:
        return ""
    named = {"predicted": "predicted_bytes", "loaded": "loaded_bytes", "left behind": "left_behind_bytes"}
    return "; GB " + ", ".join(f"{name} {one[key] / 1e9:.2f}" for name, key in named.items() if key in one)


def right(found: Figures) -> Iterator[str]:
    alike = [one["like_cpu"] for one in found.values() if "like_cpu" in one]
    yield f"float32: {counted(alike)} answers are those of the processor"
    for way in dict.fromkeys(way for one in found.values() for way in one if way != "like_cpu"):
        counts = [
            count
            for one in found.values()
            for by_strategy in one.get(way, {}).values()
            for count in by_strategy.values()
        ]
        yield f"{way}: {counted(counts)} answers of all strategies and drafters are plain decoding's"


def families(found: Figures) -> Iterator[str]:
    yield f"{len(found)} families, float32: {counted([one['like_cpu'] for one in found.values()])} are the processor's"
    for form in dict.fromkeys(form for one in found.values() for form in one if form != "like_cpu"):
        counts = [one[form] for one in found.values()]
        refused = sum(isinstance(count, str) for count in counts)
        yield f"  {form}: {counted(counts)} of FlowSpec are plain decoding's; {refused} families have none"


def counted(counts: Iterable[list[int] | str]) -> str:
    """The answers that are alike, of all; a format that a family refuses, whose words stand in its place, has none."""
    numbers = [count for count in counts if not isinstance(count, str)]
    return f"{sum(same for same, _ in numbers)} of {sum(of for _, of in numbers)}"


def steps(found: Figures) -> Iterator[str]:
    for name, one in found.items():
        if not isinstance(one, Mapping):
            continue
        for context, by_rows in one["step_ms"].items():
            taken = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in by_rows.items())
            yield f"{name}, behind {context} tokens, ms by rows: {taken}"
        if "share_of_bound" in one:
            share = f"{one['share_of_bound']:.2g} of it reached by a step of one row"
            yield f"{name}: bound {one['bound_ms']:.3g} ms, {share}"


def kernels(found: Figures) -> Iterator[str]:
    for name, one in found.items():
        if isinstance(one, Mapping):
            yield f"{found['model']}, a step of {name}: {one['launches']} launches, {one['busy_ms']:.2f} ms busy"
            for kernel in one["longest"][:3]:
                yield f"  {kernel['ms']:.3f} ms in {kernel['count']} of {kernel['name'][:60]}"


def prefill(found: Figures) -> Iterator[str]:
    for name, one in found.items():
        if name.startswith("pieces"):
            yield f"{found['model']}, a prompt of {one['tokens']} in {name}: {one['tokens_per_second']:.0f} tokens/s"
    if picks := found.get("pick_ms"):
        others = ", ".join(f"{name} {ms:.2f}" for name, ms in picks.items() if name != "rows")
        yield f"{picks['rows']} rows, ms: {others}"
    if first := found.get("first_token"):
        yield f"{first['start_s']:.1f} s to start, then {first['first_token_s']:.2f} s to the first token"


def many(found: Figures) -> Iterator[str]:
    for name, one in found.items():
        if isinstance(one, Mapping):
            step = f"{one['step_ms']:.2f} ms a step, {one['computed_ms']:.2f} computed"
            yield f"{found['model']}, {name}: {one['tokens_per_second']:.1f} tokens/s, {step}"


def pipeline(found: Figures) -> Iterator[str]:
    for name, one in found.items():
        if not isinstance(one, Mapping):
            continue
        same = "same tokens" if one["same_tokens"] else "OTHER TOKENS"
        if "recovery_s" in one:
            yield f"{name}: {seconds(one['recovery_s'])} until the next result, {same}{memory(one)}"
        else:
            speed, hop = one["tokens_per_second"], one["hop_ms"]
            yield f"{name}: {speed:.1f} tokens/s, {hop:.3f} ms a hop, {one['loop_ms']:.3f} a loop, {same}"


def seconds(value: float | None) -> str:
    return "no result came" if value is None else f"{value:.2f} s"


def profile(found: Figures) -> Iterator[str]:
    for times in found.get("times", {}).values():
        for context, by_rows in zip(times["contexts"], zip(*times["layer_ms"], strict=True), strict=True):
            layers = ", ".join(f"{rows}: {ms:.3f}" for rows, ms in zip(times["rows"], by_rows, strict=True))
            yield f"{found['model']}, a layer behind {context} tokens, ms by rows: {layers}"
