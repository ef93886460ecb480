"""Learning: by gradient descent, layer by layer, or in context (`ll.learning`).

    parameters   choose(model, "keys-values") -> Chosen: which weights learn, found by structure
    lessons      Demonstration(ids, n_answer): token ids, of which the last n_answer are the answer
    gradients    gradients(model, chosen, lesson, how=...) -> Gradients, by parameter name
    descent      learn(model, demonstrations, how="full" | "layer-causal", learning_rate=...)
                 -> Learned(delta, losses)
    delta        Delta: what was learned, as a value: saved, loaded, added, scaled, applied inside
                 `with model.edit(ll.edits.ApplyDelta(delta))`; the model itself never changes
    reading      read_delta(model, delta, block, kind) -> its strongest directions, as tokens
    observe      observe(model, [Prompt(ids, n_query)]) -> [Observation]: attention outputs,
                 attention scores, states and answer at the token that predicts the answer
    trainer      finetune(model, text, how=...) -> FineTuned; also `ll.finetune`
    accuracy     in_context(model, "capitals") -> InContext: accuracy by number of demonstrations
    measures     sim_aou, sim_am, sim_am_delta, change_jaccard, recall_to_fine_tuned,
                 reading_agreement, saturation_layer, and the controls; pure functions per query

    demonstrations = [Demonstration(ids, n_answer=1), ...]
    learned = learn(model, demonstrations, how="layer-causal", learning_rate=1e-3)
    zero_shot, = observe(model, [Prompt(query, len(query))])
    in_context, = observe(model, [Prompt(context + query, len(query))])
    with model.edit(ll.edits.ApplyDelta(learned.delta)):
        trained, = observe(model, [Prompt(query, len(query))])
    sim_aou(in_context, trained, zero_shot)     # (n_layers,): one cosine per block

For a control with untrained blocks, see `layerleap.models.untrained_blocks(model, seed=0)`.
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
