"""termgen as an agent of the Agent Client Protocol: editors drive it over standard streams.

Imports the package `acp` of the extra `termgen[acp]`, so only the command imports this one. The
chat's own parts do the work: its conversation and its store (`tui.chat.state`, `tui.chat.saved`),
and the tools.
"""
