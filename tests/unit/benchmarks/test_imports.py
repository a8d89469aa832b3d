"""Every benchmark imports: names that have moved in the package are missed here, not in the middle of a night."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import benchmarks

ROOT = Path(benchmarks.__file__).parent


def test_every_benchmark_imports() -> None:
    names = [".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in sorted(ROOT.rglob("*.py"))]
    for name in names:
        import_module(name.removesuffix(".__init__"))
