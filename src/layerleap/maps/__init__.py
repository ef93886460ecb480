"""Maps: linear and tuned shortcuts between layers, and banks of them."""
