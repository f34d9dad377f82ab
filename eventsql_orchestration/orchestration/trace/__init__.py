"""Traces of events to their origin, run by run, for every orchestrator."""
