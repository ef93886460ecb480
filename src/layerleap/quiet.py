"""Silencing transformers while models load or are saved."""


class quiet_transformers:
    """Hide the load reports and progress bars of transformers inside a `with` block."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level = logging.get_verbosity()
        self.bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        if self.bars:
            logging.enable_progress_bar()
