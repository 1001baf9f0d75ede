"""`TermgenAgent`: what a client may ask for, by the methods of `acp.interfaces.Agent`.

`serve` answers a client until its end of the input. Sessions are chats of the store that is the
chat screen's too, and their ids are the chats'.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import acp
from acp.agent.connection import AgentSideConnection
from acp.helpers import update_available_commands
from acp.schema import (
    AgentCapabilities,
    CloseSessionResponse,
    ConfigOptionUpdate,
    Implementation,
    InitializeResponse,
    ListSessionsResponse,
    LoadSessionResponse,
    McpCapabilities,
    NewSessionResponse,
    PromptCapabilities,
    PromptResponse,
    ResumeSessionResponse,
    SessionCapabilities,
    SessionCloseCapabilities,
    SessionConfigOptionBoolean,
    SessionConfigOptionSelect,
    SessionConfigSelectOption,
    SessionInfo,
    SessionListCapabilities,
    SessionResumeCapabilities,
    SetSessionConfigOptionResponse,
)

from termgen import __version__
from termgen.agent.engine_source import EngineSource
from termgen.agent.faults import INVALID_REQUEST, NOT_FOUND, clear_error, invalid
from termgen.agent.questions import fault_of_servers, folder_of, servers_of
from termgen.agent.session import AgentSession, House
from termgen.agent.slash_commands import available
from termgen.agent.stdio import StdioTransport
from termgen.agent.updates import replay
from termgen.config import UIConfig
from termgen.errors import ChatStoreError, TermgenError
from termgen.tools.server_config import McpServer
from termgen.tools.toolbox import Toolbox
from termgen.tui.chat.saved.chat_records import conversation_of, plain_text
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.state.context_policy import ContextPolicy
from termgen.tui.chat.state.conversation import Conversation

MODEL = "model"
"""Id of the option that chooses the model."""
OPTIONS_WAIT_S = 1.0
"""Longest wait of a new session for the engine, whose models it lists; they are sent later then."""
Options = list[SessionConfigOptionSelect | SessionConfigOptionBoolean]
MakeToolbox = Callable[[tuple[McpServer, ...], Path], Toolbox]

logger = logging.getLogger("termgen.agent")


class TermgenAgent:
    def __init__(
        self,
        engine: EngineSource,
        store: ChatStore,
        ui: UIConfig,
        *,
        given: Mapping[str, Any],
        make_toolbox: MakeToolbox,
    ) -> None:
        """given: settings of the command line, which override those of a chat that is loaded.
        make_toolbox: the tools of a session with these servers of the client's in this folder."""
        self._engine = engine
        self._store = store
        self._ui = ui
        self._given = given
        self._make_toolbox = make_toolbox
        self._house: House | None = None
        self._sessions: dict[str, AgentSession] = {}
        self._opening = asyncio.Lock()
        self._later: set[asyncio.Task[None]] = set()
        """Updates that follow an answer."""

    def on_connect(self, client: Any) -> None:
        self._house = House(client, self._engine, self._store, self._ui, self._given)
        self._store.start(report=logger.warning, replaced=self._save_again)

    def _save_again(self) -> None:
        """Save all sessions into a new file."""
        for session in self._sessions.values():
            session.save_all()

    async def close(self) -> None:
        """End the sessions, with their tools, and save what is not saved."""
        for task in self._later:
            task.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        await self._store.close()

    # -- the methods of the protocol, with its names -----------------------------------------

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        return InitializeResponse(
            protocol_version=acp.PROTOCOL_VERSION,
            agent_info=Implementation(name="termgen", title="termgen", version=__version__),
            agent_capabilities=AgentCapabilities(
                load_session=True,
                prompt_capabilities=PromptCapabilities(
                    image=False, audio=False, embedded_context=True
                ),
                mcp_capabilities=McpCapabilities(http=True, sse=False),
                session_capabilities=SessionCapabilities(
                    list=SessionListCapabilities(),
                    resume=SessionResumeCapabilities(),
                    close=SessionCloseCapabilities(),
                ),
            ),
            auth_methods=[],
        )

    async def new_session(
        self,
        cwd: str,
        mcp_servers: list[Any] | None = None,
        additional_directories: list[str] | None = None,
        **_: Any,
    ) -> NewSessionResponse:
        folder = folder_of(cwd, additional_directories)
        servers = servers_of(mcp_servers, folder)
        conversation = Conversation(system_prompt=self._ui.system_prompt)
        conversation.policy = ContextPolicy(self._ui.context_policy)
        session = self._open(conversation, servers, folder, {})
        options = await self._options_soon(session)
        self._follow(self._show_commands(session))
        return NewSessionResponse(session_id=session.session_id, config_options=options)

    async def load_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: list[Any] | None = None,
        additional_directories: list[str] | None = None,
        **_: Any,
    ) -> LoadSessionResponse:
        session = await self._go_on(cwd, session_id, mcp_servers, additional_directories)
        for update in replay(session.conversation, session.folder):
            session.outbox.put(update)
        await session.outbox.flush()
        options = await self._options_soon(session)
        self._follow(self._show_commands(session))
        return LoadSessionResponse(config_options=options)

    async def resume_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: list[Any] | None = None,
        additional_directories: list[str] | None = None,
        **_: Any,
    ) -> ResumeSessionResponse:
        session = await self._go_on(cwd, session_id, mcp_servers, additional_directories)
        options = await self._options_soon(session)
        self._follow(self._show_commands(session))
        return ResumeSessionResponse(config_options=options)

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: Any
    ) -> ListSessionsResponse:
        """The chats of the folder, and those of the chat screen, which have none."""
        if cursor is not None:
            raise invalid("cursor: the list has one page, which no cursor continues")
        found = await self._read(lambda database: database.sessions())
        here = cwd or os.getcwd()
        sessions = [
            SessionInfo(
                session_id=one.session_id,
                cwd=one.folder or here,
                title=one.name,
                updated_at=datetime.fromtimestamp(one.updated_s, UTC).isoformat(),
            )
            for one in found
            if cwd is None or one.folder in ("", cwd)
        ]
        return ListSessionsResponse(sessions=sessions)

    async def close_session(self, session_id: str, **_: Any) -> CloseSessionResponse:
        session = self._session(session_id)
        del self._sessions[session_id]
        await session.close()
        return CloseSessionResponse()

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> PromptResponse:
        return await self._session(session_id).prompt(prompt)

    async def cancel(self, session_id: str, **_: Any) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.cancel()

    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool, **_: Any
    ) -> SetSessionConfigOptionResponse:
        """Change the model: of all sessions, as there is one engine."""
        session = self._session(session_id)
        if config_id != MODEL:
            raise invalid(f"configId: there is no option {config_id!r:.100}, only {MODEL!r}")
        try:
            await self._engine.client()
            found = [choice for choice in await self._engine.models() if choice.name == value]
            if not found:
                raise invalid(f"value: there is no model {value!r:.100} here")
            if any(one.is_busy for one in self._sessions.values()):
                raise acp.RequestError(
                    INVALID_REQUEST, "a session answers a prompt: change the model after that"
                )
            try:
                if not found[0].is_current:
                    await self._engine.switch(found[0].name)
            finally:
                options = await self._options()
                for other in self._sessions.values():
                    if other is not session:
                        _show_options(other, options)
        except TermgenError as error:
            raise clear_error(error) from error
        return SetSessionConfigOptionResponse(config_options=options or [])

    # -- sessions --------------------------------------------------------------------------

    def _session(self, session_id: str) -> AgentSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise acp.RequestError(
                NOT_FOUND, f"sessionId: no session {session_id!r:.100} is open; load it first"
            )
        return session

    def _open(
        self,
        conversation: Conversation,
        servers: tuple[McpServer, ...],
        folder: Path,
        kept: Mapping[str, Any],
    ) -> AgentSession:
        assert self._house is not None, "connected"
        conversation.folder = str(folder)
        toolbox = self._make_toolbox(servers, folder)
        session = AgentSession(self._house, conversation, toolbox, folder, kept)
        self._sessions[session.session_id] = session
        return session

    async def _go_on(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: list[Any] | None,
        others: list[str] | None,
    ) -> AgentSession:
        """A session with a chat of the store, in place of one that is open with it."""
        folder = folder_of(cwd, others)
        servers = servers_of(mcp_servers, folder)
        async with self._opening:
            before = self._sessions.get(session_id)
            if before is not None and before.is_busy:
                raise acp.RequestError(INVALID_REQUEST, "this session answers a prompt: cancel it")
            if before is not None:
                del self._sessions[session_id]  # no prompt may begin in it any more
                await before.close()
            if before is not None and not before.conversation.turns:
                return self._open(before.conversation, servers, folder, {})
            wanted = plain_text(session_id)  # what is no text would end the store
            found = await self._read(lambda database: database.find(wanted))
            if found is None:
                raise acp.RequestError(
                    NOT_FOUND, f"sessionId: there is no chat {session_id!r:.100} to go on with"
                )
            try:
                conversation = conversation_of(*found)
            except ChatStoreError as error:
                raise clear_error(error) from error
            if "system_prompt" in self._given:
                conversation.system_prompt = self._given["system_prompt"]
            return self._open(conversation, servers, folder, found[0].params)

    async def _read(self, function: Callable[[Any], Any]) -> Any:
        try:
            return await self._store.read(function)
        except ChatStoreError as error:
            raise clear_error(error) from error

    # -- what follows an answer ------------------------------------------------------------

    def _follow(self, work: Any) -> None:
        """Send something after the answer that is about to be given."""
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _show_commands(self, session: AgentSession) -> None:
        session.outbox.put(update_available_commands(available()))

    async def _options_soon(self, session: AgentSession) -> Options | None:
        """The session's options, if the engine starts soon; else they are sent when it has."""
        starting = asyncio.ensure_future(self._engine.client())
        await asyncio.wait([starting], timeout=OPTIONS_WAIT_S)
        if starting.done():
            return None if starting.exception() is not None else await self._options()
        self._follow(self._show_options_later(session, starting))
        return None

    async def _show_options_later(
        self, session: AgentSession, starting: asyncio.Future[Any]
    ) -> None:
        with suppress(TermgenError):  # the prompt gets the error
            await starting
            options = await self._options()
            if self._sessions.get(session.session_id) is session:
                _show_options(session, options)

    async def _options(self) -> Options | None:
        """The choice of a model; None where the engine or its models cannot be read."""
        client = self._engine.ready
        if client is None:
            return None
        try:
            choices = await self._engine.models()
        except TermgenError as error:
            logger.warning("the models cannot be listed: %s", error)
            return None
        current = next((choice.name for choice in choices if choice.is_current), None)
        options = [
            SessionConfigSelectOption(
                value=choice.name, name=choice.name, description=choice.detail or None
            )
            for choice in choices
        ]
        if current is None:
            current = client.model.model_id
            options.insert(0, SessionConfigSelectOption(value=current, name=current))
        option = SessionConfigOptionSelect(
            type="select",
            id=MODEL,
            name="Model",
            description="answers in all sessions of this process",
            category="model",
            current_value=current,
            options=options,
        )
        return [option]


def _show_options(session: AgentSession, options: Options | None) -> None:
    if options is not None:
        session.outbox.put(
            ConfigOptionUpdate(session_update="config_option_update", config_options=options)
        )


async def serve(
    agent: TermgenAgent, reading: int, writing: int, signals: Sequence[int]
) -> int | None:
    """Answer the client until its end of the input, or one of the signals, whose number is
    returned. The descriptors are taken over."""
    transport = StdioTransport(reading, writing, fault_of_servers)
    connection = AgentSideConnection(
        cast(acp.Agent, agent), transport, listening=False, use_unstable_protocol=True
    )
    ended_by: list[int] = []

    def end(number: int) -> None:
        ended_by.append(number)
        transport.end()

    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError):  # Windows
        for number in signals:
            loop.add_signal_handler(number, end, number)
    try:
        await connection.listen()
    finally:
        await connection.close()
        await agent.close()
    return ended_by[0] if ended_by else None
