"""Keys of a configuration that are for direct refits alone."""

from megarl.schema import RefitConfig


def asked_of_direct(refit: RefitConfig) -> dict[str, str]:
    """The keys that ask something of direct refits, as they are given, and how each would be given without that.

    Example: `{"refit.delta=true": "refit.delta to false"}`.
    """
    asked = {
        "refit.delta=true": (refit.delta, "refit.delta to false"),
        f"refit.transport={refit.transport}": (refit.transport != "auto", "refit.transport to auto"),
        "refit.path=direct": (refit.path == "direct", "refit.path to auto"),
    }
    return {key: without for key, (is_asked, without) in asked.items() if is_asked}
