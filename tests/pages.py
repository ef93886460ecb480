"""Reads a page the way its tests need it."""

from html.parser import HTMLParser

HOSTILE = '<script>alert("x")</script>'
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags, ids and texts of a page; fails on tags that are closed in the wrong order."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.captions, self.text = [], [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "figcaption":
            self.captions.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data
        if "figcaption" in self.open:
            self.captions[-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
