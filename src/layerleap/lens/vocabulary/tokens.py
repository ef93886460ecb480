"""How tokens are shown: white space, incomplete characters and special tokens are visible.

In: a wrapped model and a token id. Out: `TokenLabel`: the text that the token adds, and a label in
which no two different texts look alike because of something invisible.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from layerleap.models.transformer import Transformer
from layerleap.results.plain import Plain

Kind = Literal["text", "space", "bytes", "special", "class"]

SIGNS = {" ": "\u2423", "\n": "\u23ce", "\r": "\u240d", "\t": "\u21e5"}
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}  # categories that no one can see
REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no whole character


@dataclass(frozen=True)
class TokenLabel(Plain):
    """One token as people should see it."""

    id: int
    text: str  # what the token adds to a text; "" for a part of a character
    label: str
    kind: Kind


_LABELS: "WeakKeyDictionary[Transformer, _Labels]" = WeakKeyDictionary()


def token_label(transformer: Transformer, index: int) -> TokenLabel:
    """The label of a token of the model's input."""
    labels = _LABELS.get(transformer)
    if labels is None:
        labels = _LABELS[transformer] = _Labels(transformer.tokenizer)
    return labels[index]


def output_label(transformer: Transformer, index: int) -> TokenLabel:
    """The label of an output: a token, or a class where the model classifies."""
    if transformer.kind.endswith("-class"):
        name = transformer.output_name(index)
        return TokenLabel(index, name, name, "class")
    return token_label(transformer, index)


def visible(text: str) -> str:
    """The text with signs for white space, and escapes for other characters no one can see."""
    return "".join(map(_visible_character, text))


def token_text(token: str) -> str:
    """The token with nothing invisible left; quotes if it is empty."""
    return visible(token) or "''"


def _visible_character(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if unicodedata.category(character) not in HIDDEN:
        return character
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"


class _Labels(dict[int, TokenLabel]):
    """The labels of one tokenizer's tokens, each made when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        if tokenizer is None:
            return
        self.special = set(tokenizer.all_special_ids)
        self.anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self.before = tokenizer.decode(self.anchor)
        self.is_anchored = bool(self.before) and self.anchor != [tokenizer.unk_token_id]

    def __missing__(self, index: int) -> TokenLabel:
        label = self[index] = self._label(index)
        return label

    def _label(self, index: int) -> TokenLabel:
        if self.tokenizer is None:
            return TokenLabel(index, str(index), str(index), "text")
        if index in self.special:
            text = self.tokenizer.decode([index])
            return TokenLabel(index, text, visible(text) or f"<{index}>", "special")
        text = self._text(index)
        if REPLACEMENT in text:
            data = _bytes(self.tokenizer, index)
            if data is not None and data != REPLACEMENT.encode():
                return TokenLabel(index, "", f"<{data.hex(' ').upper()}>", "bytes")
        if not text:  # a token that decodes to nothing, such as an unused one
            return TokenLabel(index, "", f"<{index}>", "special")
        return TokenLabel(index, text, visible(text), "text" if text.strip() else "space")

    def _text(self, index: int) -> str:
        """What the token adds to a text that has begun: many tokenizers drop a first space."""
        if self.is_anchored:
            both = self.tokenizer.decode([*self.anchor, index])
            if both.startswith(self.before):
                return both[len(self.before) :]
        return self.tokenizer.decode([index])


def _bytes(tokenizer: Any, index: int) -> bytes | None:
    """The bytes of a token, if its tokenizer works on bytes."""
    name = tokenizer.convert_ids_to_tokens(index)
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name or ""):
        return bytes.fromhex(match[1])
    try:
        return bytes(_BYTES[character] for character in name or "")
    except KeyError:
        return None


# The printable characters that byte-level tokenizers write bytes as (GPT-2).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = dict(zip(map(chr, (*_PRINTABLE, *range(256, 512))), _PRINTABLE + _OTHERS, strict=False))
