"""A worker process of a sweep: it is given jobs, and tells what becomes of them."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from holdfast.configuration import to_json
from holdfast.jobs import Job

__all__ = ["KEPT_MEMORY", "Event", "Process"]

# glibc hands large tensors back to the system at once, which takes a sixteenth of a step of WRN-16-4.
_KEEP = (("MMAP_THRESHOLD", 2**30), ("TRIM_THRESHOLD", 2**32), ("TOP_PAD", 2**28))
KEPT_MEMORY = {f"MALLOC_{name}_": str(size) for name, size in _KEEP}


class Process:
    """A worker process and what it is doing."""

    def __init__(self, slot: int, folder: Path, events: "queue.Queue[Event]") -> None:
        self.slot, self.begun, self.fraction = slot, 0.0, 0.0
        self.job: Job | None = None
        self.errors: deque[str] = deque(maxlen=20)
        environment = {**KEPT_MEMORY, **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the sweep only, which then stops its workers
        )
        self._listeners = [
            threading.Thread(target=self._listen, args=(events,), daemon=True),
            threading.Thread(target=self._collect_errors, daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    def _listen(self, events: "queue.Queue[Event]") -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            events.put((self, json.loads(line)))
        code = self._process.wait()
        events.put((self, {"gone": f"its process {_ended(code)}"}))

    def _collect_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors.append(line)

    def give(self, job: Job) -> None:
        """Start a job; a process that has died says so through its events."""
        assert self._process.stdin is not None
        self.job, self.begun, self.fraction = job, time.monotonic(), 0.0
        try:
            self._process.stdin.write(json.dumps(to_json(job)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def stop(self) -> None:
        """End the process now; an unfinished job leaves no file that could be taken for a result."""
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for listener in self._listeners:
            listener.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass


Event = tuple[Process, dict[str, Any]]
"""A process, and what it says: progress, the end of its job, or its own."""


def _ended(code: int) -> str:
    """What an exit code means, as far as it is known."""
    if code == -9:  # SIGKILL
        return "was killed, by someone or because memory ran out; the same command goes on"
    return f"ended with code {code}"
