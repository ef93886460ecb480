"""Stream: texts, images and speech in; batches with the positions to read out."""

from layerleap.stream.batches import batches_of
from layerleap.stream.documents import iter_documents
from layerleap.stream.examples import Sampling, iter_batches, iter_examples

__all__ = ["Sampling", "batches_of", "iter_batches", "iter_documents", "iter_examples"]
