"""The chat in a browser: a page with a terminal, and a `termgen chat --url` for each tab.

Over textual-serve, which has neither access control nor limits: `access` adds the one, `visit` and
`web_server` the others.
"""
