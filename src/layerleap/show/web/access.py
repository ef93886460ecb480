"""Access control: the host names that are accepted, and the secret cookie beyond loopback.

On the loopback address, names are enough. A page of another site that points its own name at
127.0.0.1 (rebinding) sends that name. On any other address a one-time link is needed, too: it is
exchanged for a cookie, and the next link is then printed on the terminal.
"""

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import compare_digest, token_urlsafe

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = frozenset({"0.0.0.0", "::", ""})
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:@/\[\]]+))(?::\d{1,5})?", re.IGNORECASE)


def host_name(header: str) -> str | None:
    """The name in a Host header, without its port; None if it is malformed."""
    match = HOST.fullmatch(header)
    return (match[1] or match[2]).lower() if match else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass
class Access:
    """The rules of one server.

    Args:
        host: the address it listens on.
        port: of the server; cookies do not tell ports apart, so it is in the cookie's name.
        announce: is called with every new one-time link.
    """

    host: str = "127.0.0.1"
    port: int = 8123
    announce: Callable[[str], None] = lambda link: None
    _link: str = field(default_factory=lambda: token_urlsafe(24), repr=False)
    _secret: str = field(default_factory=lambda: token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        is_everywhere = self.host in EVERYWHERE
        names = (socket.gethostname(), socket.getfqdn()) if is_everywhere else ()
        self._own_names = {name.lower() for name in names}  # now: asking for them may take a while

    @property
    def is_open(self) -> bool:
        """Whether everyone who can reach the server may use it."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """Where the page is; beyond loopback, with the key that works once."""
        plain = f"http://{bracketed(self.reachable)}:{self.port}/"
        return plain if self.is_open else f"{plain}?token={self._link}"

    @property
    def reachable(self) -> str:
        """A name for a browser: a server that listens everywhere has no address of its own."""
        return socket.gethostname() if self.host in EVERYWHERE else self.host

    @property
    def cookie(self) -> str:
        """The name of the cookie."""
        return f"layerleap_{self.port}"

    def answers_to(self, header: str) -> bool:
        """Whether a Host header names this server."""
        name = host_name(header)
        if name is None:
            return False
        if name in LOOPBACK or name == self.host.lower():
            return True
        if self.host not in EVERYWHERE:
            return False
        try:  # a bare address cannot be pointed elsewhere by its owner
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._own_names
        return True

    def knows(self, cookies: str) -> bool:
        """Whether a Cookie header carries the secret."""
        # By hand: `SimpleCookie` stops at the first cookie it cannot read, which may be that of
        # another app on this host.
        pairs = (pair.strip().partition("=") for pair in cookies.split(";"))
        return any(name == self.cookie and _same(value, self._secret) for name, _, value in pairs)

    def exchange(self, token: str) -> str | None:
        """The Set-Cookie header for a one-time link, which is used up by this; else None."""
        if not _same(token, self._link):
            return None
        self._link = token_urlsafe(24)
        self.announce(self.url)
        return f"{self.cookie}={self._secret}; Path=/; HttpOnly; SameSite=Strict"


def bracketed(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def _same(text: str, secret: str) -> bool:
    return compare_digest(text.encode("utf8", "replace"), secret.encode())
