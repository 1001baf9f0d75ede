"""Fills heads that draft for a model from its own files, or from a folder of theirs.

Tensors of an EAGLE-3 folder are called as a Llama's are, its layer `midlayer` or `layers.0`. Two
hold no weights: `d2t`, how far the target's number of a token lies behind the head's, and `t2d`,
which of the target's tokens the head knows.

Those of a DFlash folder are called as a Qwen3's are; Muse Glimmer's assistant has the two tensors
that are not in layers within an `encoder`. A Gemma 4 assistant is stored as a Gemma 4 is; where it
has clusters of tokens, `masked_embedding.token_ordering` lists them one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import torch

from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.safetensors_file import WeightFiles
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models.heads.assistant import AssistantHead
from termgen.engine.device.models.heads.dflash import DFlashHead
from termgen.engine.device.models.heads.eagle3 import Eagle3Head
from termgen.engine.device.models.heads.mtp import MtpHead
from termgen.errors import CorruptFileError, UnsupportedModelError

TO_TARGET, OF_TARGET = "d2t", "t2d"
TOKEN_ORDER = "masked_embedding.token_ordering"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_OF_EAGLE3 = (("model.", ""), ("midlayer.", "layers.0."))
_OF_DFLASH = (
    ("model.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)


def load_mtp(path: Path, head: MtpHead) -> None:
    """Raises ModelError naming the tensor that is wrong."""
    with closing(open_checkpoint(path, mtp=True)) as checkpoint:
        if not checkpoint.names():
            raise UnsupportedModelError(f"{path} has no MTP layer: there is no tensor mtp.*")
        try:
            load_weights(head, checkpoint)
        except CorruptFileError as error:
            raise CorruptFileError(f"{path}: {error}") from error


class HeadFiles(WeightFiles):
    """The tensors of a head's folder, under the names that the head has for them."""

    def __init__(self, folder: Path, names: Sequence[tuple[str, str]]) -> None:
        """names: how the stored ones begin, and what the head has instead, one after another."""
        super().__init__(folder, any_type=True)
        self.folder = folder
        self._stored: dict[str, str] = {}
        for stored in self._where:
            name = stored
            for prefix, ours in names:
                if name.startswith(prefix):
                    name = ours + name.removeprefix(prefix)
            self._stored[name] = stored

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return self._where[stored].tensor(stored)

    def numbers(self, name: str, size: int) -> torch.Tensor:
        """A tensor [size] of whole numbers, int64. Raises CorruptFileError."""
        tensor = self.tensor(name)
        if tuple(tensor.shape) != (size,) or tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            self.fail(name, f"is {kind} {list(tensor.shape)}, not {size} whole numbers")
        return tensor.long()

    def fail(self, name: str, problem: str) -> NoReturn:
        raise CorruptFileError(f"{self.folder}: tensor {name} {problem}")


def load_dflash(head: DFlashHead) -> None:
    """Raises ModelError naming the tensor that is wrong."""
    folder = head.config.folder
    assert folder is not None
    with closing(HeadFiles(folder, _OF_DFLASH)) as files:
        try:
            load_weights(head, files)
        except CorruptFileError as error:
            raise CorruptFileError(f"{folder}: {error}") from error


class AssistantFiles(HeadFiles):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ())

    def names(self) -> Sequence[str]:
        return [name for name in super().names() if name != TOKEN_ORDER]

    def clusters(self, shape: tuple[int, int]) -> torch.Tensor:
        """[num_centroids, tokens of each] int64. Raises CorruptFileError."""
        if TOKEN_ORDER not in self._stored:
            self.fail(TOKEN_ORDER, "is missing, for use_ordered_embeddings")
        size = shape[0] * shape[1]
        ids = self.numbers(TOKEN_ORDER, size)
        if not torch.equal(ids.sort().values, torch.arange(size)):
            self.fail(TOKEN_ORDER, f"does not name each of the {size} tokens once")
        return ids.view(shape)


def load_assistant(head: AssistantHead) -> None:
    """Raises ModelError naming the tensor that is wrong."""
    folder = head.config.folder
    assert folder is not None
    with closing(AssistantFiles(folder)) as files:
        if head.centroids is not None:
            number, size = head.clusters.shape
            head.use_clusters(files.clusters((number, size)))
        try:
            load_weights(head, files)
        except CorruptFileError as error:
            raise CorruptFileError(f"{folder}: {error}") from error


class Eagle3Files(HeadFiles):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _OF_EAGLE3)

    def names(self) -> Sequence[str]:
        return [name for name in super().names() if name not in (TO_TARGET, OF_TARGET)]

    def target_ids(self, config: HeadConfig) -> torch.Tensor:
        """[draft_vocab_size] int64: the target's number of each token. Raises CorruptFileError."""
        size, vocab_size = config.draft_vocab_size, config.layers.vocab_size
        ids = torch.arange(size)
        if TO_TARGET in self._stored:
            ids = ids + self.numbers(TO_TARGET, size)
        elif size != vocab_size:
            self.fail(TO_TARGET, f"is missing, for a draft_vocab_size of {size}")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            self.fail(TO_TARGET, f"names tokens beyond the target's {vocab_size}")
        if OF_TARGET in self._stored:
            known = self.numbers(OF_TARGET, vocab_size)
            if int((known != 0).sum()) != size or not bool(known[ids].all()):
                self.fail(OF_TARGET, f"marks other tokens than the {size} of {TO_TARGET}")
        return ids


def load_eagle3(config: HeadConfig, make: Callable[[bool, bool], Eagle3Head]) -> Eagle3Head:
    """make: called with whether there is an embedding of its own, and a head. Raises ModelError
    naming the tensor that is wrong."""
    folder = config.folder
    assert folder is not None
    with closing(Eagle3Files(folder)) as files:
        names = set(files.names())
        target = config.layers
        if HEAD not in names and config.draft_vocab_size != target.vocab_size:
            raise CorruptFileError(
                f"{folder}: tensor {HEAD} is missing, for a draft_vocab_size of"
                f" {config.draft_vocab_size}"
            )
        ids = files.target_ids(config)
        head = make(EMBEDDING in names, HEAD in names)
        try:
            load_weights(head, files)
        except CorruptFileError as error:
            raise CorruptFileError(f"{folder}: {error}") from error
        head.token_ids.copy_(ids)
    return head
