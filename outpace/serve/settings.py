"""ServeSettings and ServeLimits: what the person who starts a server decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outpace.errors import UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeLimits:
    """The most that one request may ask for, and that all of them may take."""

    body: int = 8 * 2**20  # bytes of a request
    seconds: float = 600.0  # of a request, from its arrival to the last byte of its reply
    body_seconds: float = 30.0  # to send the body of a request
    prepare_seconds: float = 10.0  # to encode a prompt and to compile a grammar
    waiting: int = 256  # samples that wait or are prepared; one more is refused
    connections: int = 1024  # requests inside the server, in any state
    samples: int = 16  # answers to one request
    top_logprobs: int = 20
    stops: int = 16  # stop strings
    stop_length: int = 256  # characters of each
    biases: int = 1024  # tokens of `logit_bias`, `bad_words` and `stop_token_ids`
    grammar: int = 65_536  # characters of a schema, an expression, or all schemas of the tools
    tools: int = 128
    messages: int = 4096
    max_tokens: int | None = None  # of an answer; None: what the model and the memory hold
    traced_nodes: int = 65_536  # of the trees that the trace of a reply tells of
    stored: int = 1000  # replies of /v1/responses that are kept
    stored_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise UsageError(f"{name}={value} must be above 0")


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served."""

    names: tuple[str, ...]  # by which requests may name the model; the first is the one that replies give
    root: str  # the model as it was loaded
    host: str = LOOPBACK[0]
    port: int = 8000
    keys: dict[str, str] = field(default_factory=dict, repr=False)  # owner -> API key; empty: no key is asked for
    open_without_keys: bool = False  # whether to serve other machines without keys
    allowed_hosts: tuple[str, ...] = ()  # host names, besides loopback and `host`; "*" allows all
    cors_origins: tuple[str, ...] = ()  # web pages that may call the server
    method: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)  # of the method
    draft: Any = None  # a draft model
    policy: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # settings of requests that do not give them
    share_between_keys: bool = False  # whether all keys share cached prefixes and what methods remember
    tool_format: str | None = None  # None: as the chat template shows
    log_prompts: bool = False
    otlp_endpoint: str | None = None  # a collector of OpenTelemetry, to which a span of each request goes
    playground: bool = True  # whether to serve the page for people
    drain_seconds: float = 30.0  # for running requests after SIGTERM
    limits: ServeLimits = field(default_factory=ServeLimits)

    def __post_init__(self) -> None:
        if not self.names:
            raise UsageError("a served model needs a name")
        if self.host not in LOOPBACK and not self.keys and not self.open_without_keys:
            raise UsageError(
                f"refusing to serve other machines on {self.host} without API keys: give --api-keys FILE, or "
                "--open-without-keys"
            )

    @property
    def shares_text(self) -> bool:
        """Whether drafts for one caller may repeat what a stranger wrote."""
        return self.share_between_keys if self.keys else self.open_without_keys

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which clients may reach the server."""
        return (*LOOPBACK, "[::1]", self.host, *self.allowed_hosts)
