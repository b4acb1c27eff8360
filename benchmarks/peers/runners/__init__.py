"""One program per peer: `python -m benchmarks.peers.runners.NAME`, JSON lines in and out."""
