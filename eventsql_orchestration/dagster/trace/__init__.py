"""Following an event through Dagster's runs."""
