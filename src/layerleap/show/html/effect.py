"""`Effect` as HTML: the model's answer at every position, without and with edits."""

import html
from typing import TYPE_CHECKING

from layerleap.show.html.page import notes_html, styled

if TYPE_CHECKING:
    from layerleap.act.debug.effect import Effect


def effect_html(effect: "Effect") -> str:
    """One line per position, with the divergence at the last layer."""
    edits = "".join(f"<li>{html.escape(edit)}</li>" for edit in effect.edits)
    last = max(row["layer"] for row in effect.rows())
    rows = "".join(
        f"<tr><td>{row['position']}</td><td>{html.escape(row['token'])}</td>"
        f"<td>{html.escape(row['before'])}</td><td>{html.escape(row['after'])}</td>"
        f"<td>{row['kl']:.3g}</td></tr>"
        for row in effect.rows()
        if row["layer"] == last
    )
    names = ("", "token", "without edits", "with edits", "KL (nats)")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    notes = notes_html(effect.notes)
    return styled("effect", f"<ul>{edits}</ul>{notes}<table>{head}{rows}</table>")
