"""Remote: the same proof from outside, for any OpenAI-compatible server. The checks of `outpace verify --server`."""

from outpace.proof.remote.answers import ServerPlan
from outpace.proof.remote.reply import Reply
from outpace.proof.remote.server import Server
from outpace.proof.remote.suite import server_questions

__all__ = ["Reply", "Server", "ServerPlan", "server_questions"]
