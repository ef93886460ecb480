"""How long it takes to load the bundled model (weights and tokenizer) from the cache."""

from common import MODEL, Row, median, timed

from layerleap import load, zoo


def run(*, smoke: bool) -> list[Row]:
    """One row. Importing torch is not counted; the time with the self-check is for information."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder = zoo.fetch(MODEL)
    logging.disable_progress_bar()

    def bare() -> None:
        AutoModelForCausalLM.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)

    bare()  # warm-up: the imports of a first load are not timed
    rounds = 2 if smoke else 5
    samples = [timed(bare) for _ in range(rounds)]
    checked = [timed(lambda: load(MODEL)) for _ in range(rounds)]
    return [
        Row(
            "load_time", median(samples), None, "seconds", 1.0, "<=", judged="ours",
            detail={
                "samples": samples, "n": rounds, "with_self_check": median(checked),
                "note": "from_pretrained of weights and tokenizer from the cached folder, warm",
            },
        )
    ]  # fmt: skip
