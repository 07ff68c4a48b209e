"""Imports UCX in the process that ranks are forked from, since on import it measures the clock rate for 0.4 s."""

from megarl.resharding.direct.transports.nixl_agent import NixlAgent

NixlAgent("nobody", is_read=False).close()
