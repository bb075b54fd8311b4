"""outpace batch --ray: two workers on one machine. Ray is not among the packages for development: it has 640 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_batch import Job, job, line, read, write  # noqa: F401 (job is a fixture)

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'outpace[ray]'")

# The first run loses a worker and is then interrupted; the second one goes on; the third cannot load its model.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import ray
from outpace.errors import OutpaceError
from outpace.serve.batch import on_ray
from outpace.serve.batch.files import BatchFiles
from outpace.serve.settings import ServeSettings
from tests.tiny_tokenizers import random_model

folder = Path(sys.argv[1])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

told = []

def load():
    (folder / f"pid-{os.getpid()}").touch()
    return random_model("tiktoken"), ServeSettings(("tiny",), "tiny", method="plain")

def broken():
    raise OutpaceError("no model here")

def run(load, look):
    with BatchFiles(folder / "in.jsonl", folder / "out.jsonl") as files:
        def take(record):
            files.add(record)
            look(files.answered)
        try:
            on_ray.run(load, files, on_ray.RayWorkers(2, 0.5), take)
        except (InterruptedError, OutpaceError) as error:
            told.append(str(error))
        told.append([files.done, files.answered, files.failed, len(list(folder.glob("pid-*")))])

def first(answered):
    if answered == 5:
        os.kill(int(next(folder.glob("pid-*")).name.removeprefix("pid-")), signal.SIGKILL)
    if answered == 45:
        raise InterruptedError("stopped")

run(load, first)
run(broken, lambda answered: None)
run(load, lambda answered: None)
(folder / "told.json").write_text(json.dumps(told))  # Ray writes to standard output too
"""


def test_two_workers_of_which_one_is_killed(job: Job, tmp_path: Path) -> None:  # noqa: F811
    asked = [line(str(i), seed=i, max_tokens=20, temperature=0.9) for i in range(60)]
    write(job.source, [*asked, b"{"])
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    stopped, first, why, second, third = told
    assert stopped == "stopped" and why == "Ray has stopped the batch: no model here"
    # Lines done before, answered, failed.
    assert [each[:3] for each in (first, second, third)] == [[0, 45, 1], [45, 0, 1], [45, 15, 1]]
    ids = [record["custom_id"] for record in read(job.output)]
    assert sorted(ids) == sorted(each["custom_id"] for each in asked), "something is lost or twice"
    found = job.texts
    job.output.unlink()
    job.run("--method", "suffix")
    assert job.texts == found
