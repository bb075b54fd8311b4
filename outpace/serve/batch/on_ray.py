"""Runs a batch on several machines, through Ray Data: each worker holds a model and answers blocks of lines."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.errors import OutpaceError
from outpace.serve.batch.engine import BatchEngine
from outpace.serve.batch.files import BatchFiles
from outpace.serve.batch.lines import BatchLine, parse
from outpace.serve.batch.records import BatchRecord
from outpace.serve.batch.run import Take
from outpace.serve.ray_cluster import Load, cause_of, connect, gpus_each

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
MOST_LINES = 256  # of a block
BLOCKS = 4  # for each worker at least, so that all of them end at about the same time
CALLS = 2  # blocks that a worker answers at a time: the next one begins before the slowest line of the last has ended


@dataclass(frozen=True)
class RayWorkers:
    """How many workers answer, and what each of them takes of its machine."""

    count: int | None = None  # None: one for each GPU or, without any, for each machine
    cpus: float | None = None  # cores of each; None: all, divided among the workers

    def resolved(self) -> tuple[int, float]:
        """Return the number of workers, and the cores of each."""
        import ray

        found = ray.cluster_resources()
        count = self.count or int(found.get("GPU", 0)) or len(ray.nodes())
        return count, self.cpus or max(1, math.floor(found["CPU"] / count))


class BatchWorker:
    """Answers blocks of lines, in the process of a Ray actor."""

    def __init__(self, load: Load):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = self._wait(self._started(load))

    def __call__(self, block: pyarrow.Table) -> Iterator[pyarrow.Table]:
        """Yield the records one by one, in the order of the lines: if Ray runs a block again, it drops what it has."""
        import pyarrow

        lines = [parse(data) for data in block["line"].to_pylist()]
        answers = [asyncio.run_coroutine_threadsafe(self._engine.answer(line), self._loop) for line in lines]
        for answer in answers:
            yield pyarrow.Table.from_pylist([asdict(answer.result())])

    async def _started(self, load: Load) -> BatchEngine:
        engine = BatchEngine(*await asyncio.to_thread(load))
        await engine.warm_up()
        return engine

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def run(load: Load, files: BatchFiles, workers: RayWorkers, take: Take) -> None:
    """Answer the lines of a batch with workers that each `load` a model; `take` gets each record as it is there."""
    import ray
    from ray.data import ActorPoolStrategy

    connect()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # bytes: each record comes at once
    count, cpus = workers.resolved()
    size = min(MOST_LINES, math.ceil(len(files.pending) / (count * BLOCKS)))
    blocks = [ray.put(block) for block in _blocks(files.lines(), size)]
    records = ray.data.from_arrow_refs(blocks).map_batches(
        BatchWorker,
        fn_constructor_args=[load],
        compute=ActorPoolStrategy(
            size=count,
            max_tasks_in_flight_per_actor=CALLS,
            max_concurrent_calls_per_actor=CALLS,
            enable_true_multi_threading=True,
        ),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=cpus,
        num_gpus=gpus_each(),
    )
    try:
        for row in records.iter_rows():
            take(BatchRecord(**row))
    except ray.exceptions.RayError as error:
        raise OutpaceError(f"Ray has stopped the batch: {cause_of(str(error))}") from error


def _blocks(lines: Iterator[BatchLine], size: int) -> Iterator[pyarrow.Table]:
    import pyarrow

    while block := list(islice(lines, size)):
        yield pyarrow.table({"line": [json.dumps(line.model_dump()).encode() for line in block]})
