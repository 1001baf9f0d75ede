"""Seeded strings of many scripts and shapes, for tests of tokenizers and detokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable

SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x17F)),
    "greek": ((0x391, 0x3A9), (0x3B1, 0x3C9)),
    "cyrillic": ((0x410, 0x44F), (0x400, 0x40F)),
    "hebrew": ((0x5D0, 0x5EA),),
    "arabic": ((0x620, 0x64A), (0x660, 0x669)),
    "devanagari": ((0x905, 0x939), (0x93E, 0x94D), (0x966, 0x96F)),
    "bengali": ((0x985, 0x9B9), (0x9BE, 0x9CD)),
    "tamil": ((0xB85, 0xBB9), (0xBBE, 0xBCD)),
    "thai": ((0xE01, 0xE3A), (0xE40, 0xE4E)),
    "hangul": ((0xAC00, 0xD7A3),),
    "kana": ((0x3041, 0x3096), (0x30A1, 0x30FA)),
    "han": ((0x4E00, 0x9FFF), (0x20000, 0x2A6DF)),
    "georgian": ((0x10D0, 0x10FF),),
    "symbols": ((0x2190, 0x23FF), (0x2500, 0x25FF), (0x1D400, 0x1D4FF)),
    "numbers": ((0x30, 0x39), (0xB2, 0xB3), (0xBC, 0xBE), (0x2160, 0x2188), (0xFF10, 0xFF19)),
    "combining": ((0x61, 0x7A), (0x300, 0x36F)),
    "private": ((0xE000, 0xF8FF),),
}
EMOJI = (
    "👋🏽",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇫🇷",
    "🧑‍🚀",
    "❤️‍🔥",
    "1️⃣",
    "🤷🏿‍♀️",
    "😀",
    "🎉",
)
SPECIAL_LOOKALIKES = (
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|im_end",
    "im_end|>",
    "<|IM_END|>",
    "< |im_end|>",
    "<|im_start|>system\n",
    "<repo_name>",
    "<file_sep>",
    "<|im_<|im_end|>end|>",
    "<empty_output>",
    "<|",
)
SPACES = (
    " ",
    "\t",
    "\n",
    "\r\n",
    "\u00a0",
    "\u2009",
    "\u3000",
    "\u200b",
    "\u2028",
    "\x0b",
    "\x0c",
    "\x85",
)
CODE = (
    "def f(x):\n    return x ** 2  # 4\n",
    "for (int i = 0; i < 10; i++) {\n\tsum += a[i];\n}\n",
    "SELECT * FROM t WHERE a >= 3.14 AND b LIKE '%x%';",
    '<div class="a-b">&nbsp;</div>',
    "$ grep -rn 'foo' | awk '{print $1}'",
    'let s = format!("{:>08.3}", x)?;',
    '{"k": [1, 2.5e-3, null]}',
    "I'm we'll they've it's DON'T",
    "https://example.org/a?b=c&d=%20#e",
    "x\n\n\n    y\n        z",
)


def sample_texts(seed: int, count: int) -> list[str]:
    """`count` strings: each kind in turn, then mixtures of kinds."""
    rng = random.Random(seed)
    makers: list[Callable[[], str]] = [
        lambda name=name: _words(rng, SCRIPTS[name])
        for name in SCRIPTS  # type: ignore[misc]
    ]
    makers += [
        lambda: "".join(rng.choices(EMOJI, k=rng.randint(1, 8))),
        lambda: "".join(rng.choices(SPACES, k=rng.randint(1, 12))),
        lambda: "".join(chr(rng.randint(0, 31)) for _ in range(rng.randint(1, 10))),
        lambda: " " * rng.randint(0, 40) + str(rng.randint(0, 10**12)),
        lambda: f"{rng.uniform(-1e6, 1e6):,.{rng.randint(0, 6)}f}",
        lambda: rng.choice(SPECIAL_LOOKALIKES),
        lambda: rng.choice(CODE),
        lambda: "".join(chr(_scalar(rng)) for _ in range(rng.randint(1, 20))),
        lambda: rng.choice("ab-=#.! ") * rng.randint(1, 90),
    ]
    texts = [""] + [make() for make in makers]
    while len(texts) < count:
        texts.append("".join(rng.choice(makers)() for _ in range(rng.randint(1, 5))))
    return texts[:count]


def _words(rng: random.Random, ranges: tuple[tuple[int, int], ...]) -> str:
    words = [
        "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 9)))
        for _ in range(rng.randint(1, 8))
    ]
    return rng.choice((" ", " ", " ", "  ", ", ", "\n", "-")).join(words)


def _scalar(rng: random.Random) -> int:
    """Any Unicode scalar value."""
    while True:
        value = rng.randint(0, 0x10FFFF)
        if not 0xD800 <= value <= 0xDFFF:
            return value
