"""Maps: identity and linear shortcuts from any layer to any later one, and banks of them."""
