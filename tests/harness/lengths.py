"""Lengths of randomised tests.

Each test states its default length, and TEST_LENGTH multiplies it:
    TEST_LENGTH=10 pytest tests/engine/device/loader/test_hostile_files.py
"""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("TEST_LENGTH", "1"))


def scaled(usual: int) -> int:
    return max(1, round(usual * FACTOR))
