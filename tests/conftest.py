"""`make test` runs the files on several processes (pytest-xdist): each computes on its part of the cores."""

import os

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before anything imports torch, which reads it once
    cores = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
