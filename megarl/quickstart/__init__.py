"""The quickstart: creates model and data, warms up, runs the whole job, and checks its export."""
