"""The tables `[mcp.NAME]` of the config file: what they may say, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from termgen.commands.settings import SettingLayers
from termgen.config import UIConfig
from termgen.errors import ConfigError
from termgen.tools.configured import make_toolbox
from termgen.tools.server_config import McpServer, expanded


def read(tmp_path: Path, text: str) -> tuple[McpServer, ...]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return SettingLayers(flags={}, environ={}, config_file=path).mcp_servers


def test_servers_are_read(tmp_path: Path) -> None:
    text = """
[chat]
theme = "termgen-light"
[mcp.git]
command = "uvx"
args = ["mcp-server-git", "--repository", "."]
env = {LEVEL = "3"}
timeout = 5
[mcp.issues]
url = "https://example.org/mcp"
headers = {Authorization = "Bearer ${TOKEN}"}
[mcp.own]
command = ["python", "-m", "own"]
protocol = "legacy"
"""
    git, issues, own = read(tmp_path, text)
    assert git.command == ("uvx", "mcp-server-git", "--repository", ".")
    assert git.env == {"LEVEL": "3"} and git.timeout_s == 5.0 and git.protocol == "auto"
    assert issues.url == "https://example.org/mcp" and issues.timeout_s == 60.0
    assert expanded(issues.headers, {"TOKEN": "x"}) == {"Authorization": "Bearer x"}
    assert own.command == ("python", "-m", "own") and own.protocol == "legacy"
    assert "TOKEN" not in repr(issues), "a header may be a secret"
    box = make_toolbox(UIConfig(tools=("files",)), (git, issues, own))
    assert [one.name for one in box.providers] == ["files", "git", "issues", "own"]


def test_without_tables_there_are_none(tmp_path: Path) -> None:
    assert read(tmp_path, "") == ()
    assert make_toolbox(UIConfig(), ()).is_empty


@pytest.mark.parametrize("url", ["http://localhost:8/mcp", "http://127.0.0.1/", "http://[::1]:9/"])
def test_http_reaches_this_machine(tmp_path: Path, url: str) -> None:
    assert read(tmp_path, f'[mcp.a]\nurl = "{url}"')[0].url == url


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('comand = "x"', "unknown key 'comand'; did you mean command?"),
        ('zzz = "x"', "unknown key 'zzz', only command, args"),
        ("", "give either a command or a url"),
        ('command = "x"\nurl = "https://h/"', "give either a command or a url"),
        ("command = 3", "command must be text or a list of texts"),
        ('command = ""', "command has an empty word"),
        ('command = "x"\nargs = "y"', "args must be text or a list of texts"),
        ('command = "x"\nargs = [3]', "args must be text or a list of texts"),
        ('command = "x"\nenv = "y"', "env must be a table of texts"),
        ('command = "x"\nenv = {A = 3}', "env must be a table of texts"),
        ('command = "x"\nenv = {"A=B" = "c"}', "env: 'A=B' cannot be set"),
        ('command = "x"\nheaders = {}', "headers has no effect with a command"),
        ('url = "https://h/"\nargs = []', "args has no effect with a url"),
        ('url = "https://h/"\nenv = {}', "env has no effect with a url"),
        ("url = 3", "url must be text"),
        ('url = "ftp://h/"', "must begin with https:// or http://"),
        ('url = "http://example.org/"', "http is for this machine only"),
        ('url = "http://127.0.0.1.example.org/"', "http is for this machine only"),
        ('url = "https://[x/"', "is no address"),
        ('url = "https://h:99999/"', "is no address"),
        ('url = "https://h/"\nheaders = {"a b" = "c"}', "headers: 'a b' is no header"),
        ('url = "https://h/"\nheaders = {a = "b\\nc"}', "headers: 'a' is no header"),
        ('command = "x"\ntimeout = 0', "timeout must be a number of seconds"),
        ('command = "x"\ntimeout = true', "timeout must be a number of seconds"),
        ('command = "x"\ntimeout = inf', "timeout must be a number of seconds"),
        ('command = "x"\ntimeout = "5"', "timeout must be a number of seconds"),
        ('command = "x"\nprotocol = "2.0"', "protocol must be one of auto, legacy"),
    ],
)
def test_a_bad_table_is_one_line_that_names_it(tmp_path: Path, table: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, f"[mcp.a]\n{table}")
    line = str(raised.value)
    assert words in line and "[mcp.a]" in line and "config.toml" in line and "\n" not in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mcp = 3", "[mcp] must have tables"),
        ("[mcp]\na = 3", "[mcp.a] must be a table"),
        ('[mcp."a b"]\ncommand = "x"', "a name has 1 to 32 letters"),
        ('[mcp.files]\ncommand = "x"', "and is not files"),
        ("".join(f'[mcp.a{i}]\ncommand = "x"\n' for i in range(33)), "at most 32 tables"),
    ],
)
def test_bad_names_and_shapes(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert words in str(raised.value)


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match="the variable NOT_SET is not set"):
        expanded({"a": "x${NOT_SET}"}, {})
    assert expanded({"a": "$HOME ${ no }"}, {}) == {"a": "$HOME ${ no }"}
