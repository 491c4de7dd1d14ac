"""The real application behind a real HTTP server on a loopback port, with a fake submitter."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from uvicorn.server import ServerState

from daemon.chat_template import ChatTemplate
from daemon.connection_book import ConnectionBook
from daemon.errors import NotReady, ServeError
from daemon.frontend.app import build_app
from daemon.frontend.bodies import Limits
from daemon.frontend.served_model import ServedModel
from daemon.guarded_protocol import GuardedProtocol, Guards
from daemon.text import Tokenizer
from tests.daemon.frontend.fake_submitter import FakeSubmitter

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 256


class SwitchedReadiness:
    """Ready, and getting on, unless a test says otherwise."""

    refusal: NotReady | None = None
    stuck: NotReady | None = None

    @property
    def standstill(self) -> NotReady | None:
        return self.refusal or self.stuck


class Service:
    """One running service: where it listens, and the fakes behind it."""

    def __init__(self, tokenizer: Tokenizer, *, reply: str, limits: Limits) -> None:
        self.submitter = FakeSubmitter(tokenizer, reply=reply, context=CONTEXT)
        self.readiness = SwitchedReadiness()
        self.model = ServedModel(
            id="tiny",
            tokenizer=tokenizer,
            chat_template=ChatTemplate(TEMPLATE),
            max_context=CONTEXT,
            created=1_700_000_000,
        )
        self.app = build_app(
            self.submitter, self.model, self.readiness, lambda: ("text/plain", b"up 1\n"), limits
        )
        self.port = 0
        self.book = ConnectionBook(1000, 1000)
        self.refusals: list[ServeError] = []
        self.guards = Guards(on_refused=self.refusals.append)
        self.idle_s = 5.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Service"]:
        """The daemon's own protocol, without the parts of uvicorn's server that wait and sleep."""
        config = uvicorn.Config(self.app, lifespan="off", access_log=False, log_config=None)
        config.timeout_keep_alive = self.idle_s  # type: ignore[assignment]  # shorter than a second
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: GuardedProtocol(
                guards=self.guards,
                book=self.book,
                config=config,
                server_state=state,
                app_state={},
            ),
            "127.0.0.1",
            0,
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for connection in list(state.connections):
                connection.transport.abort()
            for task in state.tasks:
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        # Without certificates, which take longer to load than all that is asked.
        async with httpx.AsyncClient(base_url=self.url, timeout=10, verify=False) as client:
            yield client
