"""HTML for notebooks and standalone pages: what `_repr_html_` of a result returns."""
