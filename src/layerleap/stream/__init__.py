"""Stream: text in, batches of hidden states out, at chosen layers, sites and positions."""
