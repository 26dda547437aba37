#!/bin/bash
# Host time of launches and cold starts on the GPU machine, from the root of the repository: that repeated launches give
# what checked ones give, that no step compiles behind warmup, and how long launches and warmups take (some 6 minutes).
set -u
python=${PYTHON:-python}
$python -m pytest -q -p no:xdist tests/gpu/test_launch_gpu.py tests/gpu/test_warmup_gpu.py
$python -m benchmarks.host
$python -m benchmarks.cold_start v4-flash
