"""Common words, most of them one token of most tokenizers: what made-up prompts are written in."""

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    """
the of and to in is was for that on as with by are at from his it an be this which or had not but
one have were their has its first also after who been other they two her she all there when more
would about time if out up into some year only no new may over most people than between will then
so these him many such can school during made city where later while through used state use both
being became known under part well work years named world end name any life since number called
war before around second high until house long game south north team day music found group old
play set line home place great left general early form book public film best house right water
back down without large came did own company small country family another within system member
still area following several man because same won high won point order power include case much
local open take program level off based students get field land service street air law main west
like even head way song light government history church king body night court century million
road market body river common river force lead young action figure class single member women men
cause short event version story report party third building record track live change final half
sea total good given further age present process held side army support late last village human
run against science again often produce next design original central position station section
modern research room free white black green blue red black control cover term word page letter
front simple clear market value table summer winter morning paper stone bridge garden window
machine engine memory model token answer question reason result measure number moment
""".split()
)
"""Some come twice; that does no harm."""
