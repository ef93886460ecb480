"""A text written by a model: the tokens, where each was read, and the account of the run.

In: a wrapped model, a prompt, a decoder.
Out: `Generation`, as text or as HTML in which every token is coloured by its exit layer.
"""

import html
import importlib
from collections.abc import Callable, Mapping, Sequence
from colorsys import hls_to_rgb
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layerleap.act.decode.account import Account
from layerleap.act.decode.decoder import Decoder
from layerleap.errors import BadSettings, BadText
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input, require_text


@dataclass(frozen=True, eq=False)
class Generation:
    """What was written after a prompt."""

    prompt: str
    pieces: list[str]  # one per token
    ids: list[int]
    account: Account
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The prompt and what follows."""
        return self.prompt + "".join(self.pieces)

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "prompt": self.prompt, "text": "".join(self.pieces), "ids": self.ids,
            "pieces": self.pieces, "account": self.account.to_dict(), "says": str(self.account),
        }  # fmt: skip

    def _repr_html_(self) -> str:
        """Every token on the colour of its layer; guessed ones are underlined."""
        return coloured(self.to_dict())


def coloured(written: Mapping[str, Any]) -> str:
    """What `Generation.to_dict` holds, as HTML that needs no style sheet."""
    account = written["account"]
    n = account["n_layers"]
    spans = []
    for piece, layer, guessed in zip(
        _marked(written["pieces"]), account["layers"], account["guessed"], strict=True
    ):
        title = f"layer {layer} of {n}" + (", guessed" if guessed else "")
        line = "border-bottom:2px solid #555;" if guessed else ""
        spans.append(
            f'<span title="{title}" style="background:{colour(layer, n)};{line}">'
            f"{html.escape(piece)}</span>"
        )
    return (
        '<div style="font:15px/1.9 system-ui,sans-serif;max-width:46em;color:#1a1a1a;'
        'background:#fff;padding:12px 16px;border-radius:6px">'
        f'<div style="white-space:pre-wrap"><span style="color:#666">'
        f"{html.escape(written['prompt'])}</span>{''.join(spans)}</div>"
        f'<div style="margin-top:10px;font-size:13px;color:#555">{_scale(n)} '
        f"{html.escape(written['says'])}.</div></div>"
    )


def _marked(pieces: Sequence[str]) -> list[str]:
    """Line ends are seen, so that their colour is; of several in a row only the last ends a line.

    A model that leaves too early may write nothing else.
    """
    text = "".join(pieces)
    marked, place = [], 0
    for piece in pieces:
        shown = ""
        for character in piece:
            place += 1
            is_last = text[place : place + 1] != "\n"
            shown += ("\u23ce\n" if is_last else "\u23ce") if character == "\n" else character
        marked.append(shown)
    return marked


def colour(layer: int, n_layers: int) -> str:
    """From warm (left early) to white (ran to the end), as pages and terminals read it."""
    share = layer / n_layers
    rgb = hls_to_rgb((20 + 30 * share) / 360, 0.62 + 0.38 * share, 0.9)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _scale(n_layers: int) -> str:
    steps = [round(n_layers * part / 6) for part in range(1, 7)]
    boxes = "".join(
        f'<span style="background:{colour(layer, n_layers)};padding:0 6px">{layer}</span>'
        for layer in dict.fromkeys(steps)
    )
    return f'<span style="border:1px solid #ddd">{boxes}</span> layers;'


class _Teller:
    """A streamer that says each token as soon as it is certain, whole characters at a time."""

    def __init__(self, decode: Callable[[list[int]], str], tell: Callable[[str], None]) -> None:
        self.decode, self.tell = decode, tell
        self.ids: list[int] = []
        self.said, self.is_prompt = "", True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then tokens."""
        if self.is_prompt:
            self.is_prompt = False
            return
        self.ids += value.flatten().tolist()
        text = self.decode(self.ids)
        piece = "" if text.endswith("\ufffd") else text[len(self.said) :]  # half a character
        self.said += piece
        self.tell(piece)

    def end(self) -> None:
        """What was held back, half a character, comes as it is."""
        rest = self.decode(self.ids)[len(self.said) :]
        if rest:
            self.tell(rest)


class _Display:
    """Shows a text in a notebook while it is written."""

    def __init__(self, prompt: str, decoder: Decoder, decode: Callable[[list[int]], str]) -> None:
        try:
            display = importlib.import_module("IPython.display").display
        except ImportError as error:
            raise BadSettings("live needs a notebook: IPython is not installed") from error
        self.prompt, self.decoder, self.decode = prompt, decoder, decode
        self.ids: list[int] = []
        self._handle = display(Generation(prompt, [], [], _blank()), display_id=True)

    def __call__(self, piece: str) -> None:
        account = self.decoder.writing
        if account is None or self._handle is None:
            return
        n = min(len(self.ids), len(account.layers))  # the last token is noted a moment later
        shown = replace(account, layers=account.layers[:n], guessed=account.guessed[:n])
        pieces = _pieces(self.decode, self.ids[:n])
        self._handle.update(Generation(self.prompt, pieces, self.ids[:n], shown))

    def end(self, written: Generation) -> None:
        """All of it, with the last token and the closing line."""
        if self._handle is not None:
            self._handle.update(written)


def _blank() -> Account:
    return Account(n_layers=1, exactness="exact", most_tokens=0)


def generate(
    transformer: Transformer,
    prompt: str,
    decoder: Decoder | None = None,
    *,
    max_new_tokens: int = 60,
    chat: bool = False,
    live: bool = False,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> Generation:
    """Let the model go on from `prompt`.

    Args:
        transformer: a decoder with a tokenizer.
        prompt: not empty.
        decoder: how; the library's own loop when None.
        max_new_tokens: tokens at most.
        chat: put the prompt into the tokenizer's chat template, as a user's turn.
        live: in a notebook, show the coloured text as it grows.
        tell: given each piece of text as it comes; an empty one if it is half a character.
        **options: of `generate`, such as do_sample and temperature.
    """
    require_text(transformer)
    tokenizer: Any = transformer.tokenizer
    if tokenizer is None:
        raise BadText(f"{transformer.identity.name} has no tokenizer; call generate with token ids")
    if max_new_tokens < 1:
        raise BadSettings(f"max_new_tokens {max_new_tokens}; at least one token was wanted")
    ids = _encode(tokenizer, prompt, chat)
    limit = longest_input(transformer)
    if len(ids) >= limit:
        raise BadText(f"the prompt has {len(ids)} tokens; this model reads at most {limit}")
    device = transformer.model.device
    entry = torch.tensor([ids], device="cpu" if device.type == "meta" else device)
    decode = lambda some: tokenizer.decode(some, skip_special_tokens=True)  # noqa: E731
    if live and decoder is not None:
        tell = _Display(prompt, decoder, decode)
    streamer = _Teller(decode, tell or (lambda piece: None))
    if isinstance(tell, _Display):
        tell.ids = streamer.ids
    # The model's own settings for sampling hold only if sampling is asked for.
    options = {"do_sample": False, **options}
    if not options["do_sample"]:
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    # Threads that share a decoder take turns, so that each gets the account of its own text.
    with nullcontext() if decoder is None else hooks_of(transformer.model).lock:
        found: Any = transformer.model.generate(
            entry, attention_mask=torch.ones_like(entry), custom_generate=decoder,
            streamer=streamer, max_new_tokens=min(max_new_tokens, limit - len(ids)), **options,
        )  # fmt: skip
        account = None if decoder is None else decoder.accounts[0]
    new = found[0, len(ids) :].tolist()
    if account is None:
        layers = [transformer.n_layers] * len(new)
        account = Account(transformer.n_layers, "exact", len(new), layers=layers)
        account.guessed = [False] * len(new)
    written = Generation(prompt, _pieces(decode, new), new, account, ids)
    if isinstance(tell, _Display):
        tell.end(written)
    return written


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not prompt.strip():
        raise BadText("the prompt is empty; at least one word was wanted")
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise BadSettings("this tokenizer has no chat template; leave out chat")
    turn = [{"role": "user", "content": prompt}]
    found = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
    return list(found["input_ids"])


def _pieces(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    """What each token adds to the text; half a character belongs to the token that ends it."""
    pieces, said = [], ""
    for n in range(1, len(ids) + 1):
        text = decode(ids[:n])
        piece = "" if text.endswith("\ufffd") and n < len(ids) else text[len(said) :]
        said += piece
        pieces.append(piece)
    return pieces
