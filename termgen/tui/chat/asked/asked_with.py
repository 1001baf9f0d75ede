"""The model that answers, and the sampling parameters and the form that it is asked with. No
Textual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import RequestError
from termgen.tui.chat.saved.chat_records import restored_params
from termgen.tui.chat.state.answer_form import form_words, parse_form
from termgen.tui.chat.state.conversation import sampling_params
from termgen.tui.chat.state.sampling_fields import (
    FIELDS,
    changes,
    field_text,
    read_fields,
    without,
)
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams


class AskedWith:
    def __init__(self, client: EngineClient, ui: UIConfig) -> None:
        self._ui = ui
        self.client = client
        self.own, self.defaults = self._defaults_of(client)
        """The model's own parameters; the same with the user's settings on top."""
        self.params = self.defaults

    @property
    def form(self) -> StructuredOutputsParams | None:
        """Form that the next answers must have."""
        return self.params.structured_outputs

    def set_client(self, client: EngineClient) -> None:
        """Take another model. Parameters that the user has set stay, others become its own."""
        params = self.params_for(client)
        self.client = client
        self.own, self.defaults = self._defaults_of(client)
        self.params = params

    def params_for(self, client: EngineClient) -> SamplingParams:
        """What another model is asked with: its own parameters, but for those that the user has
        set."""
        kept = {
            name: getattr(self.params, name)
            for name in (*FIELDS, "structured_outputs")
            if getattr(self.params, name) != getattr(self.defaults, name)
        }
        return replace(self._defaults_of(client)[1], **kept)

    def _defaults_of(self, client: EngineClient) -> tuple[SamplingParams, SamplingParams]:
        own = client.model.default_params
        return sampling_params(own, UIConfig()), sampling_params(own, self._ui)

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take the parameters of a chat that is opened. The form stays."""
        self.params = restored_params(kept, replace(self.defaults, structured_outputs=self.form))

    def set(self, params: SamplingParams) -> None:
        self.params = params

    def set_field(self, name: str, text: str) -> None:
        """Set one parameter as a field of the panel does; an empty text means the default. Raises
        RequestError."""
        if name not in FIELDS:
            raise RequestError(f"there is no {name}: {', '.join(FIELDS)}", param="sampling")
        texts = {each: field_text(self.params, each) for each in FIELDS} | {name: text}
        params, errors = read_fields(texts, base=self.params, defaults=self.defaults)
        if params is None:
            raise RequestError(next(iter(errors.values())), param=next(iter(errors)))
        self.set(params)

    def reset(self) -> None:
        """Go back to the defaults. The form stays."""
        self.set(replace(self.defaults, structured_outputs=self.form))

    def sent(self) -> tuple[SamplingParams, tuple[str, ...]]:
        """The parameters that the server knows, and the values of the user's that it does not."""
        return without(self.params, self.client.model.unsent_params)

    def changed_words(self) -> tuple[str, ...]:
        """The form and the changed parameters, for the status line."""
        form = (form_words(self.form),) if self.form is not None else ()
        return (*form, *changes(self.sent()[0], self.defaults))

    def choose_form(self, command: str, argument: str) -> str:
        """`/schema`, `/regex`, `/choice`: show, set or remove the form of answers. Returns the
        words for the user; raises RequestError."""
        if argument in ("", "off"):
            if argument:
                self.set(replace(self.params, structured_outputs=None))
            asked = f"Answers are asked for as {form_words(self.form)}." if self.form else ""
            return asked or "Answers may look like anything."
        form = parse_form(command, argument)
        self.set(replace(self.params, structured_outputs=form))
        return f"Answers now follow it: {form_words(form)}. `/{command} off` ends that."
