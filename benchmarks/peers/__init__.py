"""The peers as they are: each in an environment of its own, on the same drives and the same text.

`table` has the benchmark; `registry` names the peers; `runners` has a small program for each, which
runs in the peer's environment and imports nothing of this project but `decoding`. `process` starts
them. `scripts/setup.sh peers` makes the environments.
"""
