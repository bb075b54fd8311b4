"""Start the processes of a tensor-parallel model, as torchrun would."""

from __future__ import annotations

import logging
import os
import signal
import sys

import typer

from outpace.errors import OutpaceError

SHUTDOWN = "60"  # seconds after SIGTERM until processes that still run are killed


def start(count: int) -> None:
    """Run this command again in so many processes, and end as they do."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what ends is reported below
    # The terminal sends Ctrl-C to all processes. The first of them ends the others, and then this one ends.
    signal.signal(signal.SIGINT, lambda *_: None)
    own = ["--nproc-per-node", str(count), "--log-dir", os.devnull, "--signals-to-handle", "SIGTERM,SIGHUP,SIGQUIT"]
    try:
        run(parse_args([*own, "-m", "outpace", *sys.argv[1:]]))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            raise OutpaceError(
                f"process {rank} of this tensor-parallel model was ended by signal {-failure.exitcode}, and all others "
                "with it: start the command again"
            ) from None
        raise typer.Exit(failure.exitcode) from None
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
