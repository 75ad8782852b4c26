"""llama.cpp's own HTTP server, started through xllamacpp: prints its address and serves until its input closes.

Runs in the Python that has xllamacpp, and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys

import xllamacpp


def main() -> None:
    """Serve `argv[1]` with `argv[2]` slots of `argv[3]` tokens each on `argv[4]` threads."""
    model, slots, tokens, threads = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = slots
    params.n_ctx = slots * tokens
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.port = 0
    server = xllamacpp.Server(params)
    print("ADDRESS " + json.dumps(server.listening_address), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
