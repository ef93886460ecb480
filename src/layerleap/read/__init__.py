"""Read: a lens is a map plus the tail of the model; readings and measures of them."""
