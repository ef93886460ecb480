"""`layerleap models`, `tasks`, `check`, `read`, `saturation` and `card`: look at what there is."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import (
    TerminalProgress,
    clean_errors,
    out,
    print_json,
    show,
    tell,
    write_html,
)


def models(json: options.Json = False) -> None:
    """List bundled models, texts, images and recordings, and which of them are cached.

    Each is downloaded on first use. dinov2-mnist (DINOv2 with a linear head for digits), vit-mnist
    (a small ViT for digits) and bert-reviews (a small BERT for film reviews) are then trained on
    this machine, once, in a few minutes; their accuracy on held-out images or texts is shown here
    and in their folder's layerleap.json. To train one again, delete its folder.

    Example: layerleap models
    """
    from layerleap.zoo import inventory

    with clean_errors():
        rows = [entry.to_dict() for entry in inventory()]
        if json:
            print_json(rows)
        else:
            from layerleap.show.cli.tables import inventory_table

            out.print(inventory_table(rows))


def tasks(
    model: Annotated[
        str | None,
        Argument(help="Measure this model: a bundled or hub name, folder or GGUF file."),
        preflight.model,
    ] = None,
    task: Annotated[
        list[str] | None,
        Option(
            help="A bundled task, or a .jsonl, .csv or .parquet file with the fields text and "
            "label; repeat it. All bundled ones by default."
        ),
        preflight.task,
    ] = None,
    template: Annotated[
        str | None, Option(help="How a text becomes a prompt, with {text} in it.")
    ] = None,
    field: Annotated[str, Option(help="The field of files that holds the text.")] = "text",
    label: Annotated[str, Option(help="The field of files that holds the answer.")] = "label",
    labels: Annotated[
        str | None, Option(help="Words for its values, such as 0=Negative,1=Positive.")
    ] = None,
    answers: Annotated[
        str,
        Option(help="token: answers of one token; sequence: score answers of any length."),
        preflight.choice("answers", ("token", "sequence")),
    ] = "token",
    queries: Annotated[
        int, Option(help="Queries per seed, at most."), preflight.at_least("queries", 1)
    ] = 100,
    seeds: Annotated[
        int, Option(help="How often demonstrations are drawn."), preflight.at_least("seeds", 1)
    ] = 3,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """List the bundled tasks, or measure which of them MODEL learns in context.

    Accuracy without demonstrations, with more and more of them, and with their answers shuffled,
    beside the commonest answer.

    Example: layerleap tasks smollm2 --task plurals --task opposites
    """
    with clean_errors():
        from layerleap.stream.tasks import load, names
        from layerleap.stream.tasks.load import parse_labels

        words = None if labels is None else parse_labels(labels)
        how: dict[str, Any] = {"template": template, "field": field, "label": label}
        listed = [name for names_ in task or names() for name in names_.split(",") if name]
        chosen = [load(name, labels=words, **how) for name in listed]
        if model is None:
            rows = [task_.to_dict() for task_ in chosen]
        else:
            many = f"{len(chosen)} tasks, {seeds} draws of {queries} queries"
            tell(f"measures {model} on {many} for each number of demonstrations")
            from layerleap.act.learning.accuracy import in_context

            transformer = loading.load(model)
            with TerminalProgress() as progress:
                how = {"queries": queries, "seeds": range(seeds), "answers": answers}
                accuracies = [in_context(transformer, t, progress=progress, **how) for t in chosen]
                rows = [accuracy.to_dict() for accuracy in accuracies]
        if json:
            print_json(rows)
            return
        from layerleap.show.cli.tables import TASKS, accuracy_table, rows_table

        out.print(rows_table(TASKS, rows) if model is None else accuracy_table(rows))


def check(
    model: options.Model, loading: options.Loading = options.Loading(), json: options.Json = False
) -> None:
    """Verify that MODEL can be read: run all laws; exit code 0 only if all of them hold.

    No tokenizer is needed.

    Example: layerleap check ./my-model --blocks transformer.h --tail transformer.ln_f,lm_head
    """
    with clean_errors():
        from layerleap.models.discovery.laws import check
        from layerleap.models.load import load_bare

        bare = load_bare(model, revision=loading.revision, dtype=loading.dtype)
        how: dict[str, Any] = {"laws": loading.laws, "blocks": loading.blocks}
        verdicts = check(bare, tail=options.parse_words(loading.tail), **how)
        show(verdicts, json=json)
    if any(verdict.status == "fails" for verdict in verdicts):
        raise Exit(1)


def read(
    model: options.Model,
    text: options.Prompt,
    bank: Annotated[
        str | None,
        Option(help="Folder or hub name of a bank. By default, one is fitted once and cached."),
        preflight.bank,
    ] = None,
    no_bank: Annotated[bool, Option("--no-bank", help="Only the logit lens.")] = False,
    other_model: options.OtherModel = False,
    position: Annotated[
        int | None, Option(help="Which token's reading to show; the last by default.")
    ] = None,
    top_k: Annotated[
        int, Option(help="How many tokens per layer."), preflight.at_least("top_k", 1)
    ] = 3,
    target: Annotated[
        str | None, Option(help="What an encoder-decoder writes for TEXT; this is what is read.")
    ] = None,
    html: Annotated[
        Path | None, Option(help="Also write all positions as a page."), preflight.target_file
    ] = None,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Show the prediction at every layer of MODEL: logit lens and linear shortcuts.

    The logit lens reads a layer's state as if it were the last one; a linear shortcut first maps
    it to the last layer. A tick marks the model's own answer; KL is the divergence from the model's
    distribution, in nats.

    Example: layerleap read smollm2 "The capital of France is"
    """
    with clean_errors():
        from layerleap import Lens
        from layerleap.maps.fit import find_bank

        transformer = loading.load(model)
        with TerminalProgress() as progress:
            shortcuts = find_bank(
                transformer,
                None if no_bank else bank or "default",
                other_model=other_model,
                progress=progress,
            )
        lens = Lens(transformer, shortcuts)
        if shortcuts is not None:
            rows = shortcuts.data.get("rows_fitted")
            source = f", fitted on {shortcuts.data.get('text')}, {rows:,} rows" if rows else ""
            tell(f"{shortcuts!r}{source}")
        prompt: Any = text if target is None else (text, target)
        if position is None and not (html or json):
            position = lens.last_position(prompt)  # all that will be shown
        positions = None if html or position is None else [position]
        readings = lens.read(prompt, positions=positions, top_k=top_k)
        write_html(html, lambda: readings.head(transformer.identity.name, text), readings)
        if json:
            print_json(readings.to_dict())
            return
        out.print(readings.only(readings.positions[-1] if position is None else position))


def saturation(
    model: options.Model,
    text: options.Prompt,
    ranks: Annotated[int, Option("--ranks", "-k", help="How many ranks.")] = 5,
    position: Annotated[
        list[int] | None,
        Option(help="Which tokens to show, negative from the end; repeat it. All by default."),
    ] = None,
    bank: options.Bank = None,
    other_model: options.OtherModel = False,
    html: options.Html = None,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Show the layer from which each of MODEL's top tokens keeps its rank.

    One line per token of the text: the most likely next tokens, best first, each with its
    saturation layer. Darker is earlier; no colour means that only the last layer put it there.

    Example: layerleap saturation smollm2 "The capital of France is" --html strip.html
    """
    with clean_errors():
        from layerleap import Lens
        from layerleap.maps.fit import find_bank

        transformer = loading.load(model)
        lens = Lens(transformer, find_bank(transformer, bank, other_model=other_model))
        strip = lens.saturation(text, positions=position or None, k=ranks)
        write_html(html, lambda: strip.head(transformer.identity.name, text), strip)
        show(strip, json=json)


def card(bank: Annotated[str, Argument(help="Folder or hub name of a bank.")]) -> None:
    """Show a bank's model, training text and scores.

    Example: layerleap card bank
    """
    with clean_errors():
        from layerleap import ShortcutBank

        out.print(ShortcutBank.from_pretrained(bank).card(), highlight=False, markup=False)
