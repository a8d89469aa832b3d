"""Other engines on the same model, prompts and threads: transformers' ``generate`` and llama.cpp.

Each runs in a process of its own, and takes its turn after the bench's strategies at every question:

      bench  --stdin:  {"peer": "hf", "model": ..., "threads": 2, ...}        once
                       {"token_ids": [...], "tokens": 64, ...}                a question
      peer   --stdout: {"version": ...}                                       once it has loaded
                       {"tokens": 64, "first_token_seconds": ..., ...}        its answer
                       {"error": ...}                                         in place of either
"""
