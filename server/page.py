"""GET /: the pool page, one file of HTML, CSS and JavaScript that loads nothing else."""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

STYLE = "page.css"
SCRIPTS = ("watch.js", "link.js", "key.js", "map.js", "tree.js", "tables.js", "chat.js", "page.js")


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent. Its policy lets a browser run only what lies in it, and ask only this server."""

    body: bytes
    policy: str
    tag: str

    @classmethod
    def load(cls) -> "Page":
        folder = resources.files("server") / "page"
        style, *scripts = ((folder / name).read_text("utf-8") for name in (STYLE, *SCRIPTS))
        script = "\n".join(scripts)
        html = (folder / "index.html").read_text("utf-8")
        html = html.replace("/* style */", style).replace("/* script */", script)
        directives = (
            "default-src 'none'",
            f"style-src {_source(style)}",
            f"script-src {_source(script)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
        body = html.encode()
        return cls(body, "; ".join(directives), f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    async def answer(self, request: HttpRequest) -> Response:
        headers = {
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "etag": self.tag,
        }
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type="text/html")


def _source(text: str) -> str:
    """What a policy calls an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
