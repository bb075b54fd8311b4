"""merged: the metrics of several replicas as one text, in which each name is explained once."""

from __future__ import annotations


def merged(texts: list[str]) -> str:
    """Return one text for Prometheus, which wants all samples of a name together."""
    families: dict[str, list[str]] = {}
    for text in texts:
        samples: list[str] = []
        for line in text.splitlines(keepends=True):
            if line.startswith("# HELP "):
                samples = families.setdefault(line, [])
            elif line.startswith("# TYPE "):
                samples[:1] = samples[:1] or [line]
            else:
                samples.append(line)
    return "".join(line for head, samples in families.items() for line in (head, *samples))
