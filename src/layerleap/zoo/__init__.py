"""Zoo: bundled models, texts, images and recordings, fetched by name and cached.

```python
from layerleap import zoo

for entry in zoo.inventory():
    print(entry.name, entry.kind, entry.size, entry.is_cached)
folder = zoo.fetch("smollm2")  # downloaded, verified and converted on first use
zoo.cache_root()               # where all of it is kept
```
"""

from layerleap.files import cache_root
from layerleap.zoo.catalog import Entry, inventory
from layerleap.zoo.download import fetch

__all__ = ["Entry", "cache_root", "fetch", "inventory"]
