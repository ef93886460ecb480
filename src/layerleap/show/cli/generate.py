"""`layerleap generate`: a text as it is written, each token coloured by its exit layer."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from layerleap.errors import BadSettings
from layerleap.show.cli.options import Blocks, Dtype, Json, Model, Revision, Tail, load_model
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell

EXAMPLES = {
    "similarity": "0.98", "top-probability": "0.9", "entropy": "0.5", "gap": "0.8", "fixed": "20",
}  # fmt: skip


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to go on from; '-' for standard input.")],
    bank: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a bank. Without it, one is fitted once and kept."),
    ] = None,
    no_bank: Annotated[
        bool, typer.Option("--no-bank", help="Guess from the text alone; read states as they are.")
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to generate at most.")] = 60,
    exit: Annotated[
        str | None,
        typer.Option(
            help="Leave early by a rule instead of decoding exactly: similarity:0.95, "
            "top-probability:0.9, entropy:0.5, patience:3, fixed:20, gap:0.8 or never; or the "
            "file that `suitability --plan` wrote."
        ),
    ] = None,
    checks: Annotated[
        str | None,
        typer.Option(help="Layers at which the rule is asked, with commas; default all."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="What skipped layers keep of a token: recompute (exact, a little later), "
            "propagate (its state at the exit), shortcut (what the bank predicts)."
        ),
    ] = "recompute",
    strict: Annotated[
        bool, typer.Option("--strict", help="One token per pass in dtypes below float32.")
    ] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random.")] = False,
    temperature: Annotated[float, typer.Option(help="For --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For --sample.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    compare: Annotated[
        bool, typer.Option(help="With --exit: measure the agreement afterwards.")
    ] = True,
    against: Annotated[
        bool,
        typer.Option(
            "--against-generate", help="Also let the library decode, and say where the texts part."
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write the coloured text as a page.")
    ] = None,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Write on from PROMPT, faster than one token per pass and exactly, or leaving layers early.

    Without --exit the text is the model's own: guesses are only kept if the full model agrees (on
    the page, they are underlined). With --exit each token is read where the rule stops, and its
    colour says how early: the warmer, the fewer layers.

    Examples:
      layerleap generate smollm2 "The capital of France is"

      layerleap generate smollm2 "Once upon a time" --exit similarity:0.97 --html text.html
    """
    with clean_errors():
        import torch

        from layerleap import decoder
        from layerleap.act.decode.generate import generate

        _check(tokens, sample, temperature, exit, checks)
        prompt = sys.stdin.read() if prompt == "-" else prompt
        rule, plan = _rule(exit)
        bank = bank or plan.get("bank")
        transformer = load_model(model, blocks, tail, revision, dtype)
        is_bare = no_bank or plan.get("map") == "id"
        decoding = decoder(
            None if is_bare else _bank(transformer, bank), rule=rule,
            checks=_layers(checks) or plan.get("layers"), policy=policy, strict=strict,
            compare=compare, transformer=transformer,
        )  # fmt: skip
        if rule is None and not json:
            tell("measuring what passes over several tokens cost here; a few seconds")
        torch.manual_seed(seed)
        options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if sample else {}
        teller = _Painter(prompt, decoding, transformer.n_layers) if not json else None
        written = generate(
            transformer, prompt, decoding, max_new_tokens=tokens, chat=chat, tell=teller, **options
        )
        if teller is not None:
            teller.end(str(written.account))
        if against:
            tell(_against(transformer, written, tokens, chat, seed, options))
        if html is not None:
            from layerleap.show.html.generation import write_generation

            tell(f"page: {write_generation(written, transformer.identity.name, html)}")
        if json:
            print_json(written.to_dict())


def _check(
    tokens: int, sample: bool, temperature: float, exit: str | None, checks: str | None
) -> None:
    """Refuse at once what would be refused, or passed over, after the model is loaded."""
    if tokens < 1:
        raise BadSettings(f"--tokens {tokens}; at least one token was wanted")
    if temperature != 1.0 and not sample:
        raise BadSettings("--temperature is for --sample; without it the likeliest token is taken")
    if checks and exit is None:
        raise BadSettings("--checks says where a rule is asked; give one with --exit")


def _bank(transformer: Any, name: str | None) -> Any:
    """The bank of that name, or the model's own, fitted now if it is not yet."""
    from layerleap import ShortcutBank
    from layerleap.maps.fit import default_bank

    if name is not None:
        return ShortcutBank.from_pretrained(name)
    with TerminalProgress() as progress:
        return default_bank(transformer, tell=tell, progress=progress)


def _against(
    transformer: Any, written: Any, tokens: int, chat: bool, seed: int, options: dict[str, Any]
) -> str:
    """How the text compares with what the library's own loop writes."""
    import torch

    from layerleap.act.decode.divergence import divergence
    from layerleap.act.decode.generate import generate

    torch.manual_seed(seed)
    prompt = written.prompt
    theirs = generate(transformer, prompt, None, max_new_tokens=tokens, chat=chat, **options)
    parted = divergence(transformer, theirs.prompt_ids, written.ids, theirs.ids)
    if parted is not None:
        ours, other = (transformer.tokenizer.decode([t]) for t in (parted.ours, parted.theirs))
        said = f"against generate: {parted}; ours {ours!r}, generate's {other!r}"
        if written.account.exactness == "rounded":
            said += ". A gap of a few roundings is a tie that either way of rounding may decide; "
            said += "--strict decodes one token at a time, as generate does"
        return said
    same = written.ids == theirs.ids
    return "against generate: identical" if same else "against generate: of another length"


class _Painter:
    """Prints pieces of text as they come, on the colour of the layer they were read at."""

    def __init__(self, prompt: str, decoding: Any, n_layers: int) -> None:
        self.decoding, self.n_layers, self.prompt = decoding, n_layers, prompt
        self.has_begun = False

    def __call__(self, piece: str) -> None:
        from layerleap.show.html.colours import exit_colour

        if not self.has_begun:  # not earlier: settings may yet be refused
            out.print(
                self.prompt, end="", style="dim", markup=False, highlight=False, soft_wrap=True
            )
            self.has_begun = True
        account = self.decoding.writing
        layer = self.n_layers if account is None else account.reading or self.n_layers
        is_early = layer < self.n_layers
        style = f"black on {exit_colour(layer, self.n_layers)}" if is_early else ""
        out.print(piece, end="", style=style, markup=False, highlight=False, soft_wrap=True)

    def end(self, said: str) -> None:
        out.print()
        tell(said)


def _layers(text: str | None) -> list[int] | None:
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BadSettings(
            f"checks {text!r} are not layers with commas, such as 20,24,28"
        ) from error


def _rule(text: str | None) -> tuple[Any, dict[str, Any]]:
    """A rule by name and knob, or the rule of a plan and the plan."""
    if text is None:
        return None, {}
    from layerleap.act.exits.rules import RULES, ThresholdRule, rule_from_dict

    if text.endswith(".json"):
        from layerleap.files import read_json

        plan = read_json(Path(text))
        if not isinstance(plan, dict) or "rule" not in plan or "layers" not in plan:
            raise BadSettings(f"{text} is no plan: it lacks 'rule' or 'layers'")
        if plan["rule"] is None:
            raise BadSettings(f"{text} says: exit nowhere; leave out --exit to decode exactly")
        return rule_from_dict(plan["rule"]), plan
    name, _, knob = text.partition(":")
    kind = RULES.get(name)
    if kind is None or name in ("oracle", "task"):  # one knows the answer, one needs its probe
        names = ", ".join(rule for rule in RULES if rule not in ("oracle", "task"))
        raise BadSettings(f"no rule is called {name!r}; there are: {names}")
    if not issubclass(kind, ThresholdRule):
        return rule_from_dict({"name": name}), {}
    try:
        value = int(knob) if kind.is_integer else float(knob)
    except ValueError as error:
        example = EXAMPLES.get(name, "3")
        raise BadSettings(
            f"rule {name!r} needs a number after a colon, as in {name}:{example}"
        ) from error
    more = {"length": 30.0} if name == "gap" else {}
    return rule_from_dict({"name": name, kind.knob: value, **more}), {}
