"""Where an event comes from, as metadata."""
