"""ModelToServe: the model of a command that answers requests of APIs, checked at once and loaded where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from outpace.cli import checks
from outpace.cli.common import Loading, load_draft, load_model
from outpace.errors import OutpaceError
from outpace.sampling.settings import Sampling

if TYPE_CHECKING:
    from outpace.api.model import Model
    from outpace.serve.settings import ServeSettings


@dataclass(frozen=True)
class ModelToServe:
    """What a process needs to load a model and to answer with it."""

    model: str
    draft: str | None
    loading: Loading
    max_batch: int | None
    given: dict[str, Any]  # keywords of ServeSettings; the draft model is added when it is loaded

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything is loaded."""
        for package in ("fastapi", "uvicorn", "prometheus_client"):
            if find_spec(package) is None:
                raise OutpaceError(f"serving needs {package}: pip install 'outpace[serve]'")
        given = self.given
        checks.sampling_setting(given["sampling"], vars(Sampling()))
        self.loading.check(self.model, self.draft)
        asked = {"method": given["method"], "policy": given["policy"], **given["sampling"], **given["options"]}
        checks.request(asked, self.draft is not None)
        from outpace.serve.chat.tool_formats import format_of
        from outpace.serve.settings import ServeSettings

        format_of("", given["tool_format"])
        ServeSettings(**given)

    def load(self) -> tuple[Model, ServeSettings]:
        """Load the model, and its draft model if it has one."""
        from outpace.serve.settings import ServeSettings

        model, draft = load_model(self.model, self.loading), load_draft(self.draft, self.loading)
        if self.max_batch is not None:
            model.max_batch = self.max_batch
        return model, ServeSettings(**self.given, draft=draft)
