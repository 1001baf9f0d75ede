"""Layout of a SentencePiece model's tokenizer.json, for small made-up vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE


def sentencepiece_decoder() -> decoders.Decoder:
    """Marks are spaces again, byte tokens are joined, and the text's first space is dropped."""
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def sentencepiece_backend(pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """The layout of Llama 2, Mistral and TinyLlama: a space is put before every text."""
    backend = Tokenizer(
        BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=list(merges),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = sentencepiece_decoder()
    return backend
