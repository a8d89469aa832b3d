"""Instructions per weight of the products of whole numbers on ARM, read off the code that LLVM makes for it.

    python -m benchmarks.costs.arm_instructions

A turn of the inner loop multiplies the weights of a group of 32 inputs for 16 outputs by one row or several. All its
instructions are counted, also those for addresses, scales and the loop itself. It says nothing of their speed.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir

from penstock.models.compiled.dot import ARGUMENTS, DOTPROD, GROUP, LANES, LONG, PLAIN, _EightBits, _FourBits

WRITERS: Final[dict[str, Any]] = {"int4": _FourBits, "int8": _EightBits}
FEATURES: Final = {DOTPROD: "+neon,+dotprod", PLAIN: "+neon"}
COUNTS: Final = (1, 2, 4)
"""Rows at once: what the product uses on ARM."""
WEIGHTS: Final = GROUP * LANES
PRODUCTS: Final = ("sdot", "smull", "smull2", "smlal", "smlal2", "mul", "mla")
LOADS: Final = ("ldr", "ldur", "ldp", "ld1", "ld1r", "ld4", "ldrb", "ldrsb")


def assembly(writer: Any, kind: str, count: int) -> str:
    """The code of a block's product with ``count`` rows, for a processor with FEATURES of this kind."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * len(ARGUMENTS)), "block")
    build = ir.IRBuilder(function.append_basic_block())
    writer(build, kind, function.args, count).write()
    build.ret_void()
    parsed = llvm.parse_assembly(str(module))
    target = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(features=FEATURES[kind], opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(parsed, builder)
    code: str = target.emit_assembly(parsed)
    return code


def loop(code: str) -> Counter[str]:
    """How often each instruction stands in the innermost loop: between a label and the last jump back to it."""
    lines = code.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    jumps = [
        (labels[found[1]], at)
        for at, line in enumerate(lines)
        if (found := re.match(r"\tb(?:\.\w+)?\t(\.L\w+)|\tcbn?z\t\w+, (\.L\w+)", line))
        and found[1] in labels
        and labels[found[1]] < at
    ]
    first, last = min(jumps, key=lambda ends: ends[1] - ends[0])
    return Counter(found[1] for line in lines[first : last + 1] if (found := re.match(r"\t([a-z][\w.]*)", line)))


def main() -> None:
    print("| format | kind | rows | instructions per weight and row | of them products | loads | all, of a turn |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, writer in WRITERS.items():
        for kind in FEATURES:
            for count in COUNTS:
                found = loop(assembly(writer, kind, count))
                parts = [sum(found.values())] + [sum(found[each] for each in own) for own in (PRODUCTS, LOADS)]
                shares = " | ".join(f"{part / WEIGHTS / count:.3f}" for part in parts)
                print(f"| {name} | {kind} | {count} | {shares} | {parts[0]} |")


if __name__ == "__main__":
    main()
