"""Ride hailing: riders place orders, drivers accept and complete them, either side may cancel."""
