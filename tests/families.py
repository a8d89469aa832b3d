"""All architectures of ``tests/checkpoints.py``, or those that are named, x every strategy x 1, 3 and 5 stages.

python -m tests.families qwen3_next gemma3n
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints import ARCHITECTURES, FURTHER, RECURRENT, UNUSUAL
from tests.integration.engine.test_exactness import test_every_strategy_gives_the_tokens_of_generate as check

if __name__ == "__main__":
    for architecture in sys.argv[1:] or [*ARCHITECTURES, *FURTHER, *RECURRENT, *UNUSUAL]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            check(architecture, Path(folder))
        print(f"{architecture}: the tokens of generate ({time.monotonic() - began:.0f} s)", flush=True)
