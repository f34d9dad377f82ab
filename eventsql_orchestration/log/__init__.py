"""Floor 2: the ordered log. Publishing, transfer, consuming, claims, dead letters and lag."""
