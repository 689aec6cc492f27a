"""The process that does a sweep's jobs: one JSON job per line in, JSON messages per line out.

Messages: ``{"progress": 0.5}``, ``{"done": "93.1%"}``, ``{"failed": "why", "trace": "…", "fatal": false}``. A
fatal failure (the disk is full, the folder read-only) would meet every other job as well. The process ends
when its input ends, so that it does not outlive the sweep by more than one job.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["main"]

INTERVAL = 0.5  # seconds between two progress messages

# What a job may run into: bad values, divergence, torch's errors, files. Anything else ends the process, and
# the sweep shows the last lines of its error output.
EXPECTED = (
    ArithmeticError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def main() -> None:
    """Serve jobs until the input ends; the folder for their files is the only argument."""
    folder = Path(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not run into the messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle

    import torch

    from holdfast.configuration import from_json
    from holdfast.jobs import Job

    torch.set_num_threads(1)  # processes share the cores; threads would fight over them

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    for line in sys.stdin:
        last = 0.0

        def progress(fraction: float) -> None:
            nonlocal last
            if time.monotonic() - last >= INTERVAL:
                last = time.monotonic()
                send({"progress": fraction})

        try:
            job: Job = from_json(Job, json.loads(line), "job")
            send({"done": job.run(folder, progress)})
        except EXPECTED as error:  # the sweep goes on with the other jobs
            send(
                {
                    "failed": f"{type(error).__name__}: {error}",
                    "trace": "" if isinstance(error, MemoryError) else traceback.format_exc(),
                    "fatal": isinstance(error, OSError),
                }
            )


if __name__ == "__main__":
    main()
