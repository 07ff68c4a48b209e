"""SGLang as an engine: its own HTTP server in its own processes and environment, and a hook in its workers."""
