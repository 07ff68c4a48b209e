"""Keys of a configuration that apply to direct refits only."""

from megarl.schema import RefitConfig


def asked_of_direct(refit: RefitConfig) -> dict[str, str]:
    """Map the keys that are set for direct refits, as given, to how each would be set without them.

    Example: `{"refit.delta=true": "refit.delta to false"}`.
    """
    asked = {
        "refit.delta=true": (refit.delta, "refit.delta to false"),
        f"refit.transport={refit.transport}": (refit.transport != "auto", "refit.transport to auto"),
        "refit.path=direct": (refit.path == "direct", "refit.path to auto"),
    }
    return {key: without for key, (is_asked, without) in asked.items() if is_asked}
