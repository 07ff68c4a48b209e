"""Words before a command that root runs as somebody else."""

USER = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
REMAPPED = [*USER, "unshare", "--user", "--map-root-user", "--mount"]
"""The user is called root, and is alone, as in a container that was started so."""
