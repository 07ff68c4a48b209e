"""Places processes on machines: what roles need, which machines have room, and reserving it."""
