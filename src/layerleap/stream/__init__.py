"""Stream: texts, images and speech in; batches with the positions to read out."""
