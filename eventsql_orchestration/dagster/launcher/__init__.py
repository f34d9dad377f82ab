"""A run launcher that forks runs from a process that has imported Dagster and the code location."""
