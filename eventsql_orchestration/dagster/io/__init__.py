"""The IO manager and what publishes frames."""
