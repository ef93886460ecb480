"""layerleap: see what a transformer is about to say, layers before it says it, and act on it.

    import layerleap as ll

    model = ll.load("smollm2")
    bank = ll.fit(model, "wikipedia", n_texts=500)     linear shortcuts, in one pass
    ll.evaluate(model, bank, "news")                   how good they are on held-out text
    ll.read(model, "The capital of France is")         what every layer would say
    ll.generate(model, "Once upon a time")             exact, or early with a rule
    ll.search(model, "guitar music")                   neurons by the words they write
    model.capture(...), model.edit(...)                look inside, and change it
    ll.neurons(model).dominant("The capital of France is")   which neurons add most, and what
    ll.weights(model).pairs("L12.H3")                  parameters as tokens, with no text
    ll.debug(model)                                    all of this on a page in the browser
    ll.stitch(model, 3, other, 3)                      first blocks of one model, last of another
    ll.finetune(model, "news", how="layer-causal")     every block learns by its own loss

Namespaces: `ll.exits`, `ll.edits`, `ll.learning`, `ll.studies`, `ll.stats`, `ll.tasks`, `ll.zoo`.
Every name is loaded when it is first used, so that `layerleap --help` does not wait for torch.

The package is one pipeline; a stage imports only from stages to its left:

    zoo -> models -> stream -> stats -> maps -> read -> act -> study -> show
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; `_HOME` below is what runs
    from layerleap import stats, zoo
    from layerleap.act import edits, exits
    from layerleap.act import learn as learning
    from layerleap.act.debug.effect import Effect, effect
    from layerleap.act.decode.decoder import Decoder, decoder
    from layerleap.act.decode.generate import Generation, generate
    from layerleap.act.learn.trainer import finetune
    from layerleap.act.stitch.stitched import stitch
    from layerleap.act.topk.interface import topk_attention
    from layerleap.errors import LayerleapError
    from layerleap.maps.bank import ShortcutBank
    from layerleap.maps.fit import default_bank, fit
    from layerleap.maps.imports import import_mat, import_tuned_lens
    from layerleap.maps.tune import tune
    from layerleap.models.discovery.laws import check_model as check
    from layerleap.models.load import load
    from layerleap.models.transformer import Transformer
    from layerleap.models.untrained import untrained
    from layerleap.read.compare.align import align
    from layerleap.read.compare.diff import diff
    from layerleap.read.evaluate import Evaluation, evaluate
    from layerleap.read.lens import Lens
    from layerleap.read.lens import read_text as read
    from layerleap.read.readings import Readings
    from layerleap.read.vocabulary.build import build_index as index
    from layerleap.read.vocabulary.build import search_index as search
    from layerleap.read.vocabulary.index import ConceptIndex
    from layerleap.read.vocabulary.neurons import Neurons, neurons
    from layerleap.read.vocabulary.weights import weights
    from layerleap.show.web.session import debug
    from layerleap.stream import tasks
    from layerleap.stream.documents import iter_documents
    from layerleap.stream.sampling import Sampling
    from layerleap.study import registry as studies
    from layerleap.study.result import StudyResult
    from layerleap.study.suitability.result import Suitability
    from layerleap.study.suitability.study import suitability

__version__ = "0.1.0"

STAGES = ("zoo", "models", "stream", "stats", "maps", "read", "act", "study", "show")

# Module and name; a module alone is a namespace. `read` is callable: see `layerleap.read`.
_HOME = {
    "stats": ("layerleap.stats", ""),
    "zoo": ("layerleap.zoo", ""),
    "edits": ("layerleap.act.edits", ""),
    "exits": ("layerleap.act.exits", ""),
    "learning": ("layerleap.act.learn", ""),
    "Effect": ("layerleap.act.debug.effect", "Effect"),
    "effect": ("layerleap.act.debug.effect", "effect"),
    "Decoder": ("layerleap.act.decode.decoder", "Decoder"),
    "decoder": ("layerleap.act.decode.decoder", "decoder"),
    "Generation": ("layerleap.act.decode.generate", "Generation"),
    "generate": ("layerleap.act.decode.generate", "generate"),
    "finetune": ("layerleap.act.learn.trainer", "finetune"),
    "stitch": ("layerleap.act.stitch.stitched", "stitch"),
    "topk_attention": ("layerleap.act.topk.interface", "topk_attention"),
    "LayerleapError": ("layerleap.errors", "LayerleapError"),
    "ShortcutBank": ("layerleap.maps.bank", "ShortcutBank"),
    "default_bank": ("layerleap.maps.fit", "default_bank"),
    "fit": ("layerleap.maps.fit", "fit"),
    "import_mat": ("layerleap.maps.imports", "import_mat"),
    "import_tuned_lens": ("layerleap.maps.imports", "import_tuned_lens"),
    "tune": ("layerleap.maps.tune", "tune"),
    "check": ("layerleap.models.discovery.laws", "check_model"),
    "load": ("layerleap.models.load", "load"),
    "Transformer": ("layerleap.models.transformer", "Transformer"),
    "untrained": ("layerleap.models.untrained", "untrained"),
    "align": ("layerleap.read.compare.align", "align"),
    "diff": ("layerleap.read.compare.diff", "diff"),
    "Evaluation": ("layerleap.read.evaluate", "Evaluation"),
    "evaluate": ("layerleap.read.evaluate", "evaluate"),
    "Lens": ("layerleap.read.lens", "Lens"),
    "Readings": ("layerleap.read.readings", "Readings"),
    "read": ("layerleap.read", ""),
    "index": ("layerleap.read.vocabulary.build", "build_index"),
    "search": ("layerleap.read.vocabulary.build", "search_index"),
    "ConceptIndex": ("layerleap.read.vocabulary.index", "ConceptIndex"),
    "Neurons": ("layerleap.read.vocabulary.neurons", "Neurons"),
    "neurons": ("layerleap.read.vocabulary.neurons", "neurons"),
    "weights": ("layerleap.read.vocabulary.weights", "weights"),
    "debug": ("layerleap.show.web.session", "debug"),
    "iter_documents": ("layerleap.stream.documents", "iter_documents"),
    "Sampling": ("layerleap.stream.sampling", "Sampling"),
    "tasks": ("layerleap.stream.tasks", ""),
    "studies": ("layerleap.study.registry", ""),
    "StudyResult": ("layerleap.study.result", "StudyResult"),
    "Suitability": ("layerleap.study.suitability.result", "Suitability"),
    "suitability": ("layerleap.study.suitability.study", "suitability"),
}

__all__ = [
    "ConceptIndex", "Decoder", "Effect", "Evaluation", "Generation", "LayerleapError", "Lens",
    "Neurons", "Readings", "Sampling", "ShortcutBank", "StudyResult", "Suitability",
    "Transformer", "align", "check", "debug", "decoder", "default_bank", "diff", "edits", "effect",
    "evaluate", "exits", "finetune", "fit", "generate", "import_mat", "import_tuned_lens", "index",
    "iter_documents", "learning", "load", "neurons", "read", "search", "stats", "stitch", "studies",
    "suitability", "tasks", "topk_attention", "tune", "untrained", "weights", "zoo",
]  # fmt: skip


if not TYPE_CHECKING:  # else a type checker would take any mistyped name for an Any

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'layerleap' has no attribute {name!r}")
        module, attribute = _HOME[name]
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
