"""Worker processes: asynchronous calls, their results, and heartbeats."""
