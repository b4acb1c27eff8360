"""Benchmarks of swarm_kv: `python -m benchmarks list`."""
