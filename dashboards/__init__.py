"""Studies in a browser: what `search` stored, shown by pages that train nothing and load nothing from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archlab.dashboards.errors import PortTaken, WeakToken

if TYPE_CHECKING:
    from archlab.dashboards.app import make_app
    from archlab.dashboards.server import serve

__all__ = ["PortTaken", "WeakToken", "make_app", "serve"]


def __getattr__(name: str) -> Any:
    """What imports Dash is imported when it is first asked for."""
    if name == "make_app":
        from archlab.dashboards.app import make_app

        return make_app
    if name == "serve":
        from archlab.dashboards.server import serve

        return serve
    raise AttributeError(f"module 'archlab.dashboards' has no attribute '{name}'")
