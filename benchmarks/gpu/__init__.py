"""What only a machine with a GPU can tell: `python -m benchmarks gpu_check`, scripts/gpu_check.sh.

`check` runs the steps, each in a process of its own with a limit of time. A step is a module here
with `run(parameters, report)`; on the device "cpu" it runs anywhere, so that no mistake of its own
waits for the first GPU.
"""
