"""Read: lenses (a map plus the model's tail), readings, metrics, scores and saturation."""
