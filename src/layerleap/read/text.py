"""Read one text with a model: `ll.read`.

In: a model, a text, and the bank to read it through. Out: `Readings`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import find_bank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.readings import Readings


def read_text(
    transformer: Transformer,
    text: str,
    *,
    bank: ShortcutBank | str | Path | None = "default",
    positions: Sequence[int] | None = None,
    top_k: int = 5,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> Readings:
    """What every layer would say at every position of a text: logit lens and shortcuts.

        readings = ll.read(model, "The capital of France is")
        readings.to_pandas()

    Args:
        text: what to read; for a masked model, with its mask token.
        bank: shortcuts of the model, or their folder or hub name. "default" is the bank in the
            cache, fitted on first use; None reads through the logit lens alone.
        positions: which tokens to read, negative from the end; all of them when None.
        tell: called with a message before something slow starts.
    """
    found = find_bank(transformer, bank, tell=tell, progress=progress)
    return Lens(transformer, found).read(text, positions=positions, top_k=top_k)
