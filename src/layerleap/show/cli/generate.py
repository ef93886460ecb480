"""`layerleap generate`: generate text, with each token coloured by its exit layer."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from layerleap.act.spelling import Policy, read_layers, read_rule
from layerleap.errors import BadSettings
from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import (
    TerminalProgress,
    clean_errors,
    out,
    print_json,
    tell,
    write_html,
)


def generate(
    model: options.Model,
    prompt: Annotated[str, Argument(help="Text to continue; '-' reads standard input.")],
    bank: Annotated[
        str | None,
        Option(help="Folder or hub name of a bank. Default: fit one once and cache it."),
        preflight.bank,
    ] = None,
    no_bank: Annotated[
        bool, Option("--no-bank", help="Use the logit lens, and drafts from the text alone.")
    ] = False,
    other_model: options.OtherModel = False,
    edit: Annotated[
        list[str] | None,
        Option(
            help="Change the model while it writes; repeat it. L12.N34=5 sets neuron 34 of block "
            "12 (*2 scales, +3 adds, =off switches off); L12.H3=0 a head (*0.5, =mean); "
            "L12.attn*0.5 all that attention adds, or ffn; h18+FILE*2 adds a direction. @last, "
            "@generated or @0,3 chooses positions."
        ),
        preflight.edit,
    ] = None,
    tokens: Annotated[int, Option("--tokens", "-n", help="Maximum number of tokens.")] = 60,
    stop: Annotated[
        list[str] | None, Option(help="Stop after this string. Can be given several times.")
    ] = None,
    exit: Annotated[
        str | None,
        Option(
            help="Exit early by a rule instead of decoding exactly: similarity:0.95, "
            "top-probability:0.9, entropy:0.5, patience:3, fixed:20, gap:0.8 or never; or by the "
            "plan.json that `study suitability` wrote."
        ),
        preflight.exit_rule,
    ] = None,
    checks: Annotated[
        str | None,
        Option(help="Layers at which to check the rule, separated by commas. Default: all."),
        preflight.checked_layers,
    ] = None,
    policy: Annotated[
        str,
        Option(
            help="How to fill the cache of skipped layers: recompute (run them later, exact), "
            "propagate (use the state at the exit), shortcut (use the bank's prediction)."
        ),
        preflight.choice("policy", Policy),
    ] = "recompute",
    strict: Annotated[
        bool | None,
        Option(
            "--strict/--fast",
            help="In dtypes below float32, keep the bits of generate, or not. Default: where "
            "several tokens per pass allow it.",
        ),
    ] = None,
    sample: Annotated[
        bool, Option("--sample", help="Sample tokens instead of taking the most likely.")
    ] = False,
    temperature: Annotated[float, Option(help="Set the temperature for --sample.")] = 1.0,
    seed: Annotated[int, Option(help="Set the random seed for --sample.")] = 0,
    chat: Annotated[bool, Option("--chat", help="Use the model's chat template.")] = False,
    compare: Annotated[
        bool, Option(help="Measure the agreement with the full model after --exit.")
    ] = True,
    against: Annotated[
        bool,
        Option(
            "--against-generate",
            help="Also decode with transformers' own loop, and show where the texts diverge.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        Option(help="Also write the coloured text to this HTML file."),
        preflight.target_file,
    ] = None,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Continue PROMPT: exactly and faster than one token per pass, or exiting early.

    Without --exit every token is the full model's choice: drafts are kept only if it agrees (they
    are underlined on the HTML page). With --exit each token is read where the rule
    stops. Its colour shows how early: the warmer, the fewer layers.

    Examples:
      layerleap generate smollm2 "The capital of France is"

      layerleap generate smollm2 "Once upon a time" --exit fixed:24 --html a.html

      layerleap generate smollm2 "The capital of France is" --edit "L30.N511=off"
    """
    with clean_errors():
        _check(tokens, sample, temperature, exit, checks)
        import torch

        from layerleap.act.decode.generate import generate
        from layerleap.act.edits import edit_sentence, parse_edit

        prompt = sys.stdin.read() if prompt == "-" else prompt
        how: dict[str, Any] = {"max_new_tokens": tokens, "chat": chat, "stop_strings": stop or None}
        how |= {"do_sample": True, "temperature": temperature} if sample else {}
        exits = {**_exit(exit), "checks": read_layers(checks) if checks else None, "policy": policy}
        edits = how["edits"] = [parse_edit(text) for text in edit or ()]
        transformer = loading.load(model)
        if exit is None and not json:
            tell("measuring the cost of passes over several tokens; this takes a few seconds")
        torch.manual_seed(seed)
        with ExitStack() as bars:  # closed before the first token is printed
            progress = bars.enter_context(TerminalProgress())
            painter = None if json else _Painter(prompt, transformer.n_layers, bars.close)
            generation = generate(
                transformer,
                prompt,
                bank=None if no_bank else bank or "default",
                strict=strict,
                other_model=other_model,
                compare=compare,
                on_token=painter,
                progress=progress,
                **exits,
                **how,
            )
        if painter is not None:
            out.print()
            tell(str(generation.stats))
            for parsed in edits:
                remark = parsed.remark(transformer)
                tell(f"with an edit: {edit_sentence(parsed)}{remark and f' ({remark})'}")
            if (departure := generation.departure) is not None:
                tell(
                    f"departs from the full model's text at new token {departure['place'] + 1}: "
                    f"{departure['token']!r}, where the full model writes "
                    f"{departure['full_model']!r}"
                )
        if against:
            torch.manual_seed(seed)
            theirs = generate(transformer, prompt, decoder="transformers", **how)
            tell(f"against generate: {_compared(transformer, generation, theirs)}")
        write_html(html, lambda: generation.head(transformer.identity.name), generation)
        if json:
            print_json(generation.to_dict())


def _check(
    tokens: int, sample: bool, temperature: float, exit: str | None, checks: str | None
) -> None:
    """Refuse before the model is loaded what would be refused, or ignored, afterwards."""
    if tokens < 1:
        raise BadSettings(f"--tokens is {tokens}; expected at least 1")
    if temperature != 1.0 and not sample:
        raise BadSettings("--temperature needs --sample; without it the top token is taken")
    if checks and exit is None:
        raise BadSettings("--checks needs a rule to check; pass one with --exit")


def _compared(transformer: Any, ours: Any, theirs: Any) -> str:
    """Where two generations of the same prompt diverge, in words."""
    from layerleap.act.decode.divergence import divergence

    first = divergence(transformer, theirs.prompt_ids, ours.ids, theirs.ids)
    if first is None:
        return "identical" if ours.ids == theirs.ids else "the same up to the end of the shorter"
    token, other = (transformer.tokenizer.decode([t]) for t in (first.ours, first.theirs))
    words = f"{first}; ours {token!r}, generate's {other!r}"
    if ours.stats.exactness == "rounded":
        words += ". A gap of a few rounding steps is a tie that rounding may decide either way; "
        words += "--strict keeps the bits of generate"
    return words


class _Painter:
    """Prints pieces of text as they come, on the colour of the layer they were read at."""

    def __init__(self, prompt: str, n_layers: int, before: Callable[[], None]) -> None:
        self.prompt, self.n_layers, self.before, self.has_begun = prompt, n_layers, before, False

    def __call__(self, piece: str, layer: int) -> None:
        from layerleap.results.colours import exit_colour

        plain: dict[str, Any] = {"end": "", "markup": False, "highlight": False, "soft_wrap": True}
        if not self.has_begun:  # not earlier: settings may still be refused
            self.before()
            out.print(self.prompt, style="dim", **plain)
            self.has_begun = True
        colour = exit_colour(layer, self.n_layers)
        out.print(piece, style=f"black on {colour}" if layer < self.n_layers else "", **plain)


def _exit(text: str | None) -> dict[str, Any]:
    """The rule (by name and knob) or the plan file of --exit."""
    if text is None:
        return {}
    if text.endswith(".json"):
        return {"plan": text}
    from layerleap.act.exits.rules import rule_from_dict

    return {"rule": rule_from_dict(read_rule(text))}
