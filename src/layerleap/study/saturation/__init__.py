"""The study of saturation ("Looking Beyond the Top-1")."""
