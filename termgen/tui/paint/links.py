"""Addresses in answers: which ones are links, and opening one in a browser.

A model writes them, so only http and https are links, and none with a user name, which could make
another host look like the one that is meant. No Textual.
"""

from __future__ import annotations

import re
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from urllib.parse import urlsplit

_ADDRESS = re.compile(r"\bhttps?://[^\s<>\"`]+", re.IGNORECASE)
_OPENING = {")": "(", "]": "[", "}": "{"}
_NOT_LAST = ".,;:!?'*_~"


def is_link(address: str) -> bool:
    if not address.isascii() or not address.isprintable() or " " in address:
        return False
    try:
        parts = urlsplit(address)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False
    return is_web and "@" not in parts.netloc


def split_links(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a text, and which of them are links."""
    done = 0
    for match in _ADDRESS.finditer(text):
        address = _without_end(match.group())
        if is_link(address):
            yield text[done : match.start()], False
            yield address, True
            done = match.start() + len(address)
    yield text[done:], False


def _without_end(address: str) -> str:
    """The address without the end of its sentence, and without a closing bracket opened before
    it."""
    while address:
        last = address[-1]
        is_open = last in _OPENING and address.count(last) > address.count(_OPENING[last])
        if last not in _NOT_LAST and not is_open:
            break
        address = address[:-1]
    return address


def open_in_browser(address: str) -> bool:
    """False where there is no browser, or one that would take the terminal. May take a while."""
    assert is_link(address)
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if type(browser) is webbrowser.GenericBrowser or browser.name == "elinks":
        return False
    # in a process of its own: what a browser prints does not come onto the screen
    subprocess.Popen(
        [sys.executable, "-m", "webbrowser", "-t", address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return True
