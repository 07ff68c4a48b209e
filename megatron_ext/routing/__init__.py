"""MoE routers: their losses, the experts' load, and replay of an engine's routing."""
