"""The logs of topics. No other room names the tables of events, or knows their form."""
