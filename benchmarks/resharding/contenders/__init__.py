"""The compared ways of moving the trainer's weights into an engine."""
