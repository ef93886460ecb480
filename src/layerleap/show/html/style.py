"""The style that all HTML of results shares.

In: a piece of HTML, or a token. Out: HTML that needs no style sheet, script or font from elsewhere.
"""

import html

LENS_TITLES = {
    "id": "id (logit lens)",
    "mat": "mat (linear shortcut)",
    "tuned": "tuned (tuned lens)",
}


def styled(kind: str, body: str) -> str:
    """`body` in a box of class `layerleap-KIND`, with the style it needs."""
    return f'<style>{CSS}</style><div class="layerleap layerleap-{kind}">{body}</div>'


def visible(token: str) -> str:
    """A token with its white space made visible, escaped for HTML."""
    text = token.replace("\n", "\u23ce").replace("\t", "\u21e5")
    return html.escape(text if text.strip() else repr(text)[1:-1].replace(" ", "\u2423"))


CSS = """
.layerleap{font:14px/1.5 system-ui,sans-serif;max-width:100%}
.layerleap table{border-collapse:separate;border-spacing:1px;font:12px ui-monospace,monospace}
.layerleap caption{text-align:left;font-family:system-ui,sans-serif;padding:.3em 0}
.layerleap th{font-weight:600;text-align:center;padding:1px 6px}
.layerleap td{text-align:center;padding:1px 6px;white-space:pre}
.layerleap ol{list-style:none;margin:0;padding:0}
.layerleap h3{font-size:14px;margin:1em 0 .4em}
.layerleap .legend{font-size:13px;max-width:60em}
.layerleap .legend i{font:12px ui-monospace,monospace;padding:2px 7px}
.layerleap-readings{display:flex;flex-wrap:wrap;gap:1em 3em}
.layerleap-readings>div{overflow-x:auto;margin:.5em 0;max-width:100%}
.layerleap-readings td{background-color:#fff;color:#111;border:2px solid transparent}
.layerleap-readings td.agrees{border-color:#e07b00}
.layerleap-strip .cards{display:flex;flex-wrap:wrap;gap:12px 6px}
.layerleap-strip .cards>li{width:7.6em;font:12px ui-monospace,monospace}
.layerleap-strip .cards b{display:block;white-space:pre;overflow:hidden;text-overflow:ellipsis}
.layerleap-strip .cards b{padding:2px 4px;border-bottom:2px solid currentColor;margin-bottom:2px}
.layerleap-strip .cards ol li{display:flex;justify-content:space-between;gap:4px;padding:1px 4px}
.layerleap-strip .cards ol li{margin-top:1px;border:1px solid transparent}
.layerleap-strip .cards ol li.next{border-color:#e07b00;box-shadow:0 0 0 1px #e07b00}
.layerleap-strip .cards span{white-space:pre;overflow:hidden;text-overflow:ellipsis}
.layerleap-strip .cards i{font-style:normal;opacity:.85}
.layerleap-generation{max-width:46em;padding:12px 16px;border-radius:6px}
.layerleap-generation{font-size:15px;line-height:1.9;color:#1a1a1a;background:#fff}
.layerleap-generation .text{white-space:pre-wrap}
.layerleap-generation .prompt{color:#666}
.layerleap-generation .legend{margin:10px 0 0;color:#555}
.layerleap-generation .scale{border:1px solid #ddd}
"""
