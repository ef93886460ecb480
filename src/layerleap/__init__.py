"""layerleap: see what a transformer is about to say, layers before it says it, and act on it.

    import layerleap as ll

    model = ll.load("smollm2")
    bank = ll.fit(model, "wikipedia", n_texts=500)     linear shortcuts, in one pass
    ll.evaluate(model, bank, "news")                   how good they are on held-out text
    ll.read(model, "The capital of France is")         what every layer would say
    ll.attribute(model, "The capital of France is")    what each part adds to the answer
    ll.attention(model, "The capital of France is")    which tokens each head looks at
    ll.generate(model, "Once upon a time")             exact, or early with a rule
    ll.search(model, "guitar music")                   neurons by promoted tokens
    model.capture(...), model.edit(...)                look inside, and change it
    ll.patch(model, clean, corrupt, metric=...)        which part carries a difference
    ll.direction(model, positive, negative)            a vector to steer with
    ll.neurons(model).dominant("The capital of France is")   which neurons add most, and what
    ll.weights(model).pairs("L12.H3")                  parameters as tokens, with no text
    ll.debug(model)                                    all of this on a page in the browser
    ll.stitch(model, 3, other, 3)                      first blocks of one model, last of another
    ll.finetune(model, "news", how="layer-causal")     every block learns by its own loss

Namespaces: `ll.exits`, `ll.edits`, `ll.learning`, `ll.metrics`, `ll.studies`, `ll.stats`,
`ll.tasks`, `ll.zoo`.
Every name is loaded when it is first used, so that `layerleap --help` does not wait for torch.

The package is one pipeline; a stage imports only from stages to its left:

    zoo -> models -> stream -> stats -> maps -> lens -> act -> study -> show
"""

import lazy_loader

__version__ = "0.1.0"

STAGES = ("zoo", "models", "stream", "stats", "maps", "lens", "act", "study", "show")

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
