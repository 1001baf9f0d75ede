"""A bad MCP server without any package: `python mcp_raw_server.py WAY`.

It answers the handshake and the list of tools as it must; WAY is what it does at a call, or before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

WAY = sys.argv[1]
TOOL = {"name": "call", "description": "", "inputSchema": {"type": "object"}}


def send(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def at_start() -> None:
    if WAY == "exits at start":
        sys.stderr.write("no licence\x1b[31m found\n")
        sys.exit(3)
    if WAY == "hangs at start":
        time.sleep(600)
    if WAY == "banner":
        write(b"Welcome!\n\xff\xfe\n\n")
    if WAY == "garbage at start":
        while True:
            write(b"garbage\n" * 100)
    if WAY == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def at_call(request: dict[str, Any]) -> None:
    answers: dict[str, Any] = {
        "deep": {"content": [], "structuredContent": deep(100), "isError": False},
        "shape": {"content": "text"},
        "nothing": {"content": []},
        "image": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]},
        "codes": {"content": [{"type": "text", "text": "\x1b]0;t\x07\u202e"}]},
    }
    if WAY in answers:
        send({"jsonrpc": "2.0", "id": request["id"], "result": answers[WAY]})
    elif WAY == "truncated":
        write(b'{"jsonrpc": "2.0", "id": ' + str(request["id"]).encode() + b', "result": {"con\n')
    elif WAY == "very deep":
        write(b'{"a":' * 100_000 + b"\n")
    elif WAY == "garbage":
        while True:
            write(b"x" * 1000 + b"\n")
    elif WAY == "news":
        note = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        line = json.dumps(note).encode() + b"\n"
        while True:
            write(line * 100)
    elif WAY == "long line":
        while True:
            write(b"x" * 65536)
    elif WAY == "two calls" and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os._exit(1)
    elif WAY in ("banner", "stays", "two calls", "pages"):
        result = {"content": [{"type": "text", "text": "fine"}]}
        send({"jsonrpc": "2.0", "id": request["id"], "result": result})
    elif WAY == "dies":
        os._exit(1)


def deep(levels: int) -> Any:
    return {"x": deep(levels - 1)} if levels else 1


def main() -> None:
    at_start()
    page = 0
    for line in sys.stdin:
        request = json.loads(line)
        method, number = request.get("method"), request.get("id")
        if method == "initialize":
            result: Any = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        elif method == "tools/list":
            page += 1
            result = {"tools": [TOOL]}
            if WAY == "pages":
                result = {"tools": [{**TOOL, "name": f"t{page}"}], "nextCursor": str(page)}
            if WAY == "grows":
                result = {"tools": [{**TOOL, "name": f"t{page}"}]}
            if WAY == "bad schema":
                result = {"tools": [{**TOOL, "inputSchema": {"type": "object", "x": deep(90)}}]}
        elif method == "tools/call":
            at_call(request)
            continue
        elif number is not None:
            send({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no"}})
            continue
        else:
            continue
        send({"jsonrpc": "2.0", "id": number, "result": result})
    if WAY == "stays":
        time.sleep(600)


if __name__ == "__main__":
    main()
