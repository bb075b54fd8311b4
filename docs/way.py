"""Print the files of the package whose code runs in one warm `generate`, in the order in which they are first entered.

python docs/way.py smollm2-135m-instruct suffix
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType

import outpace
from outpace.threads.worker import IDLE

ROOT = Path(outpace.__file__).parent
PROMPT = "The cat sat on the mat. The cat sat on the"


def way(model: outpace.Model, method: str) -> list[str]:
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            seen.setdefault(path.relative_to(ROOT).as_posix())

    model.generate(PROMPT, method=method, max_tokens=4)
    time.sleep(IDLE + 1)  # the model's thread ends, and the next one is watched from its start
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        model.generate(PROMPT, method=method, max_tokens=12)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(seen)


if __name__ == "__main__":
    name, method = sys.argv[1:]
    files = way(outpace.load(name), method)
    sys.stdout.write("\n".join([*files, f"{len(files)} files"]) + "\n")
