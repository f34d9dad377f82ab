"""The IO manager, and the functions that publish frames."""
