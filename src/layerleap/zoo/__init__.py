"""Zoo: bundled models, texts, images and sound: fetched, verified and converted on first use."""
