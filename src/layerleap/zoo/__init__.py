"""Zoo: bundled models, texts, images and recordings, fetched by name and cached.

```python
from layerleap import zoo

for entry in zoo.inventory():
    print(entry.name, entry.kind, entry.size, entry.is_cached)
folder = zoo.fetch("smollm2")  # downloaded, verified and converted on first use
zoo.cache_root()               # where all of it is kept
```
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
