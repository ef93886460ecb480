"""Tables that every report has: the claims, what was not tested, and the data."""

from layerleap.study.tables import GOOD_OR_BAD, Column, Table

CLAIMS = Table(
    "claims-table",
    "Claims, beside what this study measured",
    lambda r: [row for row in r.claims if row not in r.untested],
    (
        Column("claim", "the paper says"),
        Column("agrees", "holds here?", colours={**GOOD_OR_BAD, "cannot tell": "open"}),
        Column("seen", "measured here"),
        Column("why", "how decided"),
    ),
)
UNTESTED = Table(
    "untested-table",
    "Claims that this run could not test",
    lambda r: r.untested,
    (Column("claim", "the paper says"), Column("seen", "why it was not tested")),
)
DATA = Table(
    "data-table",
    "Data",
    lambda r: r.data,
    (
        Column("text"),
        Column("role", "used to"),
        *(Column(key, form="{:,.0f}") for key in ("documents", "texts", "rows", "tokens")),
        Column("seconds", form="{:,.1f}"),
        Column("fingerprint"),
    ),
)
