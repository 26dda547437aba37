"""Compiling launches before they happen, in as many processes as there are processors.

A process compiles one binary at a time: Triton holds Python's lock for about half of it. So worker
processes compile into Triton's cache on disk (compile_worker.py), and this process then takes from
there what it will launch. What has been compiled is noted next to the cache, under a name made of
all that the binary depends on, so that no worker is started where nothing is missing.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.errors import TritonError

from dsv4.kernels.cache_key import cache_key
from dsv4.kernels.compile_worker import Job, Tiles
from dsv4.kernels.launch import Collection, Launch, is_descriptor
from dsv4.kernels.target import TARGETS, target_of
from dsv4.ops.device import on_device

Progress = Callable[[int, int], None]


def warm_up(
    calls: Callable[[], None],
    device: torch.device,
    *,
    workers: int,
    progress: Progress,
) -> int:
    """Compiles and loads everything that `calls` would launch, and launches nothing. Returns the
    number of binaries. `progress` is called with how many of how many are ready.

    A kernel that cannot be compiled is refused as it would be at its launch: the one that replaces
    it is compiled then, or the error is raised.
    """
    with on_device(device):
        return _warm_up(calls, device, workers, progress)


def _warm_up(
    calls: Callable[[], None], device: torch.device, workers: int, progress: Progress
) -> int:
    found = Collection()
    while True:
        found.launches.clear()
        with found.collecting():
            calls()
        refused = len(found.refused)
        if workers > 1:
            _compile_apart(list(found.launches.values()), device, workers, progress)
        for nth, (kind, launch) in enumerate(found.launches.items(), 1):
            try:
                load(launch)
            except TritonError as error:
                found.refused[kind] = error
            progress(nth, len(found.launches))
        if len(found.refused) == refused:
            return len(found.launches)


def load(launch: Launch) -> None:
    """Finds the binary, compiles it if need be, and loads it onto the device."""
    binary, _ = launch.binary()
    _ = binary.run


def _compile_apart(
    launches: Sequence[Launch], device: torch.device, workers: int, progress: Progress
) -> None:
    jobs = missing_jobs(launches, device)
    if len(jobs) < 2:  # which needs no second process
        return
    ready = len(launches) - len(jobs)
    compile_jobs(jobs, workers, lambda done, _: progress(ready + done, len(launches)))


def missing_jobs(launches: Iterable[Launch], device: torch.device) -> dict[Path, bytes]:
    """Jobs for the launches that are not compiled yet, by the path where that will be noted. They
    keep none of the launches' tensors."""
    target = target_of(device).name
    jobs = {}
    for launch in launches:
        job = job_of(launch, target)
        note = note_path(launch, job)
        if not _is_compiled(note):
            jobs[note] = pickle.dumps(job)
    return jobs


def compile_jobs(jobs: dict[Path, bytes], workers: int, progress: Progress) -> None:
    """Errors here are ignored: loading the binary meets them again and reports them."""
    missing: SimpleQueue[tuple[Path, bytes]] = SimpleQueue()
    for job in jobs.items():
        missing.put(job)
    done = 0
    lock = threading.Lock()

    def report() -> None:
        nonlocal done
        with lock:
            done += 1
            progress(done, len(jobs))

    progress(0, len(jobs))
    threads = [
        threading.Thread(target=_work, args=(missing, report), daemon=True)  # Ctrl-C ends them too
        for _ in range(min(workers, len(jobs)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(missing: SimpleQueue[tuple[Path, bytes]], report: Callable[[], None]) -> None:
    """Hands one job after the other to a process, until none is left or the process has died."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TRITON_CACHE_DIR": str(knobs.cache.dir),
        "CUDA_VISIBLE_DEVICES": "",  # a compiler needs no GPU, and no memory of one
    }
    with subprocess.Popen(
        [sys.executable, "-m", "dsv4.kernels.compile_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while True:
            try:
                note, job = missing.get_nowait()
            except Empty:
                break
            try:
                worker.stdin.write(job)
                worker.stdin.flush()
                path = pickle.load(worker.stdout)
            except (OSError, EOFError, pickle.PickleError):
                break
            if path is not None:
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(path)
            report()
        worker.stdin.close()


def job_of(launch: Launch, target: str) -> Job:
    """A launch without its tensors: a compiler only needs their types."""
    function = launch.kernel.fn
    arguments = tuple(map(_form, launch.arguments))
    return Job(
        module=function.__module__,
        name=function.__name__,
        target=target,
        arguments=arguments,
        constants=launch.constants,
        options=launch.options,
    )


def _form(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype
    if is_descriptor(argument):
        base = argument.base
        shape, strides = tuple(base.shape), tuple(base.stride())
        return Tiles(base.dtype, shape, strides, argument.block_shape, argument.layout)
    return argument


def note_path(launch: Launch, job: Job) -> Path:
    """Where it is noted that a job is done: a name made of all that its binary depends on."""
    settings = [item for item in sorted(os.environ.items()) if item[0].startswith("TRITON_")]
    key = cache_key(launch.kernel)
    target = TARGETS[job.target]
    named = sorted(job.constants.items()), sorted(target.options(**job.options).items())
    facts = (triton.__version__, key, launch.specialization()[4:], named, target, settings)
    text = repr(facts)
    return Path(knobs.cache.dir) / "dsv4" / hashlib.sha256(text.encode()).hexdigest()


def _is_compiled(note: Path) -> bool:
    try:
        return Path(note.read_text()).exists()
    except OSError:
        return False
