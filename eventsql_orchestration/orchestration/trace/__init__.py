"""Where events come from, run by run, whichever orchestrator ran them."""
