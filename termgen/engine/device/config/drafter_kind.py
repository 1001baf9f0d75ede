"""Which method of guessing tokens a drafter's files are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from termgen.engine.device.config.assistant_config import ASSISTANT
from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.dflash_config import DFLASH_HEAD, MUSE_HEAD
from termgen.engine.device.config.head_config import EAGLE3_HEADS
from termgen.engine.device.config.model_config import architecture_name

_METHODS = {
    **dict.fromkeys(EAGLE3_HEADS, "eagle3"),
    **dict.fromkeys((DFLASH_HEAD, MUSE_HEAD), "dflash"),
    ASSISTANT: "assistant",
}


def method_of(raw: Mapping[str, Any]) -> str:
    """raw: config.json of the drafter's folder; what is no head is a model. Raises
    CorruptFileError naming the key."""
    if "speculators_model_type" in raw:
        return "eagle3"
    return _METHODS.get(architecture_name(ConfigReader(raw)), "draft_model")
