"""Stream: texts, images and speech in; batches with the positions to read out."""

from layerleap.stream.batches import batches_of
from layerleap.stream.documents import Document, iter_documents
from layerleap.stream.examples import Batch, Sampling, iter_batches, iter_examples

__all__ = [
    "Batch",
    "Document",
    "Sampling",
    "batches_of",
    "iter_batches",
    "iter_documents",
    "iter_examples",
]
