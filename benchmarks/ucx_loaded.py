"""Loads UCX where ranks are forked from: it measures the processor's clock then, for 0.4 s."""

from megarl.resharding.direct.transports.nixl_agent import NixlAgent

NixlAgent("nobody", is_read=False).close()
