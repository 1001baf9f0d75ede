"""An MCP server made with the `mcp` package: `python mcp_server.py [http PORT_FILE TOKEN]`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("sample")


@server.tool()
def echo(text: str) -> str:
    """Say it again."""
    return f"echo {text}"


@server.tool()
async def slow(seconds: float) -> str:
    """Take some time."""
    Path(os.environ["SEEN"]).write_text("called") if "SEEN" in os.environ else None
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if "SEEN" in os.environ:
            Path(os.environ["SEEN"]).write_text("cancelled")
        raise
    return "done"


@server.tool()
def crash(code: int) -> str:
    """End the server."""
    print("going down", file=sys.stderr, flush=True)
    os._exit(code)


@server.tool()
def big(num_chars: int) -> str:
    """A result of this length."""
    return "x" * num_chars


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it went wrong")


@server.tool()
def variables() -> str:
    """Names of the environment's variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def place(name: str) -> str:
    """The working folder, and the value of a variable."""
    return f"{os.getcwd()} {os.environ.get(name)}"


@server.tool()
def fork() -> str:
    """Leave a process behind; returns its id."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return str(child.pid)


@server.tool()
def process() -> str:
    """The id of the server's process."""
    return str(os.getpid())


@server.tool()
async def grow(context: Context) -> str:
    """Add a tool, and say that there is one more."""
    server.add_tool(process, name="grown")
    await context.session.send_tool_list_changed()
    return "grown"


@server.tool()
async def sample(context: Context) -> str:
    """Ask for more than the client gives."""
    from mcp_types import SamplingMessage, TextContent

    message = SamplingMessage(role="user", content=TextContent(type="text", text="hi"))
    answer = await context.session.create_message(messages=[message], max_tokens=10)
    return str(answer)


def _number(number: int) -> None:
    def numbered() -> str:
        return str(number)

    server.add_tool(numbered, name=f"tool {number}")


for each in range(int(os.environ.get("NUM_TOOLS", "0"))):
    _number(each)


def run_http(port_file: str, token: str) -> None:
    import uvicorn

    app = server.streamable_http_app()

    async def guarded(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and token and headers.get(b"x-token") != token.encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})  # type: ignore[operator]
            await send({"type": "http.response.body", "body": b"no"})  # type: ignore[operator]
            return
        await app(scope, receive, send)  # type: ignore[arg-type]

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets)  # type: ignore[arg-type]
            port = self.servers[0].sockets[0].getsockname()[1]
            part = Path(port_file + ".part")
            part.write_text(str(port))
            part.rename(port_file)

    Server(uvicorn.Config(guarded, port=0, log_level="error")).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        run_http(sys.argv[2], sys.argv[3])
    else:
        server.run("stdio")
