"""The ways of moving the trainer's weights into an engine that are compared."""
